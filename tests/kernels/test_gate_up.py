"""gate_up: norm, both projections, the gate's activation."""

from math import erf

import numpy as np
import pytest
from minidflash.kernels import oracle
from minidflash.kernels.table import GELU_TANH, SILU

from tests.cases import Make, Matrix, check, dot_terms, normed, slip

C = 16
EPS = 1e-5


ACTS = pytest.mark.parametrize("act", [SILU, GELU_TANH])


def make(ops, rng, T, D, F, weights, scale=1.0, act=SILU):
    make = Make(rng, ops.activations, weights)
    w = make.w(2 * F, D)
    return {"x": make.a(T, D, scale=scale), "norm": make.v(D, around=1), "eps": EPS, "act": act, "w": w}


def terms_of(case):
    """No activation is steeper than 1.13, so the gate's terms times |up|, the up's times |activated|,
    and the value's own roundings."""
    y = normed(case["x"], case["norm"], EPS)
    T, F = len(y), case["w"].shape[0] // 2
    gate, up = (y @ case["w"].real.T).reshape(T, 2, F).swapaxes(0, 1)
    gate_terms, up_terms = dot_terms(y, case["w"]).reshape(T, 2, F).swapaxes(0, 1)
    steepest, active = {SILU: 1.1, GELU_TANH: 1.13}[case["act"]], np.abs(oracle.GATES[case["act"]](gate))
    return {"h": steepest * gate_terms * np.abs(up) + active * up_terms + active * np.abs(up)}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize(
    "T, D, F",
    [(1, 576, 1536), (16, 576, 400), (5, 123, 77), (17, 80, 24), (3, 37, 13), (1, 4096, 112), (2, 8, 1)],
)
@ACTS
def test_matches_oracle(ops, rng, T, D, F, weights, act):
    case = make(ops, rng, T, D, F, weights, act=act)
    check(ops, "gate_up", case, terms_of(case), C, F=F)


@pytest.mark.parametrize("T, D, F", [(16, 576, 40), (5, 123, 77), (17, 80, 24)])
def test_without_a_norm_rows_are_as_they_are(ops, rng, T, D, F):
    case = make(ops, rng, T, D, F, "bf16") | {"norm": None, "eps": 1e6}
    check(ops, "gate_up", case, terms_of(case), C, F=F)
    assert slip(ops, "gate_up", case, {"norm": np.ones(D, np.float32), "eps": EPS}, terms_of(case), C) > 10


@pytest.mark.parametrize("act, norm", [(SILU, 200), (GELU_TANH, 200), (GELU_TANH, 1e13)])
def test_large_gates_saturate(ops, rng, act, norm):
    """Of +-hundreds: the exponential must neither overflow into NaN nor lose the sign. 1e13: nor the cube."""
    case = make(ops, rng, 3, 40, 24, "f32", act=act) | {"norm": np.full(40, norm, np.float32)}
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
        "relu for silu": _relu,
        "tanh gelu for silu": {"act": GELU_TANH},
    }
    for what, change in wrong.items():
        assert slip(ops, "gate_up", case, change, terms_of(case), C) > 10, what
    case = make(ops, rng, 40, 123, 77, "bf16") | {"act": GELU_TANH}  # the two gelus part in few of the rows
    for what, change in {"relu": _relu, "silu": {"act": SILU}, "gelu with erf": _gelu_erf}.items():
        assert slip(ops, "gate_up", case, change, terms_of(case), C) > 10, f"{what} for tanh gelu"


def _halves(x, norm, eps, w):
    y = oracle.rmsnorm(x, norm, eps) @ w.data.T
    return np.split(y, 2, axis=1)


def _relu(x, norm, eps, act, w, work):
    gate, up = _halves(x, norm, eps, w)
    return np.maximum(gate, 0) * up


def _gelu_erf(x, norm, eps, act, w, work):
    gate, up = _halves(x, norm, eps, w)
    return 0.5 * gate * (1 + np.vectorize(erf)(gate / np.sqrt(2))) * up
