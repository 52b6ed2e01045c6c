"""FP8 weights in the CUDA kernels: plain, fast and a prompt's."""

import pytest

from tests.cases import check
from tests.conftest import parameters
from tests.fast_rows import C_NORMED, C, fast_check
from tests.kernels import (
    test_experts_down,
    test_experts_up,
    test_fuse,
    test_gate_up,
    test_inject,
    test_linear,
    test_linear_add,
    test_qkv,
)
from tests.kernels.test_fast_prefill import frame, prompt_check  # noqa: F401 a fixture

on_gpu_backends = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
SHAPES = [(1, 120, 1536), (17, 104, 400), (5, 123, 77)]  # T, outputs, inputs
QKV = [(1, 576, 9, 3, 64, 32), (5, 123, 5, 1, 24, 12), (17, 400, 3, 3, 80, 40)]


def cases(ops, rng):
    """(row, case, terms, tolerance, sizes) of every row with a weight that may be FP8."""
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
    for shape in QKV:
        case = test_qkv.make(ops, rng, shape, "fp8", True, True)
        yield "qkv", case, test_qkv.terms_of(case), C_NORMED, {"H": shape[2]}
    for shape in test_inject.SHAPES:
        case = test_inject.make(ops, rng, shape, "fp8", True, True)
        yield "inject", case, test_inject.terms_of(case), C, {}


@on_gpu_backends
def test_fast_kernels_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in cases(ops, rng):
        fast_check(ops, name, case, terms, c, **sizes)


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["f32"]), indirect=True)
def test_plain_kernels_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in cases(ops, rng):
        check(ops, name, case, terms, c, **sizes)
        assert ops.backend.variants[name] == "plain"


def of_experts(ops, rng):
    """The same of the rows with experts: rows are a multiple of 8. K ends within a unit, or a scale."""
    for T, E, U, D, F in [(1, 4, 2, 96, 512), (9, 5, 3, 328, 104), (40, 3, 2, 24, 80)]:
        case = test_experts_up.make(ops, rng, T, E, U, D, F, "fp8", "clamped", idle=[T // 2] if T > 1 else [])
        yield "experts_up", case, test_experts_up.terms_of(case), C, {"F": F}
        case = test_experts_down.make(ops, rng, T, E, U, D, F, "fp8", tap_at=3)
        yield "experts_down", case, test_experts_down.terms_of(case), C, {}


@on_gpu_backends
def test_fast_experts_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in of_experts(ops, rng):
        fast_check(ops, name, case, terms, c, **sizes)


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["f32"]), indirect=True)
def test_plain_experts_match_the_oracle(ops, rng):
    for name, case, terms, c, sizes in of_experts(ops, rng):
        check(ops, name, case, terms, c, **sizes)
        assert ops.backend.variants[name] == "plain"


@on_gpu_backends
def test_a_prompts_kernels_match_the_oracle(ops, frame, rng):  # noqa: F811
    for name, case, terms, c, sizes in cases(ops, rng):
        cols = case["wkv" if name in ("qkv", "inject") else "w"].shape[1]
        prompt_check(ops, name, case, terms, c, "fast" if cols % 8 else "prefill", **sizes)
