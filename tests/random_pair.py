"""Small random pairs with awkward sizes, as checkpoint folders. Their ids mean nothing and depend on
everything."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.automaton import write_safetensors

SIZES = {
    "odd": {"width": 60, "heads": (5, 1, 20), "ffn": 44, "vocab": 131, "layers": 3, "taps": (0, 1)},
    "grouped": {"width": 48, "heads": (6, 3, 8), "ffn": 100, "vocab": 97, "layers": 2, "taps": (0,)},
    # Every fast kernel takes these: heads of 64, inputs a multiple of 8.
    "fast": {"width": 64, "heads": (2, 1, 64), "ffn": 72, "vocab": 83, "layers": 2, "taps": (0,)},
    # And h may be laid for the next product: whole chunks of 32.
    "laid": {"width": 64, "heads": (2, 1, 64), "ffn": 96, "vocab": 83, "layers": 3, "taps": (0, 1)},
}


def write_random(folder, name="odd", seed=0, family="llama", dtype="bf16", max_pos=1024, block=16,
                 windows=None, draft_config=None, target_config=None):  # fmt: skip
    """Write a random pair under folder/target and folder/draft; returns both folders.

    family: llama or qwen3. dtype: bf16 or f32 weights. windows: None, or (layer kinds, W, is_causal) of the
    drafter's layers. draft_config, target_config: keys to set in a config;
    with attention_bias every layer gets its biases.
    """
    rng, size = np.random.default_rng(seed), SIZES[name]
    width, vocab, layers, ffn = size["width"], size["vocab"], size["layers"], size["ffn"]
    heads, groups, head_size = size["heads"]

    def matrix(rows, cols, scale=1.5):
        return rng.standard_normal((rows, cols)) * scale / np.sqrt(cols)

    def norm(count):
        return 1 + 0.2 * rng.standard_normal(count)

    def layer(prefix, head_norms, config):
        tensors = {
            "input_layernorm": norm(width), "post_attention_layernorm": norm(width),
            "self_attn.q_proj": matrix(heads * head_size, width),
            "self_attn.k_proj": matrix(groups * head_size, width),
            "self_attn.v_proj": matrix(groups * head_size, width),
            "self_attn.o_proj": matrix(width, heads * head_size),
            "mlp.gate_proj": matrix(ffn, width), "mlp.up_proj": matrix(ffn, width),
            "mlp.down_proj": matrix(width, ffn),
        }  # fmt: skip
        if head_norms:
            tensors |= {"self_attn.q_norm": norm(head_size), "self_attn.k_norm": norm(head_size)}
        tensors = {f"{prefix}{key}.weight": value for key, value in tensors.items()}
        if (config or {}).get("attention_bias"):
            for part, count in zip(
                "qkvo", (heads * head_size, *[groups * head_size] * 2, width), strict=True
            ):
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = rng.standard_normal(count)
        return tensors

    kinds, window, causal = windows or (["full_attention"] * 2, None, None)
    target = {"model.embed_tokens.weight": matrix(vocab, width, 6), "model.norm.weight": norm(width)}
    target["lm_head.weight"] = matrix(vocab, width, 4)
    for i in range(layers):
        target |= layer(f"model.layers.{i}.", family == "qwen3", target_config)
    draft = {"fc.weight": matrix(width, width * len(size["taps"])), "hidden_norm.weight": norm(width)}
    draft["norm.weight"] = norm(width)
    for i in range(len(kinds)):
        draft |= layer(f"layers.{i}.", True, draft_config)
    shared = {
        "hidden_size": width, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_size, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "vocab_size": vocab,
        "max_position_embeddings": max_pos, "hidden_act": "silu", "attention_bias": False,
        "torch_dtype": "bfloat16" if dtype == "bf16" else "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    target_json = shared | {
        "architectures": [architecture], "model_type": family, "num_hidden_layers": layers,
        "bos_token_id": None,
        "eos_token_id": None,
    } | (target_config or {})  # fmt: skip
    draft_json = shared | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": len(kinds),
        "block_size": block, "num_target_layers": layers, "layer_types": list(kinds),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(size["taps"])},
    } | ({} if causal is None else {"is_causal": causal}) | (draft_config or {})  # fmt: skip
    folders = Path(folder) / "target", Path(folder) / "draft"
    store = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    for place, tensors, config in zip(folders, (target, draft), (target_json, draft_json), strict=True):
        place.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.astype(store) for key, value in tensors.items()}
        write_safetensors(place / "model.safetensors", tensors)
        (place / "config.json").write_text(json.dumps(config))
    return folders
