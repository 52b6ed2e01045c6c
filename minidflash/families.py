"""What the families of targets say beyond what all share: which keys they have, and what their layers are."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minidflash.kernels.table import CLAMPED, GELU_TANH

from .stack import Experts


@dataclass(frozen=True)
class Family:
    """architecture: as config.json names it. layer: (reader, facts of a layer, windows) -> facts that it
    adds, the same for all layers or a list, one a layer.

    fixed: keys that may be present with this value alone. free: keys of config_keys.FIXED that `layer` reads
    itself. bias: whether attention has biases where the key is absent. rope_kinds: kinds of layers that have
    a rope each, in the stack's order; (): all have one. scales_embedding: by the root of the width. caps:
    whether its logits may have a soft cap. fp8: whether its files may be FP8 (fp8_config.py). text:
    model_type of the text part where its config is nested among others (wrapper.py).
    """

    architecture: str
    layer: Callable
    fixed: dict = field(default_factory=dict)
    free: frozenset = frozenset()
    bias: bool = False
    rope_kinds: tuple = ()
    scales_embedding: bool = False
    caps: bool = False
    fp8: bool = False
    text: str = ""

    @property
    def prefix(self):
        """Of the tensors' names."""
        return "model.language_model." if self.text else "model."


def llama(reader, facts, windows):
    """models.md 1."""
    if any(windows):
        reader.refuse("layer_types", "sliding_attention", "full_attention in every llama layer")
    return {}


def qwen3(reader, facts, windows):
    """models.md 2."""
    return {"qk_norm": True}


def qwen3_moe(reader, facts, windows):
    """models.md 3. Shares of experts are renormalised, and no layer is dense: nothing else was checked."""
    if reader.config.get("norm_topk_prob") is None:
        reader.missing("norm_topk_prob")
    count, used = mixture(reader, ("num_experts", "num_local_experts"), ("num_experts_per_tok",))
    width = reader.number("ffn_width", "moe_intermediate_size", int, 1)
    return {
        "qk_norm": True,
        "ffn": "experts",
        "ffn_width": width,
        "experts": Experts(count, used, "separate"),
    }


def gpt_oss(reader, facts, windows):
    """models.md 4."""
    if reader.config.get("layer_types") is None:
        reader.missing("layer_types")
    count, used = mixture(reader, ("num_local_experts",), ("num_experts_per_tok", "experts_per_token"))
    layout = "mxfp4" if _is_mxfp4(reader) else "fused"
    if layout == "mxfp4":
        for key, size in (
            ("hidden_size", reader.config["hidden_size"]),
            ("intermediate_size", facts["ffn_width"]),
        ):
            if size % 32:
                reader.refuse(key, size, "a multiple of 32: MXFP4 has a scale for 32 inputs")
    limit = reader.number("limit", "swiglu_limit", float, 0, default=7.0)
    alpha = reader.number("alpha", "swiglu_alpha", float, 0, default=1.702)
    first = reader.value("initial_context", "initial_context_length")
    scaling = reader.config.get("rope_parameters") or reader.config.get("rope_scaling") or {}
    if first is not None and first != scaling.get("original_max_position_embeddings", first):
        reader.refuse(
            "initial_context_length", first, "the same as the rope's original_max_position_embeddings"
        )
    experts = Experts(count, used, layout, limit=limit, alpha=alpha, bias=True)
    return {"sinks": True, "ffn": "experts", "act": CLAMPED, "experts": experts}


def gemma4(reader, facts, windows):
    """models.md 5: layers that slide, and full ones of another size whose values may be the raw keys."""
    if reader.config.get("layer_types") is None:
        reader.missing("layer_types")
    shared = {"scale": 1.0, "qk_norm": True, "v_norm": True, "end_norms": True, "end_scale": True,
              "act": GELU_TANH}  # fmt: skip
    if reader.flag("has_experts", "enable_moe_block", False):
        count, used = mixture(reader, ("num_experts",), ("top_k_experts",))
        shared |= {
            "ffn": "mlp_and_experts", "dense_width": facts["ffn_width"],
            "ffn_width": reader.number("experts' ffn_width", "moe_intermediate_size", int, 1),
            "experts": Experts(count, used, "stacked", own_norm=True),
        }  # fmt: skip
    else:
        reader.unused("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
    sees = reader.value("bidirectional", "use_bidirectional_attention")
    if sees not in (None, "vision"):  # among the rows of an image, of which a text has none
        reader.refuse("use_bidirectional_attention", sees, "null or 'vision'")
    reader.used.add("vocab_size_per_layer_input")  # of embeddings that hidden_size_per_layer_input 0 has not
    shares = reader.flag("shares_kv", "attention_k_eq_v", False)
    found = []
    for i, (size, kv_heads) in enumerate(attention_sizes(reader, facts, windows, shares)):
        if size % 2 or facts["heads"] % kv_heads:
            needed = f"an even size, and a divisor of num_attention_heads = {facts['heads']}"
            reader.refuse(f"layer {i}'s head_dim, num_key_value_heads", [size, kv_heads], needed)
        is_full = not windows[i]
        own = {"head_size": size, "kv_heads": kv_heads, "rope": int(is_full), "shares_kv": shares and is_full}
        found.append(shared | own)
    return found


def attention_sizes(reader, facts, windows, shares):
    """(head size, kv heads) of every layer, in the newer spelling (per_layer_config) or the older one."""
    usual = facts["head_size"], facts["kv_heads"]
    per_layer = reader.value("sizes of full layers", "per_layer_config")
    full = reader.value("sizes of full layers", "global_head_dim")
    heads = reader.value("kv heads of full layers", "num_global_key_value_heads")
    if per_layer is None:
        if full is None and not all(windows):
            reader.missing("global_head_dim")
        if shares and heads is None and not all(windows):
            reader.missing("num_global_key_value_heads")
        size = full and reader.checked("global_head_dim", full, int, 1)
        if heads is not None:
            heads = reader.checked("num_global_key_value_heads", heads, int, 1)
        whole = size, heads if shares else usual[1]
        return [usual if window else whole for window in windows]
    for key, given in (("global_head_dim", full), ("num_global_key_value_heads", heads)):
        if given is not None:
            reader.refuse(key, given, "no such key beside per_layer_config")
    names = {str(i) for i in range(len(windows))}
    if not isinstance(per_layer, dict) or not set(per_layer) <= names:
        reader.refuse("per_layer_config", per_layer, f"an object with layers 0 to {len(windows) - 1}")
    found = []
    for i in range(len(windows)):
        own = per_layer.get(str(i), {})
        if not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
            reader.refuse(f"per_layer_config.{i}", own, "an object with head_dim and num_key_value_heads")
        sizes = zip(("head_dim", "num_key_value_heads"), usual, strict=True)
        found.append(tuple(
            reader.checked(f"per_layer_config.{i}.{key}", own.get(key, size), int, 1) for key, size in sizes
        ))  # fmt: skip
    return found


def mixture(reader, counts, uses):
    """(how many experts there are, how many a row uses); of several spellings of a key all must say the
    same."""
    found = []
    for fact, keys in (("experts", counts), ("experts used", uses)):
        said = {key: reader.config[key] for key in keys if reader.config.get(key) is not None}
        if not said:
            reader.missing(keys[0])
        name, number = next(iter(said.items()))
        for key, other in said.items():
            if other != number:
                reader.refuse(key, other, f"the same as {name} = {number}")
        reader.used.update(keys)
        reader.sources[fact] = name
        found.append(reader.checked(name, number, int, 1, high=found[0] if found else 4096))
    return found


def _is_mxfp4(reader):
    """Whether the experts are MXFP4 blocks; every other way to quantise is refused by name."""
    found = reader.value("quantization", "quantization_config")
    if found is None:
        return False
    if not isinstance(found, dict) or found.get("quant_method") != "mxfp4":
        method = found.get("quant_method") if isinstance(found, dict) else found
        reader.refuse("quantization_config.quant_method", method, "mxfp4, or no quantization_config")
    for key, value in found.items():
        if key == "modules_to_not_convert":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                reader.refuse(f"quantization_config.{key}", value, "a list of names")
        elif key != "quant_method" and value is not None:
            reader.refuse(
                f"quantization_config.{key}", value, "no such key: unknown here, it may change the algorithm"
            )
    return True


MOE_FIXED = {
    "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True,
}  # fmt: skip
GEMMA4_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "attn_logit_softcapping": None,
}  # fmt: skip
GEMMA4 = {
    "fixed": GEMMA4_FIXED, "free": frozenset({"hidden_act"}), "scales_embedding": True, "caps": True,
    "rope_kinds": ("sliding_attention", "full_attention"),
}  # fmt: skip
TRAINING = {
    "router_aux_loss_coef",
    "output_router_logits",
}  # they change nothing that a forward pass computes
FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama, fp8=True),
    "qwen3": Family("Qwen3ForCausalLM", qwen3, fp8=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe, MOE_FIXED, fp8=True),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, free=frozenset({"quantization_config"}), bias=True),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma4, **GEMMA4),
    "gemma4": Family("Gemma4ForConditionalGeneration", gemma4, text="gemma4_text", **GEMMA4),
}
