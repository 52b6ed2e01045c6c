"""config.json of published checkpoints, as far as their pages state it;
models.md 3, 4 and 9, dflash.md 2.2."""

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


def drafter(width, heads, groups, size, ffn, block, taps, target_layers, mask_id, vocab, **more):
    """A drafter of eight layers, all of full attention."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 8,
        "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size,
        "intermediate_size": ffn, "block_size": block, "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": taps}, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "vocab_size": vocab, "layer_types": ["full_attention"] * 8,
        "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


OSS = {"attention_bias": True, "rope_theta": 150000, "rope_scaling": YARN}
PAIRS = {
    "Qwen3-Coder-30B-A3B": (
        CODER,
        drafter(2048, 32, 4, 128, 6144, 16, [1, 12, 23, 34, 45], 48, 151669, 151936, rope_theta=1e7,
                max_position_embeddings=262144),
    ),
    "gpt-oss-20b": (
        gpt_oss(24, 32), drafter(2880, 64, 8, 64, 7680, 8, [1, 6, 11, 16, 21], 24, 200000, 201088, **OSS),
    ),
    "gpt-oss-120b": (
        gpt_oss(36, 128), drafter(2880, 64, 8, 64, 7680, 10, [1, 9, 17, 25, 33], 36, 200000, 201088, **OSS),
    ),
}  # fmt: skip
