"""A small random Gemma 4 pair whose heads are as large as published ones, so that the fast kernels for these
run: 256 where a layer slides, 512 where it does not, values that are raw keys, an mlp beside experts."""

import json

import ml_dtypes
import numpy as np
from minidflash.weights import names

from minidflash.config import read_target
from tests.automaton import write_safetensors
from tests.random_pair import write_random

WINDOW = 24


def write_gemma(folder, has_experts=True, seed=0):
    """Write the pair under folder/target and folder/draft; returns both folders."""
    target, draft = write_random(folder, "fast", seed, draft_config={"num_target_layers": 3})
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
    config = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "torch_dtype": "bfloat16",
        "attention_k_eq_v": True, "eos_token_id": None, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64, "intermediate_size": 72, "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_attention_heads": 2, "num_global_key_value_heads": 1, "num_hidden_layers": 3,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                               "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "tie_word_embeddings": True, "vocab_size": 83,
    } | (experts if has_experts else {})  # fmt: skip
    rng, tensors = np.random.default_rng(seed), {}
    for named in names.target_table(read_target(config)).values():
        for name, shape in named.sources:
            values = rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))
            if len(shape) == 1:
                values = 1 + 0.2 * rng.standard_normal(shape)
            if "embed" in name:
                values *= 2
            tensors[name] = values.astype(ml_dtypes.bfloat16)
    write_safetensors(target / "model.safetensors", tensors)
    (target / "config.json").write_text(json.dumps(config))
    return target, draft
