"""fuse: fc over the tapped states of all chosen layers, then the norm."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import Make, Matrix, check, dot_terms, norm_terms, run, slip, stored
from tests.compare import assert_same_bits, real

C = 16
EPS = 1e-6


def make(ops, rng, T, D, C, weights):
    make = Make(rng, ops.activations, weights)
    return {"taps": make.a(T, C), "w": make.w(D, C), "norm": make.v(D, around=1), "eps": EPS}


def terms_of(case):
    y = real(case["taps"])
    return {"f": norm_terms(y @ case["w"].real.T, dot_terms(y, case["w"]), case["norm"], EPS)}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize(
    "T, D, C_", [(1, 576, 2880), (16, 96, 1728), (5, 77, 123), (17, 80, 240), (3, 13, 37), (37, 24, 48)]
)
def test_matches_oracle(ops, rng, T, D, C_, weights):
    case = make(ops, rng, T, D, C_, weights)
    check(ops, "fuse", case, terms_of(case), C)


def test_one_bad_row_stays_alone(ops, rng):
    case = make(ops, rng, 5, 77, 123, "bf16")
    clean = run(ops, "fuse", case)["f"]
    case["taps"][2] = stored(np.nan, ops.activations)
    dirty = run(ops, "fuse", case)["f"]
    assert np.isnan(real(dirty[2])).all()
    assert_same_bits(np.delete(dirty, 2, 0), np.delete(clean, 2, 0), "the other rows")


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 77, 123, "bf16")
    wrong = {
        "norm dropped": lambda taps, w, norm, eps, work: norm * (taps @ w.data.T),
        "norm before fc": lambda taps, w, norm, eps, work: norm * (oracle.rmsnorm(taps, 1.0, eps) @ w.data.T),
        "scale dropped": {"norm": np.ones(77, np.float32)},
        "taps in another order": {"w": Matrix(np.roll(case["w"].array, 41, 1))},
        "rows shifted": {"taps": np.roll(case["taps"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "fuse", case, change, terms_of(case), C) > 10, what
