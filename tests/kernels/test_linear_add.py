"""linear_add: x = scale * (x + n(a W^T + bias) * norm) in place, and the new row's copy among the taps."""

import numpy as np
import pytest

from tests.cases import Make, check, dot_terms, junk, norm_terms, run, slip
from tests.compare import assert_same_bits, real

C = 16  # one ascending sum; the outlier makes every later partial sum large

SHAPES = [(1, 576, 576), (16, 576, 1536), (5, 123, 77), (17, 24, 4096), (3, 37, 8), (64, 48, 80)]  # T, D, F


EPS = 1e-5


def make(ops, rng, T, D, F, weights, bias, tap_at=None, norm=False, scale=False):
    """A case; tap_at None: no taps, else their column. Every third row has no place among them."""
    make = Make(rng, ops.activations, weights)
    rows = rng.permutation(T + 2)[:T].astype(np.int32)
    rows[2::3] = -1
    return {
        "a": make.a(T, F), "w": make.w(D, F), "bias": make.v(D) if bias else None,
        "norm": make.v(D, around=1) if norm else None, "eps": EPS,
        "scale": np.float32([0.37]) if scale else None,
        "tap_row": None if tap_at is None else rows, "tap_at": tap_at or 0, "x": make.a(T, D),
        "taps": None if tap_at is None else junk(ops, (T + 2, tap_at + D + 5), "A"),
    }  # fmt: skip


def terms_of(case):
    a, bias = real(case["a"]), case["bias"]
    terms = dot_terms(a, case["w"], bias)
    if case["norm"] is not None:
        y = a @ case["w"].real.T + (0 if bias is None else bias)
        terms = norm_terms(y, terms, case["norm"], EPS)
    return {"x": (np.abs(real(case["x"])) + terms) * (1 if case["scale"] is None else case["scale"])}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T, D, F", SHAPES)
def test_matches_oracle(ops, rng, T, D, F, bias, weights):
    case = make(ops, rng, T, D, F, weights, bias)
    check(ops, "linear_add", case, terms_of(case), C)


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("norm, scale", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("T, D, F", SHAPES[1:5])
def test_ends_a_layer_with_a_norm_and_a_scale(ops, rng, T, D, F, norm, scale, weights):
    case = make(ops, rng, T, D, F, weights, True, 3, norm, scale)
    got = check(ops, "linear_add", case, terms_of(case), C)
    for t, row in enumerate(case["tap_row"]):
        if row >= 0:
            assert_same_bits(got["taps"][row, 3 : 3 + D], got["x"][t], "taps")
    wrong = {"bias": None, "x": np.zeros_like(case["x"])}
    wrong |= {"norm": np.ones(D, np.float32)} if norm else {}
    wrong |= {"scale": None} if scale else {}
    for what, value in wrong.items():
        assert slip(ops, "linear_add", case, {what: value}, terms_of(case), C) > 10, f"{what} left out"
    if norm:
        assert slip(ops, "linear_add", case, {"norm": None}, terms_of(case), C) > 10


@pytest.mark.parametrize("T, D, F", SHAPES)
@pytest.mark.parametrize("tap_at", [0, 11])
def test_taps_hold_the_new_rows_and_nothing_else_changes(ops, rng, T, D, F, tap_at):
    case = make(ops, rng, T, D, F, "bf16", True, tap_at)
    got = check(ops, "linear_add", case, terms_of(case), C)
    want = case["taps"].copy()
    for t, row in enumerate(case["tap_row"]):
        if row >= 0:
            want[row, tap_at : tap_at + D] = got["x"][t]
    assert_same_bits(got["taps"], want, "taps")
    plain = run(ops, "linear_add", case | {"taps": None, "tap_row": None})
    assert_same_bits(got["x"], plain["x"], "x with and without taps")


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 123, 77, "bf16", True)
    mirrored = np.ascontiguousarray(case["w"].array[::-1])
    wrong = {
        "residual dropped": {"x": np.zeros_like(case["x"])},
        "bias dropped": {"bias": None},
        "last input dropped": {"a": np.where(np.arange(77) == 76, 0, case["a"]).astype(case["a"].dtype)},
        "outputs mirrored": {"w": type(case["w"])(mirrored)},
        "rows shifted": {"a": np.roll(case["a"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "linear_add", case, change, terms_of(case), C) > 10, what
