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
    MATRIX,
    PAIRS,
    TABLE,
    VECTOR,
    stored_bytes,
)
from minidflash.weights.fp8_names import CODES, FP8, SCALE, SCALE_DTYPES, hint_of, with_fp8
from minidflash.weights.transforms import TRANSFORMS

from minidflash.errors import UserError

PLAIN_DTYPES = ("BF16", "F32", "F16")  # F16 widens to f32, exactly
WEIGHT_DTYPES = (*PLAIN_DTYPES, *(name.upper() for name in KINDS))
# Buffers that old exports carry and that follow from the config; parts of a multimodal model that read no
# text.
SKIPPED = re.compile(
    r"model\.(language_model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..+"
)
HEAD = "lm_head.weight"
IDS, MARKS = "ids", "marks"  # roles of what maps ids, no Weights


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

    def dtypes(self, source):
        """What a source may be stored as."""
        if self.role in (IDS, MARKS):
            return ("I64",) if self.role == IDS else ("BOOL",)
        if self.transform == FP8:
            return SCALE_DTYPES if source.endswith(SCALE) else CODES
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
    kinds = "k" if layer.shares_kv else "kv"
    each = layer.kv_rows // len(kinds)
    table = {
        "attn_norm": vector(theirs + "input_layernorm.weight", size=width),
        "q": matrix(at + "q_proj.weight", rows=layer.q_rows, cols=width),
        "kv": matrix(*(f"{at}{name}_proj.weight" for name in kinds), rows=each, cols=width),
        "o": matrix(at + "o_proj.weight", rows=width, cols=layer.q_rows),
    }
    if layer.attention_bias:
        table["q_bias"] = vector(at + "q_proj.bias", size=layer.q_rows)
        table["kv_bias"] = vector(*(f"{at}{name}_proj.bias" for name in kinds), size=each)
        table["o_bias"] = vector(at + "o_proj.bias", size=width)
    if layer.sinks:
        table["sinks"] = vector(at + "sinks", size=layer.heads)
    if layer.qk_norm:
        table |= {f"{name}_norm": vector(f"{at}{name}_norm.weight", size=size) for name in "qk"}
    if layer.end_norms:
        table["o_norm"] = vector(theirs + "post_attention_layernorm.weight", size=width)
    return table


def mlp(stack, layer, theirs):
    """Gate, up and down behind their norm, perhaps with an end: models.md 1, 5."""
    end = ended(stack, layer, theirs, "down") if layer.end_norms else {}
    return dense(stack, theirs, layer.ffn_width, ffn_norm(layer)) | end


def ffn_norm(layer):
    """What the norm before an ffn is called: where mixers end with a norm, that one has its name."""
    return "pre_feedforward_layernorm" if layer.end_norms else "post_attention_layernorm"


def dense(stack, theirs, inner, norm):
    """An mlp behind the norm of that name."""
    at, width = theirs + "mlp.", stack.width
    gate, up = (f"{at}{name}_proj.weight" for name in ("gate", "up"))
    return {
        "mlp_norm": vector(f"{theirs}{norm}.weight", size=width),
        "gate_up": matrix(gate, up, rows=inner, cols=width, role=PAIRS),
        "down": matrix(at + "down_proj.weight", rows=width, cols=inner),
    }


def ended(stack, layer, theirs, name):
    """The end of an ffn: its norm, and the scale of the stream."""
    table = {name + "_norm": vector(theirs + "post_feedforward_layernorm.weight", size=stack.width)}
    return table | ({name + "_scale": vector(theirs + "layer_scalar", size=1)} if layer.end_scale else {})


def mlp_and_experts(stack, layer, theirs):
    """An mlp and a mixture side by side, each between norms of its own: models.md 5."""
    table = dense(stack, theirs, layer.dense_width, ffn_norm(layer)) | ended(stack, layer, theirs, "end")
    for ours, name in (("dense_norm", "post_feedforward_layernorm_1"),
                       ("mixed_norm", "post_feedforward_layernorm_2"),
                       ("experts_norm", "pre_feedforward_layernorm_2")):  # fmt: skip
        table[ours] = vector(f"{theirs}{name}.weight", size=stack.width)
    return table | LAYOUTS[layer.experts.layout](stack, layer, theirs)


def experts(stack, layer, theirs):
    """A mixture behind its norm, as the files of its layout hold it."""
    table = {"experts_norm": vector(theirs + "post_attention_layernorm.weight", size=stack.width)}
    return table | LAYOUTS[layer.experts.layout](stack, layer, theirs + "mlp.")


from minidflash.weights.layouts import LAYOUTS

# Mixers and ffns of a Layer.
PARTS = {"attention": attention, "mlp": mlp, "experts": experts, "mlp_and_experts": mlp_and_experts}


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
    table = {
        "embed": matrix(embed_of(config), rows=config.vocab, cols=config.width, role=TABLE),
        "norm": vector(config.prefix + "norm.weight", size=config.width),
        **layers_of(config, config.prefix),
    }
    return with_fp8(table, config.fp8)


def embed_of(config):
    """Name of the tensor that ids are looked up in."""
    return config.prefix + "embed_tokens.weight"


def bind(table, tensors, label, skipped=None):
    """Our name -> Bound; refuses what is missing, unknown, of another shape or dtype, by name."""
    wanted = {name: (shape, named.dtypes(name)) for named in table.values() for name, shape in named.sources}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = f"{len(missing)} tensors are missing in all" if len(missing) > 1 else None
        name = tensors.spelled(missing[0]) if hasattr(tensors, "spelled") else missing[0]
        raise UserError(f"{label} tensor {name} is missing: the files hold {len(tensors)}", hint=hint)
    extra = [name for name in tensors if name not in wanted and not (skipped and skipped.fullmatch(name))]
    if extra:
        hint = hint_of(extra[0])
        if extra[0].endswith("_proj.bias"):
            hint = "config.json has attention_bias false"
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
        sources = [tensors[name] for name, _ in named.sources if named.transform != FP8]
        if len({tensor.dtype for tensor in sources}) > 1:
            found = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in sources)
            raise UserError(f"{label} tensors of {ours} differ in dtype: {found}")
    return {ours: named.bind(tensors) for ours, named in table.items()}


def _check_dtype(tensor, label, dtypes):
    if tensor.dtype not in dtypes:
        needed, hint = " or ".join(dtypes), "use a bfloat16 copy"
        if tensor.dtype in CODES or dtypes == CODES:
            hint = "quantization_config says which modules are FP8"
        raise UserError(f"{label} tensor {tensor.name} is {tensor.dtype}, need {needed}", hint=hint)


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
    bound = bind(table, tensors, "target", SKIPPED)
    if has_head and config.tied:
        embed = embed_of(config)
        if not _same_bits(tensors[embed], tensors[HEAD]):
            hint = "one of the two is wrong; set tie_word_embeddings false to use the head"
            raise UserError(
                f"target tensor {HEAD} differs from {embed}, yet tie_word_embeddings is true", hint=hint
            )
        del bound["head"]
    return bound


@dataclass(frozen=True)
class Foretold:
    """A tensor that is not here: what config.json says of it, in the type that such checkpoints have."""

    name: str
    shape: tuple
    dtype: str

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * {"U8": 1, CODES[0]: 1, "I64": 8}.get(self.dtype, 2)


def foretell_target(config, tensors=None):
    """Our name -> Bound of a target whose files are not here, in bf16 and, where config.json says so,
    MXFP4 or FP8."""
    table = target_table(config)
    if not config.tied:
        table["head"] = matrix(HEAD, rows=config.vocab, cols=config.width)
    return foretell(table)


def foretell(table):
    tensors = {
        name: Foretold(name, shape, named.dtypes(name)[0])
        for named in table.values()
        for name, shape in named.sources
    }
    return {ours: named.bind(tensors) for ours, named in table.items()}
