"""What the families of targets say beyond what all share: which keys they have, and what their layers are."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minidflash.kernels.table import CLAMPED

from .stack import Experts


@dataclass(frozen=True)
class Family:
    """architecture: as config.json names it. layer: (reader, facts of a layer, windows) -> facts that it
    adds.

    fixed: keys that may be present with this value alone. free: keys of config_keys.FIXED that `layer` reads
    itself. bias: whether attention has biases where the key is absent.
    """

    architecture: str
    layer: Callable
    fixed: dict = field(default_factory=dict)
    free: frozenset = frozenset()
    bias: bool = False


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
TRAINING = {
    "router_aux_loss_coef",
    "output_router_logits",
}  # they change nothing that a forward pass computes
FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama),
    "qwen3": Family("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe, MOE_FIXED),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, free=frozenset({"quantization_config"}), bias=True),
}
