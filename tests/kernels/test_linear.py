"""linear: y = a W^T + bias, rounded once."""

import numpy as np
import pytest

from tests.cases import Make, check, dot_terms, slip
from tests.compare import real

C = 16  # one ascending sum; the outlier makes every later partial sum large

SHAPES = [(1, 576, 576), (16, 320, 1536), (5, 123, 77), (17, 24, 4096), (3, 37, 8), (64, 48, 80)]  # T, D, F


def make(ops, rng, T, D, F, weights, bias):
    make = Make(rng, ops.activations, weights)
    return {"a": make.a(T, F), "w": make.w(D, F), "bias": make.v(D) if bias else None}


def terms_of(case):
    return {"y": dot_terms(real(case["a"]), case["w"], case["bias"])}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T, D, F", SHAPES)
def test_matches_oracle(ops, rng, T, D, F, bias, weights):
    case = make(ops, rng, T, D, F, weights, bias)
    check(ops, "linear", case, terms_of(case), C)


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 123, 77, "bf16", True)
    mirrored = np.ascontiguousarray(case["w"].array[::-1])
    wrong = {
        "bias dropped": {"bias": None},
        "last input dropped": {"a": np.where(np.arange(77) == 76, 0, case["a"]).astype(case["a"].dtype)},
        "outputs mirrored": {"w": type(case["w"])(mirrored)},
        "rows shifted": {"a": np.roll(case["a"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "linear", case, change, terms_of(case), C) > 10, what
