"""Blocks that have all keys of their rows (kernels/cuda/attend_whole.cu): two leaves of them at once."""

import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import attend_fast, split

from tests.compare import assert_same_bits
from tests.kernels.test_compile import needs_nvrtc
from tests.kernels.test_fast_attend import FAST, call, make, some


@pytest.mark.parametrize("ops", FAST, indirect=True)
@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("heads, context, rows, splits, how", [
    ((4, 1, 64), 1400, 16, 6, {}), ((2, 1, 128), 1000, 16, 24, {}), ((4, 1, 64), 860, 5, 3, {"window": 700}),
    ((2, 2, 128), 100, 3, 24, {}),
], ids=str)  # fmt: skip
def test_two_leaves_at_once_have_the_bits_of_one(ops, rng, heads, context, rows, splits, how, wgmma):
    """Of one leaf alone too, and of an odd number of them."""
    case, tuning = make(rng, range(context, context + rows), heads, **how), {"splits": splits, "wgmma": wgmma}
    one = call(ops, case, whole=True, kept=1, **tuning)
    assert_same_bits(call(ops, case, whole=True, kept=2, **tuning), one)
    assert_same_bits(call(ops, some(case, [rows - 1]), whole=True, kept=2, **tuning)[0], one[-1])


@needs_nvrtc
@pytest.mark.parametrize("size", [64, 128])
def test_two_leaves_fit_a_block_without_spills(size):
    shape = attend_fast.Shape(16, 32, 8, size, 1, 132)
    _, log = compiler.compile_cubin("attend_whole.cu", "sm_90a", shape.defines | {"KEPT": 2})
    used = compiler.resources(log)["attend_whole"]
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), used
    assert "Potential Performance Loss" not in log, log  # ptxas made wgmma wait for each other
    assert shape.shared < shape.shared_of(2) <= split.SHARED_PER_BLOCK - split.STATIC
