"""config.json of published checkpoints: targets' as the files have them, the rest as far as pages state it;
models.md 3, 4 and 9, dflash.md 2.2."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
checkpoints = importlib.import_module("checkpoints")

CODER = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5472,
    "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True, "use_qk_norm": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936, "quantization_config": FP8,
}  # fmt: skip
LEFT = (
    "input_layernorm",
    "mlp.gate",
    "post_attention_layernorm",
)  # of each layer, as the published lists have it
KEPT = ["lm_head", *(f"model.layers.{i}.{module}" for i in range(48) for module in LEFT)]
CODER_FP8 = CODER | {"quantization_config": FP8 | {"modules_to_not_convert": KEPT}}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip


def gpt_oss(layers, experts):
    """The target of so many layers and experts."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "num_local_experts": experts, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                       "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5, "rope_scaling": YARN, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip


def drafter(name, **more):
    """A drafter of weights/checkpoints.toml, with keys that it leaves out."""
    return next(one for one in checkpoints.read() if one.draft == name).config() | more


PAIRS = {
    "Qwen3-Coder-30B-A3B": (CODER, drafter("Qwen3-Coder-30B-A3B", vocab_size=151936)),
    "Qwen3-8B-FP8": (QWEN3_8B, drafter("Qwen3-8B-DFlash-b16", vocab_size=151936)),
    "Qwen3-Coder-30B-A3B-FP8": (CODER_FP8, drafter("Qwen3-Coder-30B-A3B", vocab_size=151936)),
    "gpt-oss-20b": (gpt_oss(24, 32), drafter("gpt-oss-20b", vocab_size=201088)),
    "gpt-oss-120b": (gpt_oss(36, 128), drafter("gpt-oss-120b", vocab_size=201088)),
}
KINDS = ["sliding_attention"] * 5 + ["full_attention"]


def gemma4(layers, width, heads, groups, full_groups, ffn, experts=None):
    """The target of so many layers; experts: (count, used, width)."""
    count, used, inner = experts or (None, None, None)
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": experts is not None, "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": width, "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02, "intermediate_size": ffn, "layer_types": KINDS * (layers // 6),
        "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": inner,
        "num_attention_heads": heads, "num_experts": count, "num_global_key_value_heads": full_groups,
        "num_hidden_layers": layers, "num_key_value_heads": groups, "num_kv_shared_layers": 0,
        "pad_token_id": 0, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                               "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": used,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    }  # fmt: skip
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
        "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106],
        "image_token_id": 258880, "initializer_range": 0.02, "model_type": "gemma4", "text_config": text,
        "tie_word_embeddings": True, "transformers_version": "5.5.0.dev0", "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 280,
    }  # fmt: skip


def gemma4_drafter(width, heads, ffn, taps, target_layers):
    """Four sliding layers and a full one, causality not stated."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    more = {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 2048, "use_sliding_window": True,
            "rope_theta": 1e6, "max_position_embeddings": 262144,
            "final_logit_softcapping": 30.0}  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": width,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": ffn,
        "block_size": 16, "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": taps}, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "vocab_size": 262144, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


GEMMA_31B = gemma4(60, 5376, 32, 16, 4, 21504)
GEMMA_31B["text_config"]["expert_intermediate_size"] = GEMMA_31B["text_config"].pop("moe_intermediate_size")
PAIRS |= {
    "gemma-4-31B": (
        GEMMA_31B, gemma4_drafter(5376, 64, 10752, [1, 12, 23, 35, 46, 57], 60),
    ),
    "gemma-4-26B-A4B": (
        gemma4(30, 2816, 16, 8, 2, 2112, (128, 8, 704)),
        gemma4_drafter(2816, 32, 5632, [1, 6, 11, 17, 22, 27], 30),
    ),
}  # fmt: skip
