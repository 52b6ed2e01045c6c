"""Checkpoint name <-> our name and the expected shape, one table a family.

A table is {our name: [(checkpoint name, shape), ...]}; tensors of one list are stacked along rows (out features).
Everything in the files is used or on the skip list, everything in the table is there with its shape (F45-F49).
"""

import re

import numpy as np

from minidflash.errors import UserError

WEIGHT_DTYPES = ("BF16", "F32", "F16")  # F16 widens to f32, exactly
# Buffers that old exports carry and that follow from the config.
SKIPPED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FOREIGN = {
    "lm_head.weight": "a head of its own", "d2t": "a reduced vocabulary", "t2d": "a reduced vocabulary",
    "embed_tokens.weight": "an embedding of its own", "mask_embedding": "a mask embedding of its own",
}  # fmt: skip


def _layer(config, theirs, ours):
    """The rows of one pre-norm layer with SwiGLU, which llama, qwen3 and the drafter share. models.md 1, 2, 7.1."""
    width, ffn, size = config.width, config.ffn, config.head_size
    q_rows, kv_rows = config.heads * size, config.kv_heads * size
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    table = {
        "attn_norm": [(theirs + "input_layernorm.weight", (width,))],
        "q": [(attention + "q_proj.weight", (q_rows, width))],
        "kv": [(attention + f"{name}_proj.weight", (kv_rows, width)) for name in "kv"],
        "o": [(attention + "o_proj.weight", (width, q_rows))],
        "mlp_norm": [(theirs + "post_attention_layernorm.weight", (width,))],
        "gate_up": [(mlp + f"{name}_proj.weight", (ffn, width)) for name in ("gate", "up")],
        "down": [(mlp + "down_proj.weight", (width, ffn))],
    }
    if config.attention_bias:
        table["q_bias"] = [(attention + "q_proj.bias", (q_rows,))]
        table["kv_bias"] = [(attention + f"{name}_proj.bias", (kv_rows,)) for name in "kv"]
        table["o_bias"] = [(attention + "o_proj.bias", (width,))]
    if getattr(config, "qk_norm", True):  # a drafter always has them
        table["q_norm"] = [(attention + "q_norm.weight", (size,))]
        table["k_norm"] = [(attention + "k_norm.weight", (size,))]
    return {ours + name: sources for name, sources in table.items()}


def _dense(config):
    """llama and qwen3: models.md 1, 2. The head is bound apart, see _bind_head."""
    table = {
        "embed": [(EMBED, (config.vocab, config.width))],
        "norm": [("model.norm.weight", (config.width,))],
    }
    for i in range(config.layers):
        table |= _layer(config, f"model.layers.{i}.", f"layers.{i}.")
    return table


FAMILIES = {"llama": _dense, "qwen3": _dense}


def _drafter(config):
    """DFlash v1: models.md 7.1."""
    width = config.width
    table = {
        "fc": [("fc.weight", (width, len(config.taps) * width))],
        "hidden_norm": [("hidden_norm.weight", (width,))],
        "norm": [("norm.weight", (width,))],
    }
    for i in range(config.layers):
        table |= _layer(config, f"layers.{i}.", f"layers.{i}.")
    return table


def _bind(table, tensors, label, skipped=None):
    """Our name -> [Tensor]; refuses what is missing, unknown, of another shape or dtype, by name."""
    wanted = {name: shape for sources in table.values() for name, shape in sources}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = f"{len(missing)} tensors are missing in all" if len(missing) > 1 else None
        raise UserError(f"{label} tensor {missing[0]} is missing: the files hold {len(tensors)}", hint=hint)
    extra = [name for name in tensors if name not in wanted and not (skipped and skipped.fullmatch(name))]
    if extra:
        hint = "config.json has attention_bias false" if extra[0].endswith("_proj.bias") else None
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise UserError(
            f"{label} tensor {extra[0]}{more} is unknown here: its weights cannot be left out", hint=hint
        )
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{label} tensor {name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        _check_dtype(tensor, label)
    bound = {ours: [tensors[name] for name, _ in sources] for ours, sources in table.items()}
    for ours, parts in bound.items():
        if len({part.dtype for part in parts}) > 1:
            found = ", ".join(f"{part.name} {part.dtype}" for part in parts)
            raise UserError(f"{label} tensors of {ours} differ in dtype: {found}")
    return bound


def _check_dtype(tensor, label):
    if tensor.dtype not in WEIGHT_DTYPES:
        needed = " or ".join(WEIGHT_DTYPES)
        raise UserError(
            f"{label} tensor {tensor.name} is {tensor.dtype}, need {needed}", hint="use a bfloat16 copy"
        )


def _same_bits(a, b):
    """True if two tensors hold the same bits; read in slices and dropped again, the load counts these pages."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    rows = max(1, 2**24 // max(1, a.nbytes // max(1, a.shape[0])))
    left, right = (t.array.view(f"u{t.array.itemsize}") for t in (a, b))
    same = all(np.array_equal(left[i : i + rows], right[i : i + rows]) for i in range(0, a.shape[0], rows))
    b.drop()
    return same


def bind_target(config, tensors):
    """Our names -> the target's tensors. "head" is absent when the embedding is shared.

    config: ModelConfig. tensors: mapping of checkpoint name to Tensor.
    Errors: UserError naming the tensor. Source: models.md 0.1 (the four outcomes of flag and head), 1, 2.
    """
    if "fc.weight" in tensors or "hidden_norm.weight" in tensors:
        raise UserError("target tensor fc.weight is a drafter's", hint="give this folder as --drafter")
    table = FAMILIES[config.family](config)
    has_head = HEAD in tensors
    if has_head:
        table["head"] = [(HEAD, (config.vocab, config.width))]
    elif not config.tied and config.sources.get("tied") == "tie_word_embeddings":
        hint = "an incomplete checkpoint; a shared head would need tie_word_embeddings true"
        raise UserError(f"target tensor {HEAD} is missing, and tie_word_embeddings is false", hint=hint)
    bound = _bind(table, tensors, "target", SKIPPED)
    if has_head and config.tied:
        if not _same_bits(tensors[EMBED], tensors[HEAD]):
            hint = "one of the two is wrong; set tie_word_embeddings false to use the head"
            raise UserError(
                f"target tensor {HEAD} differs from {EMBED}, yet tie_word_embeddings is true", hint=hint
            )
        del bound["head"]
    return bound


def bind_drafter(config, tensors):
    """Our names -> the drafter's tensors; it shares the target's embedding and head.

    config: DrafterConfig. Errors: UserError naming the tensor. Source: models.md 7.1, dflash.md 1.2, 2.6.
    """
    for name, what in FOREIGN.items():
        for found in (name, "model." + name):
            if found in tensors:
                raise UserError(f"drafter tensor {found}: a drafter with {what} is not built")
    fc = tensors.get("fc.weight")
    count = len(config.taps)
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != count * config.width:
        source = config.sources.get("taps", "target_layer_ids")
        found = f"drafter tensor fc.weight takes {fc.shape[1]} inputs"
        raise UserError(f"{found}, {source} names {count} taps of width {config.width}")
    return _bind(_drafter(config), tensors, "drafter")
