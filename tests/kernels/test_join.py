"""join: x = scale * (x + n(n(a) a_norm + n(b) b_norm) norm) in place, and its copy among the taps."""

import numpy as np
import pytest

from tests.cases import Make, check, junk, norm_terms, normed, run, slip
from tests.compare import assert_same_bits, real

C, EPS = 16, 1e-5
SHAPES = [(1, 576), (16, 64), (5, 123), (3, 37), (33, 2816)]  # T, D


def make(ops, rng, T, D, scale=True):
    """A case; every third row has no place among the taps."""
    make = Make(rng, ops.activations)
    rows = rng.permutation(T + 2)[:T].astype(np.int32)
    rows[2::3] = -1
    return {
        "a": make.a(T, D), "b": make.a(T, D, scale=3), "a_norm": make.v(D, around=1),
        "b_norm": make.v(D, around=2), "norm": make.v(D, around=1), "eps": EPS,
        "scale": np.float32([0.37]) if scale else None, "tap_row": rows, "tap_at": 8, "x": make.a(T, D),
        "taps": junk(ops, (T + 2, D + 16), "A"),
    }  # fmt: skip


def terms_of(case):
    a, b = (normed(case[one], case[one + "_norm"], EPS) for one in "ab")
    terms = norm_terms(a + b, np.abs(a) + np.abs(b), case["norm"], EPS)
    return {"x": (np.abs(real(case["x"])) + terms) * (1 if case["scale"] is None else case["scale"])}


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("T, D", SHAPES)
def test_matches_oracle(ops, rng, T, D, scale):
    case = make(ops, rng, T, D, scale)
    got = check(ops, "join", case, terms_of(case), C)
    want = case["taps"].copy()
    for t, row in enumerate(case["tap_row"]):
        if row >= 0:
            want[row, 8 : 8 + D] = got["x"][t]
    assert_same_bits(got["taps"], want, "taps")
    plain = run(ops, "join", case | {"taps": None, "tap_row": None})
    assert_same_bits(got["x"], plain["x"], "x with and without taps")


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 123)
    ones = np.ones(123, np.float32)
    wrong = {name: {name: ones} for name in ("a_norm", "b_norm", "norm")}
    wrong |= {"scale": {"scale": None}, "residual": {"x": np.zeros_like(case["x"])}, "swapped": {
        "a": case["b"], "b": case["a"]}, "rows": {"b": np.roll(case["b"], 1, 0)}}  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "join", case, change, terms_of(case), C) > 10, what
