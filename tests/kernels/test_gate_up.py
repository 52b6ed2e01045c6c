"""gate_up: norm, both projections, SwiGLU."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import Make, Matrix, check, dot_terms, normed, slip

C = 16
EPS = 1e-5


def make(ops, rng, T, D, F, weights, scale=1.0):
    make = Make(rng, ops.activations, weights)
    w = make.w(2 * F, D)
    return {"x": make.a(T, D, scale=scale), "norm": make.v(D, around=1), "eps": EPS, "w": w}


def terms_of(case):
    """|d silu/dg| <= 1.1, so the gate's terms times |up|, the up's times |silu|,
    and the value's own roundings."""
    y = normed(case["x"], case["norm"], EPS)
    T, F = len(y), case["w"].shape[0] // 2
    gate, up = (y @ case["w"].real.T).reshape(T, 2, F).swapaxes(0, 1)
    gate_terms, up_terms = dot_terms(y, case["w"]).reshape(T, 2, F).swapaxes(0, 1)
    silu = np.abs(oracle.silu(gate))
    return {"h": 1.1 * gate_terms * np.abs(up) + silu * up_terms + silu * np.abs(up)}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize(
    "T, D, F",
    [(1, 576, 1536), (16, 576, 400), (5, 123, 77), (17, 80, 24), (3, 37, 13), (1, 4096, 112), (2, 8, 1)],
)
def test_matches_oracle(ops, rng, T, D, F, weights):
    case = make(ops, rng, T, D, F, weights)
    check(ops, "gate_up", case, terms_of(case), C, F=F)


@pytest.mark.parametrize("T, D, F", [(16, 576, 40), (5, 123, 77), (17, 80, 24)])
def test_without_a_norm_rows_are_as_they_are(ops, rng, T, D, F):
    case = make(ops, rng, T, D, F, "bf16") | {"norm": None, "eps": 1e6}
    check(ops, "gate_up", case, terms_of(case), C, F=F)
    assert slip(ops, "gate_up", case, {"norm": np.ones(D, np.float32), "eps": EPS}, terms_of(case), C) > 10


def test_large_gates_saturate(ops, rng):
    """silu of +-hundreds: the exponential must neither overflow into NaN nor lose the sign."""
    case = make(ops, rng, 3, 40, 24, "f32") | {"norm": np.full(40, 200, np.float32)}
    got = check(ops, "gate_up", case, terms_of(case), C, F=24)
    assert np.isfinite(got["h"]).all()


def test_a_tiny_row_is_not_a_zero_row(ops, rng):
    """eps counts when the row is as small as its root: mean of squares 1e-6 against eps 1e-5."""
    case = make(ops, rng, 3, 40, 24, "f32", scale=1e-3)
    terms = terms_of(case)
    check(ops, "gate_up", case, terms, C, F=24)
    assert slip(ops, "gate_up", case, {"eps": 1e-6}, terms, C) > 10


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 123, 77, "bf16")
    rows = case["w"].array
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "norm twice": {"norm": case["norm"] ** 2},
        "gate and up swapped": {"w": Matrix(np.roll(rows, 77, 0))},
        "interleaved": {"w": Matrix(rows.reshape(2, 77, 123).swapaxes(0, 1).reshape(154, 123).copy())},
        "relu for silu": lambda x, norm, eps, w, work: _relu(x, norm, eps, w),
        "tanh gelu for silu": lambda x, norm, eps, w, work: _gelu(x, norm, eps, w),
    }
    for what, change in wrong.items():
        assert slip(ops, "gate_up", case, change, terms_of(case), C) > 10, what


def _halves(x, norm, eps, w):
    y = oracle.rmsnorm(x, norm, eps) @ w.data.T
    return np.split(y, 2, axis=1)


def _relu(*args):
    gate, up = _halves(*args)
    return np.maximum(gate, 0) * up


def _gelu(*args):
    gate, up = _halves(*args)
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
