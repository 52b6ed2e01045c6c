"""Which tensors make which weight: names, shapes, roles and exact transforms, from the layers of a stack.

A table is {our name: Named}. Everything in the files is used or on the skip list, everything in the table is
there with its shape (F45-F49).
"""

import re
from dataclasses import dataclass

import numpy as np
from minidflash.kernels.blocks import KINDS
from minidflash.kernels.weight import (
    BITS,
    EXPERT_PAIRS,
    EXPERTS,
    MATRIX,
    PAIRS,
    TABLE,
    TILE,
    VECTOR,
    stored_bytes,
)
from minidflash.weights.transforms import TRANSFORMS

from minidflash.errors import UserError

PLAIN_DTYPES = ("BF16", "F32", "F16")  # F16 widens to f32, exactly
WEIGHT_DTYPES = (*PLAIN_DTYPES, *(name.upper() for name in KINDS))
# Buffers that old exports carry and that follow from the config.
SKIPPED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FOREIGN = {
    "lm_head.weight": "a head of its own", "d2t": "a reduced vocabulary", "t2d": "a reduced vocabulary",
    "embed_tokens.weight": "an embedding of its own", "mask_embedding": "a mask embedding of its own",
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """One weight. role: of kernels/weight.py. shape: as kernels get it.
    sources: ((checkpoint name, its shape), ...).

    transform: of transforms.py, how the sources make it.
    """

    role: str
    shape: tuple
    sources: tuple
    transform: str = "stack"

    @property
    def dtypes(self):
        """What the sources may be stored as."""
        if self.transform.startswith("blocks"):
            return ("U8",)
        return PLAIN_DTYPES if self.role == VECTOR else WEIGHT_DTYPES

    def bind(self, tensors):
        """Bound to the tensors of a checkpoint, or to what has their names, dtypes and shapes."""
        return Bound(
            self.role, self.shape, TRANSFORMS[self.transform]([tensors[name] for name, _ in self.sources])
        )


@dataclass(frozen=True)
class Bound:
    """A weight whose tensors are there. parts: what the transform makes of them, stacked along rows;
    read when used."""

    role: str
    shape: tuple
    parts: list

    @property
    def dtype(self):
        """As it is kept: vectors in f32, matrices as stored; F16, and mixed dtypes, in f32."""
        (kind, *others) = {part.dtype.lower() for part in self.parts}
        return kind if kind in BITS and not others and self.role != VECTOR else "f32"

    @property
    def nbytes(self):
        """Bytes as it is kept."""
        return stored_bytes(self.shape, self.dtype)


def vector(*names, size):
    """Vectors of `size` laid end to end, one for each name."""
    return Named(VECTOR, (len(names) * size,), tuple((name, (size,)) for name in names))


def matrix(*names, rows, cols, role=MATRIX):
    """Matrices of the same shape stacked along rows."""
    return Named(role, (len(names) * rows, cols), tuple((name, (rows, cols)) for name in names))


def attention(stack, layer, theirs):
    """models.md 1, 2, 7.1."""
    at, width, size = theirs + "self_attn.", stack.width, layer.head_size
    keys, values = (f"{at}{name}_proj.weight" for name in "kv")
    table = {
        "attn_norm": vector(theirs + "input_layernorm.weight", size=width),
        "q": matrix(at + "q_proj.weight", rows=layer.q_rows, cols=width),
        "kv": matrix(keys, values, rows=layer.kv_rows // 2, cols=width),
        "o": matrix(at + "o_proj.weight", rows=width, cols=layer.q_rows),
    }
    if layer.attention_bias:
        table["q_bias"] = vector(at + "q_proj.bias", size=layer.q_rows)
        table["kv_bias"] = vector(*(f"{at}{name}_proj.bias" for name in "kv"), size=layer.kv_rows // 2)
        table["o_bias"] = vector(at + "o_proj.bias", size=width)
    if layer.sinks:
        table["sinks"] = vector(at + "sinks", size=layer.heads)
    if layer.qk_norm:
        table |= {f"{name}_norm": vector(f"{at}{name}_norm.weight", size=size) for name in "qk"}
    return table


def mlp(stack, layer, theirs):
    """SwiGLU behind its norm: models.md 1."""
    at, width = theirs + "mlp.", stack.width
    gate, up = (f"{at}{name}_proj.weight" for name in ("gate", "up"))
    return {
        "mlp_norm": vector(theirs + "post_attention_layernorm.weight", size=width),
        "gate_up": matrix(gate, up, rows=layer.ffn_width, cols=width, role=PAIRS),
        "down": matrix(at + "down_proj.weight", rows=width, cols=layer.ffn_width),
    }


def experts(stack, layer, theirs):
    """A mixture behind its norm, as the files of its layout hold it."""
    table = {"mlp_norm": vector(theirs + "post_attention_layernorm.weight", size=stack.width)}
    return table | LAYOUTS[layer.experts.layout](stack, layer, theirs + "mlp.")


def separate(stack, layer, at):
    """A tensor for each expert's gate, up and down: models.md 3."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    names = [[f"{at}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(count)]
    pairs = tuple((name, (inner, width)) for gate, up, _ in names for name in (gate, up))
    return {
        "router": matrix(at + "gate.weight", rows=count, cols=width),
        "experts_up": Named(EXPERT_PAIRS, (count, 2 * inner, width), pairs),
        "experts_down": Named(
            EXPERTS, (count, width, inner), tuple((down, (width, inner)) for *_, down in names)
        ),
    }


def fused(stack, layer, at):
    """All experts in one tensor, transposed, gate and up interleaved, with biases: models.md 4."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    up, down = at + "experts.gate_up_proj", at + "experts.down_proj"
    return biased(stack, layer, at) | {
        "experts_up": Named(
            EXPERT_PAIRS,
            (count, 2 * inner, width),
            ((up, (count, width, 2 * inner)),),
            "transpose, de-interleave",
        ),
        "experts_down": Named(EXPERTS, (count, width, inner), ((down, (count, inner, width)),), "transpose"),
    }


def mxfp4(stack, layer, at):
    """Blocks of 32 inputs and their scales, rows interleaved: models.md 4."""

    def named(role, name, rows, cols, transform):
        found = (
            ("_blocks", (layer.experts.count, rows, cols // 32, 16)),
            ("_scales", (layer.experts.count, rows, cols // 32)),
        )
        sources = tuple((f"{at}experts.{name}_proj{ending}", shape) for ending, shape in found)
        return Named(role, (layer.experts.count, rows, cols), sources, "blocks and scales" + transform)

    width, inner = stack.width, layer.ffn_width
    return biased(stack, layer, at) | {
        "experts_up": named(EXPERT_PAIRS, "gate_up", 2 * inner, width, ", de-interleave"),
        "experts_down": named(EXPERTS, "down", width, inner, ""),
    }


def biased(stack, layer, at):
    """gpt-oss's router, and its biases, the same in both layouts."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    up, down = (at + f"experts.{name}_proj_bias" for name in ("gate_up", "down"))
    return {
        "router": matrix(at + "router.weight", rows=count, cols=width),
        "router_bias": vector(at + "router.bias", size=count),
        "up_bias": Named(VECTOR, (count, 2 * inner), ((up, (count, 2 * inner)),), "de-interleave"),
        "down_bias": Named(VECTOR, (count, width), ((down, (count, width)),)),
    }


LAYOUTS = {"separate": separate, "fused": fused, "mxfp4": mxfp4}  # of Experts
PARTS = {"attention": attention, "mlp": mlp, "experts": experts}  # mixers and ffns of a Layer


def layers_of(stack, prefix):
    """Our name -> Named of all layers; prefix: what stands before "layers." in the checkpoint."""
    table = {}
    for i, layer in enumerate(stack.layers):
        for kind in (layer.mixer, layer.ffn):
            found = PARTS[kind](stack, layer, f"{prefix}layers.{i}.")
            table |= {f"layers.{i}.{name}": named for name, named in found.items()}
    return table


def target_table(config):
    """Of a target whose head is its embedding, or is bound apart (bind_target)."""
    return {
        "embed": matrix(EMBED, rows=config.vocab, cols=config.width, role=TABLE),
        "norm": vector("model.norm.weight", size=config.width),
        **layers_of(config, "model."),
    }


def drafter_table(config):
    """Of DFlash v1 (models.md 7.1). What injection needs of all layers is one weight:
    one pass injects into all."""
    width, table = config.width, layers_of(config, "")
    for kind in ("kv", "k_norm", "kv_bias"):
        every = [name for name in table if name.endswith("." + kind)]
        if every:
            parts = [table[name] for name in every]
            rows = sum(part.shape[0] for part in parts)
            shape = (len(parts), rows // len(parts)) if kind == "k_norm" else (rows, *parts[0].shape[1:])
            table[kind] = Named(parts[0].role, shape, tuple(one for part in parts for one in part.sources))
            if kind != "kv" or is_sliced(config):
                table = {name: named for name, named in table.items() if name not in every}
    return {
        "fc": matrix("fc.weight", rows=width, cols=len(config.taps) * width),
        "hidden_norm": vector("hidden_norm.weight", size=width),
        "norm": vector("norm.weight", size=width),
        **table,
    }


def is_sliced(config):
    """Whether a drafter's layer sees its rows of the k and v of all layers;
    odd toy sizes would cut a packed group."""
    return config.layers[0].kv_rows % TILE == 0


def _bind(table, tensors, label, skipped=None):
    """Our name -> Bound; refuses what is missing, unknown, of another shape or dtype, by name."""
    wanted = {name: (shape, named.dtypes) for named in table.values() for name, shape in named.sources}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = f"{len(missing)} tensors are missing in all" if len(missing) > 1 else None
        name = tensors.spelled(missing[0]) if hasattr(tensors, "spelled") else missing[0]
        raise UserError(f"{label} tensor {name} is missing: the files hold {len(tensors)}", hint=hint)
    extra = [name for name in tensors if name not in wanted and not (skipped and skipped.fullmatch(name))]
    if extra:
        hint = "config.json has attention_bias false" if extra[0].endswith("_proj.bias") else None
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise UserError(
            f"{label} tensor {tensors[extra[0]].name}{more} is unknown here: its weights cannot be left out",
            hint=hint,
        )
    for name, (shape, dtypes) in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise UserError(
                f"{label} tensor {tensor.name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        _check_dtype(tensor, label, dtypes)
    for ours, named in table.items():
        sources = [tensors[name] for name, _ in named.sources]
        if len({tensor.dtype for tensor in sources}) > 1:
            found = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in sources)
            raise UserError(f"{label} tensors of {ours} differ in dtype: {found}")
    return {ours: named.bind(tensors) for ours, named in table.items()}


def _check_dtype(tensor, label, dtypes):
    if tensor.dtype not in dtypes:
        needed = " or ".join(dtypes)
        raise UserError(
            f"{label} tensor {tensor.name} is {tensor.dtype}, need {needed}", hint="use a bfloat16 copy"
        )


def _same_bits(a, b):
    """True if two tensors hold the same bits; read in slices and dropped again,
    the load counts these pages."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    rows = max(1, 2**24 // max(1, a.nbytes // max(1, a.shape[0])))
    left, right = (t.array.view(f"u{t.array.itemsize}") for t in (a, b))
    same = all(np.array_equal(left[i : i + rows], right[i : i + rows]) for i in range(0, a.shape[0], rows))
    b.drop()
    return same


def bind_target(config, tensors):
    """Our name -> Bound of a target. "head" is absent when the embedding is shared.

    config: ModelConfig. tensors: mapping of checkpoint name to Tensor.
    Errors: UserError naming the tensor. Source: models.md 0.1 (the four outcomes of flag and head), 1, 2.
    """
    if "fc.weight" in tensors or "hidden_norm.weight" in tensors:
        raise UserError("target tensor fc.weight is a drafter's", hint="give this folder as --drafter")
    table = target_table(config)
    has_head = HEAD in tensors
    if has_head:
        table["head"] = matrix(HEAD, rows=config.vocab, cols=config.width)
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
    """Our name -> Bound of a drafter; it shares the target's embedding and head.

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
    return _bind(drafter_table(config), tensors, "drafter")


@dataclass(frozen=True)
class Foretold:
    """A tensor that is not here: what config.json says of it, in the type that such checkpoints have."""

    name: str
    shape: tuple
    dtype: str

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * (1 if self.dtype == "U8" else 2)


def foretell_target(config, tensors=None):
    """Our name -> Bound of a target whose files are not here, in bf16 and, where config.json says so,
    MXFP4."""
    table = target_table(config)
    if not config.tied:
        table["head"] = matrix(HEAD, rows=config.vocab, cols=config.width)
    return _foretell(table)


def foretell_drafter(config, tensors=None):
    """The same of a drafter."""
    return _foretell(drafter_table(config))


def _foretell(table):
    tensors = {
        name: Foretold(name, shape, "U8" if named.dtypes == ("U8",) else "BF16")
        for named in table.values()
        for name, shape in named.sources
    }
    return {ours: named.bind(tensors) for ours, named in table.items()}
