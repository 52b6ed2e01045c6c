"""The kernels before and behind a wide product (lay_wide.cu, wide_rows.cu) may start before what they read is
there; in a program, the one behind lays rows for the next product."""

import numpy as np
import pytest
from minidflash.kernels.gpu import split
from minidflash.kernels.table import SILU
from minidflash.kernels.weight import MATRIX, PAIRS, TABLE

from tests.cases import Make, put
from tests.compare import assert_same_bits
from tests.conftest import open_or_skip
from tests.fast_rows import counted, on_gpu_backends
from tests.kernels.test_fast_prefill import use_frame

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


def layers(ops, make, cols, rows, changes=None):
    """Two layers, linear_add and gate_up and again, and the next one's linear_add; what they leave. changes:
    a call in front of the second gate_up."""
    backend, ffn = ops.backend, 224
    first, add, up = (
        backend.weight([make.w(*shape)], role)
        for shape, role in (((cols, cols), MATRIX), ((cols, ffn), MATRIX), ((2 * ffn, cols), PAIRS))
    )
    norm, bias = (put(ops, make.v(cols), "f32") for _ in range(2))
    work = ops.array(
        (max(backend.work_size(rows, *sizes) for sizes in ((cols, 2 * cols), (ffn, cols))),), "f32"
    )
    a, x = put(ops, make.a(rows, cols), "A"), put(ops, make.a(rows, cols), "A")
    taps, tap_row = ops.array((rows, 2 * cols), "A"), put(ops, np.arange(rows)[::-1].astype(np.int32), "i32")
    h = ops.array((rows, ffn), "A")

    def run():
        ops.linear_add(a, first, bias, None, 0.0, None, tap_row, cols, x, taps, work)
        ops.gate_up(x, norm, 1e-6, SILU, up, work, h)
        ops.linear_add(h, add, None, None, 0.0, None, None, 0, x, None, work)
        if changes:
            changes(x, h)
        ops.gate_up(x, norm, 1e-6, SILU, up, work, h)
        ops.linear_add(h, add, None, None, 0.0, None, None, 0, x, None, work)

    return run, lambda: [ops.download(part) for part in (x, taps, h)]


def agree(ops, make, looks=lambda is_program: None):
    """make() gives calls and what they leave: the same as calls that know nothing of each other and as a
    program. looks: once each has run."""
    found = []
    for is_program in (False, True):
        run, left = make()
        ops.program(run).launch() if is_program else run()
        looks(is_program)
        found.append(left())
    for got, want in zip(*reversed(found), strict=True):
        assert_same_bits(got, want)


# Slices of products with so many inputs, in three cases.
CUTS = {
    360: (2, 1, 2),
    224: (1, 2, 1),
    4232: (3, 1, 3),
}


@on_gpu_backends
@pytest.mark.parametrize(
    "case, cols, dtype", [(0, 360, "bf16"), (1, 360, "bf16"), (2, 4232, "bf16"), (1, 360, "fp8")], ids=str
)
@pytest.mark.parametrize("frame", ["mma", "wgmma"])
def test_a_program_lays_rows_for_the_next_product(ops, case, cols, dtype, frame, monkeypatch):
    """With the bits of calls that know nothing of each other. Only an h that is written once more is left
    out: the last one is there."""
    use_frame(ops, monkeypatch, frame)
    cut = {cols: split.Split(CUTS[cols][case], 1, 3) for cols in CUTS}
    monkeypatch.setattr(split, "choose", lambda rows, cols, *_: cut[cols])
    monkeypatch.setattr(ops.backend, "dependent", True)
    launched = counted(ops.backend, monkeypatch)

    def looks(is_program):
        names = "end_and_lay", "end_linear_add", "lay_wide_normed", "lay_wide"
        lays_h = is_program and cut[cols].slices == 1
        want = (2, 1, 0, 2 if lays_h else 3) if is_program else (0, 3, 2, 3)
        assert dict(zip(names, want, strict=True)) == {name: launched[name] for name in names}
        launched.clear()

    agree(ops, lambda: layers(ops, Make(np.random.default_rng(5), "bf16", dtype), cols, ROWS), looks)


@on_gpu_backends
@pytest.mark.parametrize("what", ["x", "h"])
def test_rows_that_another_call_has_meanwhile_are_not_laid_ahead(ops, what, monkeypatch):
    """What it writes is what the next product reads, and what it reads is there."""
    cut = {cols: split.Split(1, 1, 3) for cols in CUTS}
    monkeypatch.setattr(split, "choose", lambda rows, cols, *_: cut[cols])

    def two_layers():
        make = Make(np.random.default_rng(6), "bf16")
        table, down = (
            ops.backend.weight([make.w(64, 360)], TABLE),
            ops.backend.weight([make.w(360, 224)], MATRIX),
        )
        ids = put(ops, np.arange(ROWS, dtype=np.int32), "i32")
        work = ops.array((ops.backend.work_size(ROWS, 224, 360),), "f32")

        def between(x, h):
            ops.embed(ids, table, 1.0, x) if what == "x" else ops.linear(h, down, None, work, x)

        return layers(ops, make, 360, ROWS, between)

    agree(ops, two_layers)


@on_gpu_backends
@pytest.mark.parametrize(
    "cols, is_other", [(360, True), (4232, False)], ids=["of other rows", "reach the sums"]
)
def test_rows_are_not_laid_ahead_where_they_must_not(ops, cols, is_other, monkeypatch):
    """The product behind is one of other rows; what is laid would reach the sums, on a card of few blocks."""
    monkeypatch.setattr(split, "choose", lambda *_: split.Split(1, 1, 3))
    rows, launched = 64, counted(ops.backend, monkeypatch)

    def one_layer():
        make = Make(np.random.default_rng(7), "bf16")
        add, up = (
            ops.backend.weight([make.w(cols, 96)], MATRIX),
            ops.backend.weight([make.w(48, cols)], PAIRS),
        )
        a, x, other = (put(ops, make.a(rows, n), "A") for n in (96, cols, cols))
        norm, h = put(ops, make.v(cols), "f32"), ops.array((rows, 24), "A")
        work = ops.array(
            (max(ops.backend.work_size(rows, *shape) for shape in ((96, cols), (cols, 48))),), "f32"
        )

        def run():
            ops.linear_add(a, add, None, None, 0.0, None, None, 0, x, None, work)
            ops.gate_up(other if is_other else x, norm, 1e-6, SILU, up, work, h)

        return run, lambda: [ops.download(part) for part in (x, h)]

    agree(ops, one_layer)
    if is_other or ops.backend.sms < 8:
        assert "end_and_lay" not in launched


def test_rows_that_were_laid_for_nobody_are_an_error(monkeypatch):
    """Never would a call read what was not written."""
    backend = open_or_skip("emulate", "bf16").backend
    monkeypatch.setattr(backend, "laid", object())
    table = backend.weight([Make(np.random.default_rng(1), "bf16").w(8, 8)], TABLE)
    with pytest.raises(RuntimeError, match="embed: rows were laid for it"):
        backend.embed(np.zeros(1, np.int32), table, 1.0, np.zeros((1, 8), np.uint16))
