"""The kernels before and behind a wide product (lay_wide.cu, wide_rows.cu) may start before what they read is
there."""

import numpy as np
import pytest
from minidflash.kernels.table import SILU
from minidflash.kernels.weight import MATRIX, PAIRS, TABLE

from tests.cases import Make, put
from tests.compare import assert_same_bits
from tests.fast_rows import on_gpu_backends

ROWS, COLS, OUTPUTS = 40, 360, 24


def chain(ops, table, weight, ids, norm):
    """Rows are looked up, then multiplied; with their norm, if there is one."""
    work = ops.array((ops.backend.work_size(ROWS, COLS, weight.rows),), "f32")
    ops.upload(work, np.zeros(work.shape, np.float32))
    x, out = ops.array((ROWS, COLS), "A"), ops.array((ROWS, OUTPUTS), "A")
    ops.embed(ids, table, 1.0, x)
    if norm is None:
        ops.linear(x, weight, None, work, out)
    else:
        ops.gate_up(x, norm, 1e-6, SILU, weight, work, out)
    return ops.download(out)


@on_gpu_backends
@pytest.mark.parametrize("is_normed", [False, True])
def test_rows_are_laid_once_they_are_there(ops, rng, is_normed, monkeypatch):
    make = Make(rng, "bf16")
    table = ops.backend.weight([make.w(64, COLS)], TABLE)
    weight = make.w(2 * OUTPUTS, COLS) if is_normed else make.w(OUTPUTS, COLS)
    weight = ops.backend.weight([weight], PAIRS if is_normed else MATRIX)
    ids = put(ops, rng.integers(0, 64, ROWS).astype(np.int32), "i32")
    norm = put(ops, np.ones(COLS, np.float32), "f32") if is_normed else None
    monkeypatch.setattr(ops.backend, "dependent", False)
    want = chain(ops, table, weight, ids, norm)
    monkeypatch.setattr(ops.backend, "dependent", True)
    assert_same_bits(chain(ops, table, weight, ids, norm), want)
    assert ops.backend.variants["gate_up" if is_normed else "linear"] == "wide"


@on_gpu_backends
def test_sums_are_added_to_what_the_layer_before_left(ops, rng, monkeypatch):
    """The end of a product asks for x before the product has ended, not before x is there."""
    make = Make(rng, "bf16")
    weight, a = ops.backend.weight([make.w(COLS, COLS)], MATRIX), put(ops, make.a(ROWS, COLS), "A")
    first = make.a(ROWS, COLS)

    def twice(is_dependent):
        monkeypatch.setattr(ops.backend, "dependent", is_dependent)
        work, x = ops.array((ops.backend.work_size(ROWS, COLS, COLS),), "f32"), put(ops, first, "A")
        ops.upload(work, np.zeros(work.shape, np.float32))
        for _ in range(2):
            ops.linear_add(a, weight, None, None, 0.0, None, None, 0, x, None, work)
        return ops.download(x)

    want = twice(False)
    assert_same_bits(twice(True), want)
    assert ops.backend.variants["linear_add"] == "wide"
