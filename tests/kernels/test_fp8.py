"""FP8 weights: every code, every row of the table that takes them, what a part of a file is checked for."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from minidflash.kernels import fp8
from minidflash.kernels.table import ROWS
from minidflash.kernels.weight import BITS, EXPERT_PAIRS, EXPERTS, Weight, stored_bytes
from minidflash.weights.transforms import Fp8Part

from tests.cases import Experts, Fp8, Make, Matrix, run
from tests.compare import assert_same_bits
from tests.conftest import FULL, open_or_skip
from tests.kernels import test_experts_down, test_experts_up, test_rows
from tests.refusals import refused

REACHED = (
    "qkv",
    "linear_add",
    "gate_up",
    "fuse",
    "inject",
)  # by the weights of files; heads and tables are not
TAKING = [
    name
    for name in test_rows.ROW_KERNELS
    if any(arg.type == "W" for arg in ROWS[name].args) and (FULL or name in REACHED)
]


def plain(case):
    """The case with the dequantised numbers in f32."""

    def wide(value):
        if isinstance(value, Experts):
            return Experts([wide(part) for part in value.parts], value.count)
        return Matrix(value.wide) if isinstance(value, Fp8) else value

    return {name: wide(value) for name, value in case.items()}


def assert_same(ops, name, case, sizes):
    found, wanted = run(ops, name, case, **sizes), run(ops, name, plain(case), **sizes)
    for what, value in wanted.items():
        assert_same_bits(found[what], value, f"{name}: {what}")


def test_codes_are_those_of_ml_dtypes():
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8.NUMBERS, wanted)
    assert np.isnan(fp8.NUMBERS[[0x7F, 0xFF]]).all() and np.isnan(fp8.NUMBERS).sum() == 2


@pytest.mark.parametrize("activations", ["f32", "bf16"] if FULL else ["f32"])
@pytest.mark.parametrize("backend", ["numba", "oracle"])
@pytest.mark.parametrize("name", TAKING)
def test_rows_are_those_of_the_dequantised_weights(rng, name, backend, activations):
    """Bit for bit, of 1, few and many token rows."""
    ops = open_or_skip(backend, activations)
    case, sizes = test_rows.make(name, rng, activations, "fp8")
    for count in (1, 3, 7, 21) if backend == "numba" else (2,):
        assert_same(ops, name, test_rows.some_rows(name, case, list(range(count))), sizes)


@pytest.mark.parametrize("backend", ["numba", "oracle"])
def test_experts_are_those_of_the_dequantised_weights(rng, backend):
    """Inputs that end within a block, outputs within a tile; gate and up of 40 rows each."""
    ops = open_or_skip(backend, "f32")
    for T in (1, 11) if backend == "numba" else (3,):
        case = test_experts_up.make(ops, rng, T, 3, 2, 200, 40, "fp8")
        assert_same(ops, "experts_up", case, {"F": 40})
        assert_same(ops, "experts_down", test_experts_down.make(ops, rng, T, 3, 2, 40, 300, "fp8"), {})


@pytest.mark.parametrize("rows, cols", [((72, 13), 300), ((200, 24, 8, 40), 77), ((16,), 256), ((5,), 9)])
def test_stacked_parts_and_ragged_sizes(rng, rows, cols):
    """Blocks of several tensors that do not line up; every code; inputs in and behind whole steps."""
    ops, make = open_or_skip("numba", "f32"), Make(rng, "f32", "fp8")
    parts = [make.w(count, cols) for count in rows]
    first = parts[0].array.reshape(-1)[:256]
    first[:] = np.arange(len(first))
    first[(first & fp8.NAN_BITS) == fp8.NAN_BITS] = 0
    w, wide = ops.weight(parts), ops.weight([Matrix(np.concatenate([part.wide for part in parts]))])
    assert (w.dtype, w.shape, w.layout) == ("fp8", (sum(rows), cols), "packed")
    for count in (1, 4, 8, 9, 16):
        a = make.a(count, cols)
        found, wanted = (product(ops, one, a) for one in (w, wide))
        assert_same_bits(found, wanted, f"{count} rows")


def product(ops, w, a):
    """fuse of rows a: a product, normed."""
    y, work = ops.array((len(a), w.rows), "A"), ops.backend.work_size(len(a), w.cols, w.rows)
    ops.fuse(a, w, np.ones(w.rows, np.float32), 1e-6, ops.array((work,), "f32"), y)
    return y


def test_weights_take_what_their_type_takes(rng):
    ops, make = open_or_skip("numba", "f32"), Make(rng, "f32", "fp8")
    assert BITS["fp8"] == 8.03125 and stored_bytes((64, 256), "fp8") == 64 * 256 + 8 * 2 * 4
    for role in (EXPERTS, EXPERT_PAIRS):
        w = ops.weight(make.experts(5, 64, 256).parts, role, 5)
        assert w.shape == (5, 64, 256) and w.data.nbytes == w.nbytes
    assert ops.weight([make.w(64, 256)]).data.nbytes == 64 * 256 + 8 * 2 * 4


def test_rows_that_share_a_scale_stay_together(rng):
    codes, scales = np.arange(40 * 3).reshape(40, 3), np.arange(5.0)[:, None]
    w = Weight((40, 3), "fp8", "plain", (codes, scales))
    part = w.slice(16, 24)
    assert part.shape == (24, 3) and part.parts[0][0, 0] == 48 and part.parts[1][:, 0].tolist() == [2, 3, 4]
    for first, count in ((4, 8), (8, 4)):
        with pytest.raises(ValueError, match="share a scale"):
            w.slice(first, count)
    make = Make(rng, "f32", "fp8")
    with pytest.raises(ValueError, match="share"):
        open_or_skip("numba", "f32").weight([make.w(12, 9), make.w(8, 9)])


def tensor(name, array):
    """As a file's Tensor, enough of it for a part."""
    return SimpleNamespace(name=name, array=array, shape=array.shape, drop=lambda: None)


def test_a_part_checks_what_it_reads(rng):
    """A NaN anywhere, also behind the first piece; scales that are not finite, or too large."""
    codes = np.zeros((700, 500), np.uint8)
    scales = np.ones((6, 4), np.float32)
    scales[5, 3] = 2.0
    part = Fp8Part(tensor("x.weight", codes), tensor("x.weight_scale_inv", scales))
    assert part.shape == (700, 500) and part.scales.shape == (88, 4) and part.array is codes
    assert (part.scales[80:, 3] == 2).all() and part.scales.sum() == 88 * 4 + 8
    for bad in (0x7F, 0xFF):
        codes[699, 1] = bad
        refused(lambda: part.array, "x.weight", "NaN")
    for bad in (np.nan, np.inf, -np.inf, 256, -256):
        scales[2, 1] = bad
        refused(lambda: part.scales, "x.weight_scale_inv", "finite")
    scales[2, 1] = 255
    assert part.scales.max() == 255
