"""config.json of published checkpoints, as far as their pages state it; models.md 3, 4 and 9, dflash.md
2.2."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
checkpoints = importlib.import_module("checkpoints")

CODER = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5472, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e7,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip


def gpt_oss(layers, experts):
    """The target of so many layers and experts."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "num_local_experts": experts,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                       "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5, "rope_scaling": YARN, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip


def drafter(name, **more):
    """A drafter of weights/checkpoints.toml, with keys that it leaves out."""
    return next(one for one in checkpoints.read() if one.draft == name).config() | more


PAIRS = {
    "Qwen3-Coder-30B-A3B": (CODER, drafter("Qwen3-Coder-30B-A3B", vocab_size=151936)),
    "gpt-oss-20b": (gpt_oss(24, 32), drafter("gpt-oss-20b", vocab_size=201088)),
    "gpt-oss-120b": (gpt_oss(36, 128), drafter("gpt-oss-120b", vocab_size=201088)),
}
