"""THE signature table: one row a kernel, at the granularity of the fused CUDA kernels.

Grammar of a row: `[&]name:type[dims][?] ... -> outputs`. Types: `A` the activation type (f32 or bf16), `W` a
`Weight` handle (stored dtype and layout are its own), `f32`, `i32`. Dims are letters (T new rows, N slots, D
width, H query heads, G kv heads, K head size, F ffn width, V vocab, R rows of the tap buffer, C tap columns,
S cached rows, P rope rows, J rotated pairs, B block, L layers, Z workspace, M picked rows, X stop ids, Y ids
that a reduced head ranks, E experts, U experts used by a row) or products of them, `|` between two of which
either will do; no dims means a scalar. `&name` is read and written; `?` may be None; what is behind the arrow
is only written. All buffers are the caller's. A row's address is its slot (which sequence), its pos (where
rotation and windows see it) and its at (the number of its key): key n of a slot lies in row n % S of its
caches, so S rows are a full cache or a ring.
A row of activations with `pos < 0` is inactive: nothing is stored for it.

margin: of a picked row, how far its largest logit lies above the second one; infinite where there is no
second, or one is not finite.

Where a layer has experts, route chooses U of them for each row. Pair r = t * U + k is the k-th choice of row
t, and the pairs of expert e are order[first[e] : first[e + 1]], r ascending; an inactive row is in no group
and its experts are -1, and so is order behind the last group. touched counts experts with a pair.

A law is a softmax over cap * tanh(multiplier * z / cap) of the bare logits z = W n(x), over multiplier * z
where cap is 0. Both rise with z, so the likeliest id is that of the bare logits, which is what head takes,
and ids are ranked by these: where f32 rounds two capped logits to one number, the larger bare one is first.
"""

import math
import re
from dataclasses import dataclass

from .weight import EXPERT_PAIRS, EXPERTS, MATRIX, PAIRS
from .weight import TABLE as TABLE_ROLE

TABLE = {
    "embed": "ids:i32[T] table:W[V,D] scale:f32 -> x:A[T,D]",
    "qkv": "x:A[T,D] norm:f32[D]? eps:f32 wq:W[H*K,D] wkv:W[2*G*K|G*K,D] q_bias:f32[H*K]? "
    "kv_bias:f32[2*G*K|G*K]? q_norm:f32[K]? k_norm:f32[K]? v_norm:f32[K]? cos:f32[P,J] sin:f32[P,J] "
    "slot:i32[T] pos:i32[T] at:i32[T] &cache_k:A[N,G,S,K] &cache_v:A[N,G,S,K] &work:f32[Z] -> q:A[T,H,K]",
    "attend": "q:A[T,H,K] cache_k:A[N,G,S,K] cache_v:A[N,G,S,K] slot:i32[T] pos:i32[T] begin:i32[T] "
    "end:i32[T] window:i32 causal:i32 scale:f32 sinks:f32[H]? &work:f32[Z] -> o:A[T,H,K]",
    "linear": "a:A[T,F] w:W[D,F] bias:f32[D]? &work:f32[Z] -> y:A[T,D]",
    "linear_add": "a:A[T,F] w:W[D,F] bias:f32[D]? norm:f32[D]? eps:f32 scale:f32[1]? tap_row:i32[T]? "
    "tap_at:i32 &x:A[T,D] &taps:A[R,C]? &work:f32[Z]",
    "gate_up": "x:A[T,D] norm:f32[D]? eps:f32 act:i32 w:W[2*F,D] &work:f32[Z] -> h:A[T,F]",
    "route": "x:A[T,D] norm:f32[D] u_norm:f32[D]? eps:f32 w:W[E,D] bias:f32[E]? normalise:i32 "
    "expert_scale:f32[E]? pos:i32[T] &touched:i32[1] "
    "&work:f32[Z] -> u:A[T,D] expert:i32[T,U] share:f32[T,U] first:i32[E+1] order:i32[T*U]",
    "experts_up": "u:A[T,D] w:W[E,2*F,D] bias:f32[E,2*F]? expert:i32[T,U] first:i32[E+1] order:i32[T*U] "
    "act:i32 limit:f32 alpha:f32 &work:f32[Z] -> h:A[T,U,F]",
    "experts_down": "h:A[T,U,F] w:W[E,D,F] bias:f32[E,D]? expert:i32[T,U] share:f32[T,U] first:i32[E+1] "
    "order:i32[T*U] adds:i32 tap_row:i32[T]? tap_at:i32 &x:A[T,D] &taps:A[R,C]? &work:f32[Z]",
    "join": "a:A[T,D] b:A[T,D] a_norm:f32[D] b_norm:f32[D] norm:f32[D] eps:f32 scale:f32[1]? "
    "tap_row:i32[T]? tap_at:i32 &x:A[T,D] &taps:A[R,C]?",
    "head": "x:A[T,D] pick:i32[M] norm:f32[D] eps:f32 w:W[V,D] limit:i32 &ids:i32[T] &margin:f32[T]? "
    "&work:f32[Z]",
    "sample": "x:A[T,D] pick:i32[M] slot:i32[T] pos:i32[T] norm:f32[D] eps:f32 w:W[V,D] limit:i32 "
    "multiplier:f32 cap:f32 key:i32[N,4] law:f32[N,3] &ids:i32[T] &logprob:f32[T,2]? &work:f32[Z]",
    "propose": "x:A[T,D] pick:i32[M] slot:i32[T] pos:i32[T] norm:f32[D] eps:f32 w:W[V,D] limit:i32 "
    "multiplier:f32 cap:f32 key:i32[N,4] law:f32[N,3] &ids:i32[T] &mass:f32[T,V] &work:f32[Z]",
    "reject": "x:A[T,D] pos:i32[T] norm:f32[D] eps:f32 w:W[V,D] limit:i32 multiplier:f32 cap:f32 "
    "key:i32[N,4] law:f32[N,3] drafts:i32[N,B] mass:f32[N,B,V] &ids:i32[T] &logprob:f32[T,2]? &work:f32[Z]",
    "head_logits": "x:A[T,D] norm:f32[D] eps:f32 w:W[V,D] multiplier:f32 cap:f32 &work:f32[Z] -> "
    "logits:f32[T,V]",
    "widen": "pick:i32[M] pos:i32[T] names:i32[Y] narrow:f32[T,Y]? &ids:i32[T] &mass:f32[T,V]?",
    "fuse": "taps:A[T,C] w:W[D,C] norm:f32[D] eps:f32 &work:f32[Z] -> f:A[T,D]",
    "inject": "f:A[T,D] wkv:W[L*2*G*K,D] kv_bias:f32[L*2*G*K]? k_norm:f32[L,K]? eps:f32 cos:f32[P,J] "
    "sin:f32[P,J] slot:i32[T] pos:i32[T] at:i32[T] &cache_k:A[L,N,G,S,K] &cache_v:A[L,N,G,S,K] &work:f32[Z]",
    "stage": "anchor:i32[N] start:i32[N] fresh:i32[N] done:i32[N] fill:i32[N,B] -> "
    "ids:i32[T] slot:i32[T] pos:i32[T] at:i32[T] begin:i32[T] end:i32[T] row:i32[T]",
    "stage_context": "start:i32[N] &fresh:i32[N] -> slot:i32[T] pos:i32[T]",
    "accept": "drafts:i32[N,B] choice:i32[T] stop:i32[N,X] &start:i32[N] &anchor:i32[N] &fresh:i32[N] "
    "&left:i32[N] &done:i32[N] -> record:i32[N,2*B+3] kept:i32[N]",
}


@dataclass(frozen=True)
class Arg:
    """One argument of a row. dims is None for a scalar, else a tuple of expressions over the dim letters."""

    name: str
    type: str
    dims: tuple | None
    inplace: bool
    optional: bool


@dataclass(frozen=True)
class Row:
    """A parsed row: `inputs` (with the in-place ones) come before `outputs`, in call order."""

    name: str
    inputs: tuple
    outputs: tuple

    @property
    def args(self):
        return self.inputs + self.outputs

    @property
    def fills_outputs(self):
        """Whether its function of the oracle takes the outputs too and fills them:
        several, or integers only."""
        return len(self.outputs) > 1 or all(arg.type == "i32" for arg in self.args)


_ARG = re.compile(r"(&?)([a-z_]+):(A|W|f32|i32)(?:\[([^\]]+)\])?(\??)$")


def parse(name, text):
    """Row from its text. Errors: ValueError on a word outside the grammar, naming it."""

    def argument(word):
        match = _ARG.match(word)
        if not match:
            raise ValueError(f"table row {name!r}: cannot read {word!r}")
        inplace, arg, kind, dims, optional = match.groups()
        dims = tuple(dims.split(",")) if dims else None
        return Arg(arg, kind, dims, bool(inplace), bool(optional))

    before, _, after = text.partition("->")
    return Row(name, tuple(map(argument, before.split())), tuple(map(argument, after.split())))


ROWS = {name: parse(name, text) for name, text in TABLE.items()}
# What a row's weight is for, where that is not MATRIX.
ROLES = {
    ("embed", "table"): TABLE_ROLE, ("gate_up", "w"): PAIRS, ("experts_up", "w"): EXPERT_PAIRS,
    ("experts_down", "w"): EXPERTS,
}  # fmt: skip
WIDEST = 64  # rows of a block, all of which a row may see beside its window
SILU, CLAMPED, GELU_TANH = range(3)


class Range:
    """Finite numbers above `low`, which is one of them where `closed`."""

    def __init__(self, low, closed):
        self.low, self.closed = low, closed

    def __contains__(self, value):
        return math.isfinite(value) and (value > self.low or (self.closed and value == self.low))

    def __repr__(self):
        return f"the finite numbers {'from' if self.closed else 'above'} {self.low}"


# What a scalar may be, where that is not any number.
ALLOWED = {
    ("gate_up", "act"): (SILU, GELU_TANH), ("experts_up", "act"): (SILU, CLAMPED, GELU_TANH),
    ("experts_down", "adds"): (0, 1),
}  # fmt: skip
BENT = "sample", "propose", "reject", "head_logits"  # rows of capped logits
ALLOWED |= {(name, "multiplier"): Range(0, False) for name in BENT}
ALLOWED |= {(name, "cap"): Range(0, True) for name in BENT}


def role_of(row, weight):
    """The role (weight.ROLES) of a row's argument of type W, both by name."""
    return ROLES.get((row, weight), MATRIX)
