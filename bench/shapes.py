"""Whole models of true shape with random weights, without a checkpoint: what the benches time."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minidflash.weights import names

from minidflash.config import DrafterConfig, ModelConfig
from minidflash.engine import Engine, build
from minidflash.rope import Rope

# name: target (family, width, layers, heads, kv heads, head size, ffn, vocab, tied, theta), drafter (layers,
# heads, kv heads, head size, ffn, taps). Source: models.md 9, dflash.md 2.2.
SHAPES = {
    "qwen3-8b": (("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False, 1e6),
                 (5, 32, 8, 128, 12288, (1, 9, 17, 25, 33))),
    "qwen3-4b": (("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 1e6),
                 (5, 32, 8, 128, 9728, (1, 9, 17, 25, 33))),
    "llama-3.1-8b": (("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 5e5),
                     (5, 32, 8, 128, 12288, (1, 8, 15, 22, 29))),
    "smollm2-135m": (("llama", 576, 30, 9, 3, 64, 1536, 49152, True, 1e5),
                     (5, 9, 3, 64, 1536, (1, 8, 14, 20, 27))),
    "toy": (("qwen3", 256, 4, 8, 2, 64, 512, 1000, False, 1e6), (2, 8, 2, 64, 512, (1, 2))),
}  # fmt: skip


class RandomTensor:
    """A checkpoint tensor made of random bf16, a view into one pool:
    dtype, shape, array, drop(), as the reader's."""

    dtype = "BF16"
    pool = None

    def __init__(self, name, shape, rng):
        self.name, self.shape = name, shape
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

    @property
    def nbytes(self):
        return self.array.nbytes

    def drop(self):
        pass


def configs(shape, positions):
    """(ModelConfig, DrafterConfig) of a named shape."""
    (
        (family, width, layers, heads, kv, size, ffn, vocab, tied, theta),
        (d_layers, d_heads, d_kv, d_size, d_ffn, taps),
    ) = SHAPES[shape]
    target = ModelConfig(
        family=family, width=width, layers=layers, heads=heads, kv_heads=kv, head_size=size, ffn=ffn,
        vocab=vocab, eps=1e-6, rope=Rope(theta), tied=tied, qk_norm=family == "qwen3", attention_bias=False,
        windows=(0,) * layers, max_positions=positions, stop_ids=(), bos_id=None, dtype="bfloat16",
    )  # fmt: skip
    drafter = DrafterConfig(
        width=width, layers=d_layers, heads=d_heads, kv_heads=d_kv, head_size=d_size, ffn=d_ffn, eps=1e-6,
        rope=Rope(theta), attention_bias=False, windows=(0,) * d_layers, causal=(False,) * d_layers, block=16,
        mask_id=vocab - 1, taps=taps, vocab=vocab, target_layers=layers, max_positions=positions,
    )  # fmt: skip
    return target, drafter


def random_engine(ops, shape, ctx, seed=0, chunk=None):
    """An Engine of a named shape with random weights on the backend of `ops`.
    Returns (Engine, seconds of loading)."""
    import time

    rng = np.random.default_rng(seed)
    target, drafter = configs(shape, ctx)
    bound = {
        name: [RandomTensor(theirs, dims, rng) for theirs, dims in parts]
        for name, parts in names.FAMILIES[target.family](target).items()
    }
    if not target.tied:
        bound["head"] = [RandomTensor("lm_head.weight", (target.vocab, target.width), rng)]
    own = {
        name: [RandomTensor(theirs, dims, rng) for theirs, dims in parts]
        for name, parts in names._drafter(drafter).items()
    }
    since = time.perf_counter()
    big, small = build(ops, target, bound, ctx + 64), build(ops, drafter, own, ctx + 64)
    if "head" not in big.weights:
        big.weights["head"] = big.weights["embed"]
    seconds = time.perf_counter() - since
    engine = Engine(
        ops=ops, target=big, drafter=small, tokenizer=None, stop_ids=frozenset(), target_name=shape,
        drafter_name=shape + "-drafter", ctx=ctx, chunk=chunk or min(ops.prefill_chunk, ctx), load_s=seconds,
    )  # fmt: skip
    return engine, seconds


def set_context(ops, s, context, fresh=0):
    """Put a State to a context, with so many rows to inject, and wait."""
    for buffer, value in ((s.start, context), (s.fresh, fresh), (s.done, 0), (s.left, 10**6), (s.anchor, 5)):
        ops.upload(buffer, np.array([value], np.int32))
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
    weights += [w for name, w in model.weights.items() if name == "fc" or (name == "head" and head)]
    return sum(w.nbytes for w in weights)
