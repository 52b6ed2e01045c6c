"""Whole models of true shape with random weights, without a checkpoint: what the benches time."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minidflash.kernels.sizes import SIZES
from minidflash.kernels.table import CLAMPED, GELU_TANH, SILU
from minidflash.kernels.weight import EXPERT_PAIRS, EXPERTS
from minidflash.weights import drafter_names, names
from minidflash.weights.fp8_names import FP8, SCALE

from minidflash.engine import Engine, build, in_type
from minidflash.fit import positions_of
from minidflash.fp8_config import Fp8
from minidflash.rope import Rope, rope_tables
from minidflash.stack import DrafterConfig, Experts, Layer, ModelConfig

SHAPES = list(SIZES)


class RandomTensor:
    """A checkpoint tensor made of random bf16, or of FP8's codes and scales, a view into one pool:
    dtype, shape, array, drop(), as the reader's."""

    dtype = "BF16"
    pool = codes = None

    def __init__(self, name, shape, rng, is_fp8=False):
        self.name, self.shape = name, shape
        if is_fp8:
            self._make_fp8(rng)
            return
        if "bias" in name or "sinks" in name:
            self.array = np.zeros(shape, np.uint16)
            return
        if len(shape) == 1:  # norms: ones
            self.array = np.full(shape, 0x3F80, np.uint16)
            return
        count = int(np.prod(shape))
        if RandomTensor.pool is None or len(RandomTensor.pool) < count + 2**20:
            # A random sign, mantissa and one of two exponents: +-[2^-7, 2^-5), a spread of about 0.02.
            bits = rng.integers(0, 2**16, count + 2**20, np.uint16)
            RandomTensor.pool = (bits & 0x80FF) | 0x3C00
        start = int(rng.integers(0, len(RandomTensor.pool) - count)) // 8 * 8
        self.array = RandomTensor.pool[start : start + count].reshape(shape)

    def _make_fp8(self, rng):
        """The same numbers, about."""
        if self.name.endswith(SCALE):
            self.dtype, self.array = "F32", np.full(self.shape, 2.0**-6, np.float32)
            return
        count, self.dtype = int(np.prod(self.shape)), "F8_E4M3"
        if RandomTensor.codes is None or len(RandomTensor.codes) < count:
            RandomTensor.codes = rng.integers(0, 2**8, count, np.uint8) & 0x8F | 0x30
        self.array = RandomTensor.codes[:count].reshape(self.shape)

    @property
    def nbytes(self):
        return self.array.nbytes

    def drop(self):
        pass


def configs(shape, positions, fp8=()):
    """(ModelConfig, DrafterConfig) of a named shape. fp8: of "target", "drafter", those whose weights are."""
    pair = zip(("target", "drafter"), _configs(shape, positions), strict=True)
    return tuple(replace(one, fp8=Fp8()) if which in fp8 else one for which, one in pair)


def _configs(shape, positions):
    m = SIZES[shape]
    facts = {"scale": m.K**-0.5, "attention_bias": m.bias, "qk_norm": m.family.startswith("qwen3")}
    if m.full:
        return gemma4(m, positions)
    if m.E:
        gpt_oss = {"normalise": True, "limit": 7.0, "alpha": 1.702, "bias": True} if m.bias else {}
        layout = "mxfp4" if m.experts == "mxfp4" else "separate"
        facts |= {"ffn": "experts", "sinks": m.bias, "act": CLAMPED if m.bias else SILU}
        facts["experts"] = Experts(m.E, m.U, layout, **gpt_oss)
    own = tuple(Layer(m.H, m.G, m.K, m.F, window=window, **facts) for window in m.windows)
    return pair_of(m, own, positions, Rope(m.theta))


def gemma4(m, positions):
    """The same of a shape whose full layers have sizes of their own."""
    facts = {"scale": 1.0, "qk_norm": True, "v_norm": True, "end_norms": True, "end_scale": True,
             "act": GELU_TANH}  # fmt: skip
    if m.E:
        experts = Experts(m.E, m.U, "stacked", own_norm=True)
        facts |= {"ffn": "mlp_and_experts", "experts": experts, "dense_width": m.dense}
    groups, size = m.full
    own = tuple(
        Layer(m.H, m.G, m.K, m.F, window=window, **facts) if window
        else Layer(m.H, groups, size, m.F, rope=1, shares_kv=True, **facts)
        for window in m.windows
    )  # fmt: skip
    ropes = Rope(m.theta), Rope(1e6, "proportional", partial_rotary_factor=0.25)
    more = {"embed_scale": m.D**0.5, "soft_cap": 30.0}
    return pair_of(m, own, positions, *ropes, theta=1e6, **more)


def pair_of(m, own, positions, *ropes, theta=None, **more):
    """Configs of a target with these layers and of its drafter. theta: of the drafter's rope, where it is not
    the target's."""
    d = m.drafter
    drafting = tuple(
        Layer(d.H, d.G, d.K, d.F, window=window, causal=window > 0, sees_block=window > 0, scale=d.K**-0.5,
              qk_norm=True, attention_bias=m.bias)
        for window in (d.window,) * (d.layers - 1) + (0,)
    )  # fmt: skip
    shared = {"width": m.D, "eps": 1e-6, "vocab": m.V, "max_positions": positions}
    target = ModelConfig(
        layers=own, ropes=ropes, family=m.family, tied=m.tied, stop_ids=(), bos_id=None, dtype="bfloat16",
        **shared, **more,
    )  # fmt: skip
    drafter = DrafterConfig(
        layers=drafting, ropes=(Rope(theta),) if theta else ropes, block=d.block, mask_id=m.V - 1,
        taps=d.taps, target_layers=m.layers, **shared,
    )  # fmt: skip
    return target, drafter


def random_bound(table, rng):
    """A names table bound to random tensors."""
    tensors = {
        name: RandomTensor(name, shape, rng, named.transform == FP8)
        for named in table.values()
        for name, shape in named.sources
    }
    return {ours: named.bind(tensors) for ours, named in table.items()}


def random_engine(ops, shape, ctx, seed=0, chunk=None, fp8=()):
    """An Engine of a named shape with random weights on the backend of `ops`. fp8: as configs has it.
    Returns (Engine, seconds of loading)."""
    import time

    rng = np.random.default_rng(seed)
    target, drafter = configs(shape, ctx, fp8)
    table = names.target_table(target)
    if not target.tied:
        table["head"] = names.matrix("lm_head.weight", rows=target.vocab, cols=target.width)
    tables = {
        kind: rope_tables(ops, *kind, count) for kind, count in positions_of(target, drafter, ctx).items()
    }
    since = time.perf_counter()
    of_experts = {name: named for name, named in table.items() if named.role in (EXPERTS, EXPERT_PAIRS)}
    dense = {name: named for name, named in table.items() if name not in of_experts}
    big = build(ops, target, random_bound(dense, rng), tables)
    put_experts(ops, big, of_experts, rng)
    small = build(ops, drafter, random_bound(drafter_names.drafter_table(drafter), rng), tables)
    big.embed, big.head = big.weights["embed"], big.weights.get("head", big.weights["embed"])
    small.embed, small.head = big.embed, big.head
    big.embed_scale = small.embed_scale = in_type(target.embed_scale, "BF16")
    big.ids = small.ids = target.vocab
    seconds = time.perf_counter() - since
    engine = Engine(
        ops=ops, target=big, drafter=small, tokenizer=None, stop_ids=frozenset(), target_name=shape,
        drafter_name=shape + "-drafter", ctx=ctx, chunk=chunk or min(ops.prefill_chunk, ctx), load_s=seconds,
    )  # fmt: skip
    return engine, seconds


def put_experts(ops, model, table, rng):
    """Experts of a model's layers, made on the card: a checkpoint of them would be read for minutes."""
    from experts import RandomWeights

    if table:
        make = RandomWeights(ops, rng)
        for name, named in table.items():
            _, i, short = name.split(".")
            kind = "mxfp4" if named.transform.startswith("blocks") else "bf16"
            weight = make.experts(kind, named.shape, named.role == EXPERT_PAIRS)
            model.layers[int(i)][short] = weight
            model.nbytes += weight.nbytes


def set_context(ops, s, context, fresh=0):
    """Put every slot of a State to a context, with so many rows to inject, and wait."""
    for buffer, value in ((s.start, context), (s.fresh, fresh), (s.done, 0), (s.left, 10**6), (s.anchor, 5)):
        ops.upload(buffer, np.full(buffer.shape, value, np.int32))
    ops.download(s.start)


def fill_caches(ops, s):
    """Random keys and values at all positions."""
    rng = np.random.default_rng(1)
    for array in (part for cache in s.caches + s.drafter_caches for part in (cache.k, cache.v)):
        bits = rng.integers(0, 2**16, array.shape, np.uint16) & 0x81FF | 0x3E00
        if ops.activations == "f32":
            bits = (bits.astype(np.uint32) << 16).view(np.float32)
        ops.upload(array, bits)


def pass_bytes(model, head=True):
    """Bytes of weights that one pass reads: every matrix of the layers, and the head."""
    weights = [w for layer in model.layers for w in layer.values() if hasattr(w, "rows")]
    weights += [w for name, w in model.weights.items() if name == "fc"] + [model.head] * head
    return sum(w.nbytes for w in weights)
