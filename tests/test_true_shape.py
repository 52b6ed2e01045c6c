"""One layer of true shape, SmolLM2-135M's and Qwen3-8B's, on the fast GPU kernels against the oracle."""

from types import SimpleNamespace

import numpy as np
import pytest

from minidflash.layers import run_layer
from minidflash.state import Rows
from tests.cases import Make, put
from tests.compare import assert_same_bits, real
from tests.conftest import open_or_skip, parameters

# D, heads, kv heads, head size, F, q/k norm, theta
SHAPES = {
    "smollm2-135m": (576, 9, 3, 64, 1536, False, 1e5),
    "qwen3-8b": (4096, 32, 8, 128, 12288, True, 1e6),
}
CONTEXT, ROWS = 140, 5  # two leaves of attention
CLOSE = 0.01  # of what the layer adds: bf16 rounds q, k, v, h and the attention's output once each, by 2^-9 at most


@pytest.fixture(scope="module")
def layer():
    """name of a shape -> its layer's inputs on the host, made once."""
    made = {}

    def make(name):
        if name not in made:
            D, H, G, K, F, has_norms, theta = SHAPES[name]
            make = Make(np.random.default_rng(1), "bf16")
            weights = {"q": [make.w(H * K, D)], "kv": [make.w(G * K, D), make.w(G * K, D)], "o": [make.w(D, H * K)],
                       "gate_up": [make.w(F, D), make.w(F, D)], "down": [make.w(D, F)]}  # fmt: skip
            norms = {name: make.v(D, around=1.0) for name in ("attn_norm", "mlp_norm")}
            if has_norms:
                norms |= {name: make.v(K, around=1.0) for name in ("q_norm", "k_norm")}
            caches = [make.a(1, G, CONTEXT + ROWS, K) for _ in range(2)]
            tables = make.tables(CONTEXT + ROWS, K // 2, theta)
            made[name] = weights, norms, caches, tables, make.a(ROWS, D)
        return made[name]

    return make


class Layer:
    """The layer on a backend."""

    def __init__(self, ops, name, inputs):
        weights, norms, self.caches, tables, self.x = inputs
        self.ops, self.shape = ops, SHAPES[name]
        self.w = {role: ops.backend.weight(parts, role) for role, parts in weights.items()}
        self.w |= {role: self.put(values, "f32") for role, values in norms.items()}
        self.tables = [self.put(table, "f32") for table in tables]

    def put(self, values, kind):
        if kind == "A" and self.ops.activations == "f32":
            values = real(values).astype(np.float32)
        return put(self.ops, values, kind)

    def run(self, caches=None, rows=slice(None)):
        """x after the layer, and the caches, as the backend stores them. rows: which of them run."""
        ops, (D, H, G, K, F, *_) = self.ops, self.shape
        keys, values = (self.put(cache, "A") for cache in caches or self.caches)
        pos, count = np.arange(CONTEXT, CONTEXT + ROWS, dtype=np.int32)[rows], len(self.x[rows])
        none = np.zeros(count, np.int32)
        i32 = [self.put(column, "i32") for column in (none, none, pos, pos, pos + 1, none - 1)]
        buffers = [ops.array(shape, "A") for shape in ((count, H, K), (count, H, K), (count, F))]
        state = Rows(*i32, self.put(self.x[rows], "A"), *buffers)
        sizes = (D, (H + 2 * G) * K), (H * K, D), (D, 2 * F), (F, D), (H * K, 0)
        work = ops.array((max(ops.backend.work_size(count, *size) for size in sizes),), "f32")
        config = SimpleNamespace(eps=1e-6, head_size=K)
        run_layer(ops, config, self.w, self.tables, state, keys, values, state.pos, 0, 1, work)
        return [ops.download(buffer) for buffer in (state.x, keys, values)]


def off(got, want, before):
    """Size of the error over the size of what the layer added."""
    return np.linalg.norm(real(got) - real(want)) / np.linalg.norm(real(want) - real(before))


on_gpu_backends = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)


@on_gpu_backends
@pytest.mark.parametrize("name", SHAPES)
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
        assert off(mine[:, :, new], theirs[:, :, new], before[:, :, new]) < CLOSE
        assert_same_bits(mine[:, :, :CONTEXT], before[:, :, :CONTEXT], "keys from before")


@on_gpu_backends
def test_a_layer_shows_whose_keys_it_reads_and_no_neighbours(ops, layer):
    """Of the smaller shape: another kv head's keys are seen, and a row alone has the bits of the rows together."""
    name = "smollm2-135m"
    inputs = layer(name)
    _, _, (keys, values), _, x = inputs
    fast = Layer(ops, name, inputs)
    right = fast.run()
    assert off(fast.run([keys[:, ::-1], values])[0], right[0], x) > 3 * CLOSE
    alone = fast.run(right[1:], slice(2, 3))  # it sees the keys of the rows before it
    assert_same_bits(alone[0], right[0][2:3], "one row alone")
