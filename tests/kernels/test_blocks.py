"""Weights in blocks on the CPU: bits of the dequantised model's products, in as many bits as the file has."""

import numpy as np
import pytest
from minidflash.kernels.blocks import KINDS, widened
from minidflash.kernels.cpu import dot
from minidflash.kernels.weight import TABLE, Weight

from tests.cases import Matrix, put
from tests.compare import assert_same_bits, real
from tests.conftest import open_or_skip

COUNTS = [1, 3, 4, 6, 16, 18]  # of rows: every way that tokens are blocked


class Blocks:
    """A tensor of any bytes that are finite numbers, as a reader hands it over."""

    def __init__(self, rng, name, rows, cols):
        kind, self.dtype, self.shape = KINDS[name], name.upper(), (rows, cols)
        raw = rng.integers(0, 256, (rows, cols // kind.values, kind.block.itemsize), np.uint8)
        self.array = raw.view(kind.block)[..., 0]
        for half in {"d", "m"} & set(kind.block.names):
            self.array[half] = 0.02 * rng.standard_normal(self.array.shape)
        self.array["d"][0, 0] = 2.0**-24  # the smallest there is
        self.wide = widened(kind, self.array)

    def drop(self):
        pass


def product(ops, w, a):
    """linear of rows a."""
    y = ops.array((len(a), w.rows), "A")
    work = ops.array((ops.backend.work_size(len(a), w.cols, w.rows),), "f32")
    ops.linear(put(ops, a, "A"), w, None, work, y)
    return ops.download(y)


@pytest.mark.parametrize("name, activations", [*((name, "f32") for name in KINDS), ("q4_1", "bf16")])
def test_products_are_the_dequantised_model_s_bit_for_bit(rng, name, activations):
    """Of tensors that end within a tile, stacked; whatever the number of rows."""
    ops = open_or_skip("numba", activations)
    parts = [Blocks(rng, name, rows, 512) for rows in (70, 9)]
    w = ops.weight(parts)
    plain = ops.weight([Matrix(np.concatenate([part.wide for part in parts]))])
    assert (w.dtype, w.shape, w.layout) == (name, (79, 512), "packed") and plain.dtype == "f32"
    assert w.data.nbytes * 79 == w.nbytes * 80, "as many bits as in the file, but for rows of padding"
    a = rng.standard_normal((max(COUNTS), 512)).astype(np.float32)
    a = a if activations == "f32" else (a.view(np.uint32) >> 16).astype(np.uint16)
    whole = product(ops, plain, a)
    exact = real(a) @ np.concatenate([part.wide for part in parts]).astype(np.float64).T
    assert np.abs(real(whole) - exact).max() < 0.01 * np.abs(exact).max()
    for count in COUNTS:
        assert_same_bits(product(ops, w, a[:count]), whole[:count], f"{count} rows")


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_looked_up_exactly(rng, name):
    ops, tensor = open_or_skip("numba", "f32"), Blocks(rng, name, 21, 512)
    w, ids = ops.weight([tensor], TABLE), np.array([20, 0, 16, 3, 3], np.int32)
    x = ops.array((len(ids), 512), "A")
    ops.embed(ids, w, 1.5, x)
    np.testing.assert_array_equal(x, np.float32(1.5) * tensor.wide[ids])


@pytest.mark.parametrize("name", KINDS)
def test_the_oracle_widens_them(rng, name):
    ops, tensor = open_or_skip("oracle", "f32"), Blocks(rng, name, 5, 256)
    w = ops.weight([tensor])
    assert isinstance(w, Weight) and w.dtype == name
    np.testing.assert_array_equal(w.data, tensor.wide.astype(np.float64))


@pytest.mark.parametrize("name", KINDS)
def test_codes_become_numbers_by_vector_instructions(name):
    """A step of 32 inputs converts whole vectors, and nothing of it goes lane by lane."""
    if not dot.jit.TARGET[0].startswith("x86_64"):
        pytest.skip("needs an x86-64 CPU, whose instructions are looked for by name")
    lines = [line.split() for line in dot.assembly(name).splitlines() if line.startswith("\t")]
    wide = "zmm" if dot.IS_WIDE else "ymm"
    found = [words for words in lines if words[0] == "vcvtdq2ps"]
    in_vector = 16 if dot.IS_WIDE else 8
    planes = 2 if name == "q6_k" else 1
    assert len(found) >= planes * 32 * 16 // in_vector and all(wide in words[1] for words in found)
    assert any(words[0].startswith("vfmadd") and wide in words[1] for words in lines)
    scalar = {
        "vcvtsi2ss",
        "vpextrd",
        "vpextrb",
        "vpinsrd",
        "vpinsrb",
        "vcvtsi2ssl",
        "vfmadd213ss",
        "vfmadd231ss",
    }
    assert not scalar & {words[0] for words in lines}
