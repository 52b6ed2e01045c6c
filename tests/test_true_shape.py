"""One layer of true shape, SmolLM2-135M's and Qwen3-8B's, on the fast GPU kernels against the oracle."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from minidflash.kernels.sizes import SIZES

from minidflash import stack
from minidflash.layers import run_layer
from minidflash.state import make_state
from tests.cases import Make, put
from tests.compare import assert_same_bits, real
from tests.conftest import FULL, open_or_skip, parameters
from tests.models import place

SHAPES = {name: SIZES[name] for name in ("smollm2-135m", "qwen3-8b")}
CONTEXT, ROWS = 140, 5  # two leaves of attention
# Of what the layer adds: bf16 rounds q, k, v, h and the attention's output once each, by 2^-9 at most.
CLOSE = 0.01


@pytest.fixture(scope="module")
def layer():
    """name of a shape -> its layer's inputs on the host, made once."""
    return cache(inputs_of)


def inputs_of(name):
    """(weights, norms, [keys, values], tables, x), random."""
    m = SHAPES[name]
    D, H, G, K, F = m.D, m.H, m.G, m.K, m.F
    make = Make(np.random.default_rng(1), "bf16")
    weights = {"q": [make.w(H * K, D)], "kv": [make.w(G * K, D), make.w(G * K, D)], "o": [make.w(D, H * K)],
               "gate_up": [make.w(F, D), make.w(F, D)], "down": [make.w(D, F)]}  # fmt: skip
    norms = {role: make.v(D, around=1.0) for role in ("attn_norm", "mlp_norm")}
    if m.family == "qwen3":
        norms |= {role: make.v(K, around=1.0) for role in ("q_norm", "k_norm")}
    caches = [make.a(1, G, CONTEXT + ROWS, K) for _ in range(2)]
    return weights, norms, caches, make.tables(CONTEXT + ROWS, K // 2, m.theta), make.a(ROWS, D)


class Layer:
    """The layer on a backend."""

    def __init__(self, ops, name, inputs):
        weights, norms, self.caches, tables, self.x = inputs
        self.ops = ops
        self.w = {
            role: ops.backend.weight(parts, "pairs" if role == "gate_up" else "matrix")
            for role, parts in weights.items()
        }
        self.w |= {role: put(ops, values, "f32") for role, values in norms.items()}
        self.tables = [put(ops, table, "f32") for table in tables]
        m = SHAPES[name]
        layer = stack.Layer(heads=m.H, kv_heads=m.G, head_size=m.K, ffn_width=m.F, scale=m.K**-0.5)
        self.config = stack.Stack(width=m.D, layers=(layer,), ropes=(), eps=1e-6, vocab=16, max_positions=0)

    def run(self, caches=None, first=0, count=ROWS):
        """x after the layer, and the caches, as the backend stores them, of `count` rows from `first` on."""
        ops, config = self.ops, self.config
        s = make_state(ops, config, None, 0, 1, CONTEXT + ROWS - 1, 1, count)
        place(ops, s.rows, range(count), CONTEXT + first)
        values = [self.x[first : first + count], *(caches or self.caches)]
        buffers = [s.rows.x, s.caches[0].k, s.caches[0].v]
        for buffer, value in zip(buffers, values, strict=True):
            ops.upload(buffer, real(value).astype(np.float32) if ops.activations == "f32" else value)
        run_layer(
            ops,
            SimpleNamespace(config=config, layers=[self.w], tables=[self.tables]),
            0,
            s.rows,
            s.caches[0],
            s.work,
        )
        return [ops.download(buffer) for buffer in buffers]


def off(got, want, before):
    """Size of the error over the size of what the layer added."""
    return np.linalg.norm(real(got) - real(want)) / np.linalg.norm(real(want) - real(before))


on_gpu_backends = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)


CASES = [  # the emulator takes a minute for the larger one
    pytest.param(p.values[0], name, id=f"{p.id}-{name}", marks=p.marks)
    for p in parameters(["emulate", "cuda"], ["bf16"])
    for name in SHAPES
    if FULL or p.values[0][0] == "cuda" or name == "smollm2-135m"
]


@pytest.mark.parametrize("ops, name", CASES, indirect=["ops"])
def test_a_layer_matches_the_oracle(ops, layer, name):
    inputs = layer(name)
    _, _, caches, _, x = inputs
    got = Layer(ops, name, inputs).run()
    want = Layer(open_or_skip("oracle", "f32"), name, inputs).run()
    variants = {row: ops.backend.variants[row] for row in ("qkv", "attend", "linear_add", "gate_up")}
    assert set(variants.values()) == {"fast"}, variants
    assert off(got[0], want[0], x) < CLOSE
    for mine, theirs, before in zip(got[1:], want[1:], caches, strict=True):
        new = slice(CONTEXT, None)
        assert off(mine[..., new, :], theirs[..., new, :], before[..., new, :]) < CLOSE
        assert_same_bits(mine[..., :CONTEXT, :], before[..., :CONTEXT, :], "keys from before")


@on_gpu_backends
def test_a_layer_shows_whose_keys_it_reads_and_no_neighbours(ops, layer):
    """Of the smaller shape: another kv head's keys are seen, and a row alone has the bits of the rows
    together."""
    name = "smollm2-135m"
    inputs = layer(name)
    _, _, (keys, values), _, x = inputs
    fast = Layer(ops, name, inputs)
    right = fast.run()
    assert off(fast.run([keys[:, ::-1], values])[0], right[0], x) > 3 * CLOSE
    alone = fast.run(right[1:], 2, 1)  # it sees the keys of the rows before it
    assert_same_bits(alone[0], right[0][2:3], "one row alone")
