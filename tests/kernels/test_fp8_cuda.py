"""FP8 weights in the CUDA kernels: plain, fast and a prompt's."""

import numpy as np
import pytest
from minidflash.kernels.gpu import plain

from tests.cases import check, grouped, put, run
from tests.compare import assert_same_bits
from tests.conftest import parameters
from tests.fast_rows import C_NORMED, C, Fast, fast_check, on_gpu_backends
from tests.kernels import (
    test_experts_down,
    test_experts_up,
    test_fuse,
    test_gate_up,
    test_inject,
    test_linear,
    test_linear_add,
    test_qkv,
    test_rows,
)
from tests.kernels.test_fast_prefill import Prompt, frame, prompt_check  # noqa: F401 a fixture

on_gpu_backends_in_f32 = pytest.mark.parametrize(
    "ops", parameters(["emulate", "cuda"], ["f32"]), indirect=True
)
SHAPES = [(1, 120, 1536), (17, 104, 400), (5, 123, 77)]  # T, outputs, inputs


def cases(ops, rng):
    """(row, case, terms, tolerance, sizes) of every row whose weight a file may have in FP8."""
    for T, D, F in SHAPES:
        case = test_linear.make(ops, rng, T, D, F, "fp8", True)
        yield "linear", case, test_linear.terms_of(case), C, {}
        for norm, scale in ((False, False), (True, True)):
            case = test_linear_add.make(ops, rng, T, D, F, "fp8", True, 3, norm, scale)
            yield "linear_add", case, test_linear_add.terms_of(case), C, {}
        case = test_gate_up.make(ops, rng, T, F, 8 * (D // 8), "fp8")
        yield "gate_up", case, test_gate_up.terms_of(case), C_NORMED, {"F": 8 * (D // 8)}
        case = test_fuse.make(ops, rng, T, D, F, "fp8")
        yield "fuse", case, test_fuse.terms_of(case), C, {}
    for shape in [(1, 576, 9, 3, 64, 32), (5, 123, 5, 1, 24, 12), (17, 400, 3, 3, 80, 40)]:
        case = test_qkv.make(ops, rng, shape, "fp8", True, True)
        yield "qkv", case, test_qkv.terms_of(case), C_NORMED, {"H": shape[2]}
    for shape in test_inject.SHAPES:
        case = test_inject.make(ops, rng, shape, "fp8", True, True)
        yield "inject", case, test_inject.terms_of(case), C, {}


def of_experts(ops, rng):
    """The same of the rows with experts. K ends within a unit, or a scale."""
    for T, E, U, D, F in [(1, 4, 2, 96, 512), (9, 5, 3, 328, 104), (40, 3, 2, 24, 80)]:
        case = test_experts_up.make(ops, rng, T, E, U, D, F, "fp8", "clamped", idle=[T // 2] if T > 1 else [])
        yield "experts_up", case, test_experts_up.terms_of(case), C, {"F": F}
        case = test_experts_down.make(ops, rng, T, E, U, D, F, "fp8", tap_at=3)
        yield "experts_down", case, test_experts_down.terms_of(case), C, {}


def assert_rows_alone(ops, name, case, got, **sizes):
    """A row's bits are those that it has without the others."""
    rows = next(len(case[arg]) for arg in test_rows.row_args(name) if case.get(arg) is not None)
    if rows == 1 or name in ("qkv", "inject"):  # what those write lies in caches
        return
    alone = run(ops, name, test_rows.some_rows(name, case, [rows - 2]), **sizes)
    for what in got:
        if len(got[what]) == rows:
            assert_same_bits(alone[what][0], got[what][rows - 2], f"{name}: {what} of a row alone")


@on_gpu_backends
def test_fast_kernels_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in cases(ops, rng):
        got = fast_check(ops, name, case, terms, c, **sizes)
        assert_rows_alone(Fast(ops, name), name, case, got, **sizes)


@on_gpu_backends_in_f32
def test_plain_kernels_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in cases(ops, rng):
        check(ops, name, case, terms, c, **sizes)
        assert ops.backend.variants[name] == "plain"


@on_gpu_backends
def test_fast_experts_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in of_experts(ops, rng):
        got = fast_check(ops, name, case, terms, c, **sizes)
        if len(case["expert"]) == 40:
            rows = {arg: case[arg][7:8] for arg in ("u", "h", "share", "x", "tap_row") if arg in case}
            alone = case | rows | grouped(case["expert"][7:8], 3)
            what = "h" if name == "experts_up" else "x"
            assert_same_bits(run(Fast(ops, name), name, alone, **sizes)[what][0], got[what][7], name)


@on_gpu_backends_in_f32
def test_plain_experts_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in of_experts(ops, rng):
        check(ops, name, case, terms, c, **sizes)
        assert ops.backend.variants[name] == "plain"


@on_gpu_backends
def test_a_prompts_kernels_match_the_oracle(ops, frame, rng):  # noqa: F811
    for name, case, terms, c, sizes in cases(ops, rng):
        cols = case["wkv" if name in ("qkv", "inject") else "w"].shape[1]
        got = prompt_check(ops, name, case, terms, c, "fast" if cols % 8 else "prefill", **sizes)
        assert_rows_alone(Prompt(ops, name), name, case, got, **sizes)


@on_gpu_backends
@pytest.mark.parametrize("role", ["", "matrix", "pairs"])
def test_every_code_and_scale_finds_its_place(ops, rng, role, monkeypatch):
    """One input at a time: an output is its code times its scale, exactly, as far as bf16 holds it; in one
    pass of many rows and in narrow ones."""
    rows, cols = 48, 200
    case = test_linear.make(ops, rng, cols, rows, cols, "fp8", False)
    codes = case["w"].array
    codes[:] = rng.integers(0, 256, codes.shape)
    codes[codes & 0x7F == 0x7F] = 0
    case["w"].scales[:] = 2.0 ** rng.integers(-9, 9, case["w"].scales.shape)  # products are bf16
    case["a"] = np.where(np.eye(cols, dtype=bool), np.uint16(0x3F80), np.uint16(0))
    w = ops.backend.weight([case["w"]], role)
    work = ops.array((ops.backend.work_size(cols, cols, rows),), "f32")
    a = put(ops, case["a"], "A")
    for is_wide in (True, False):
        monkeypatch.setattr(ops.backend, "wide", is_wide)
        y = ops.array((cols, rows), "A")
        if role == "pairs":  # gate rows, then up rows: the plain kernel of one product reads them as they lie
            plain.linear(ops.backend, a, w, None, work, y)
        else:
            ops.linear(a, w, None, work, y)
        found = (ops.download(y).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(found.T, case["w"].wide)
