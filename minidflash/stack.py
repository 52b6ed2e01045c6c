"""What a model is made of: layers that say what they are, and the stack of them. Targets and drafters alike.

Names of tensors, memory plan, caches, `info`, benches and tests read these objects;
nobody asks for the family.
"""

from dataclasses import dataclass, field, fields

from minidflash.kernels.table import SILU

from .fp8_config import Fp8
from .rope import Rope


@dataclass(frozen=True)
class Experts:
    """The ffn of a layer as a mixture: a row goes through `used` of `count` experts of the layer's ffn_width.

    normalise: shares are a softmax over the experts used, else over all. limit, alpha: as in the row
    experts_up (table.py). bias: router and experts have one. layout: how files hold them (names.py).
    own_norm: the router norms the stream itself, apart from what the experts see, and every expert has a
    scale.
    """

    count: int
    used: int
    layout: str
    normalise: bool = True
    limit: float = 0.0
    alpha: float = 0.0
    bias: bool = False
    own_norm: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer: x += mixer(x); x += ffn(x). mixer, ffn: names of functions in layers.py;
    the rest is what they need.

    heads, kv_heads, head_size: of attention. window: keys a row sees, itself included; 0: all. causal: False
    where a row also sees the rows behind it in its block. sees_block: a row sees its block's rows whatever
    the window. rope: which of the stack's ropes. scale: of q k^T. attention_bias: q, k, v and o have one.
    qk_norm: q and k are normed, head by head. sinks: a logit a head that has no value joins the softmax.
    v_norm: values are too, without weights. shares_kv: values are what keys are before norm and rotation.
    end_norms: what mixer and ffn give is normed before it is added. end_scale: the stream is scaled behind
    the ffn. ffn_width: inner width of the ffn. act: its activation, of table.py. experts: of a mixture.
    dense_width: inner width of an mlp beside the experts.
    """

    heads: int
    kv_heads: int
    head_size: int
    ffn_width: int
    window: int = 0
    causal: bool = True
    sees_block: bool = False
    rope: int = 0
    scale: float = 0.0
    attention_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    mixer: str = "attention"
    ffn: str = "mlp"
    act: int = SILU
    experts: Experts | None = None
    v_norm: bool = False
    shares_kv: bool = False
    end_norms: bool = False
    end_scale: bool = False
    dense_width: int = 0

    @property
    def q_rows(self):
        """Outputs of the query projection."""
        return self.heads * self.head_size

    @property
    def inner(self):
        """Numbers of a row inside the ffn."""
        return max(self.ffn_width * (self.experts.used if self.experts else 1), self.dense_width)

    @property
    def kv_width(self):
        """Numbers of a key and its value, all kv heads."""
        return 2 * self.kv_heads * self.head_size

    @property
    def kv_rows(self):
        """Outputs of the key and of the value projection together."""
        return self.kv_width // 2 if self.shares_kv else self.kv_width


@dataclass(frozen=True)
class Stack:
    """Layers on a residual stream. ropes: that layers name by number. vocab,
    max_positions: 0 when not stated.

    embed_scale: of what the embedding gives. output_multiplier, soft_cap: of logits, as table.py has them (1
    and 0: the head's own). fp8: of files whose linear weights are. sources: fact -> key of config.json.
    """

    width: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    eps: float
    vocab: int
    max_positions: int
    embed_scale: float = field(default=1.0, kw_only=True)
    output_multiplier: float = field(default=1.0, kw_only=True)
    soft_cap: float = field(default=0.0, kw_only=True)
    fp8: Fp8 | None = field(default=None, kw_only=True)
    sources: dict[str, str] = field(default_factory=dict, compare=False, kw_only=True)

    @property
    def curve(self):
        """(multiplier, cap) of the rows that make laws."""
        return self.output_multiplier, self.soft_cap

    @property
    def rotations(self):
        """(rope, rotary width) of every layer; equal ones share their tables of angles."""
        return [(self.ropes[layer.rope], layer.head_size) for layer in self.layers]

    def each(self, what):
        """What every layer has: a name of Layer."""
        return tuple(getattr(layer, what) for layer in self.layers)

    def most(self, what):
        """The largest of it."""
        return max(self.each(what))

    def facts(self):
        """Fact -> value: the stack's own, and for every field of a layer the list of its values."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("layers", "sources")}
        own |= {"layers": len(self.layers), "fp8": self.fp8 is not None}
        return own | {f.name: list(self.each(f.name)) for f in fields(Layer)}


@dataclass(frozen=True)
class ModelConfig(Stack):
    """A target. tied: its head is its embedding. prefix: of its tensors' names."""

    family: str
    tied: bool
    stop_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    prefix: str = "model."


@dataclass(frozen=True)
class DrafterConfig(Stack):
    """A DFlash v1 drafter. block: as trained. mask_id: what fills a block. taps: target layers that feed it,
    from 0. layout: of its files (drafter_layouts.py). draft_vocab: ids that a reduced head ranks; 0: all."""

    block: int
    mask_id: int
    taps: tuple[int, ...]
    target_layers: int | None
    layout: str = "z-lab"
    draft_vocab: int = 0

    def context(self, ctx):
        """Positions that a drafted run may use where a plain one may use `ctx`."""
        return min(ctx, self.max_positions or ctx)
