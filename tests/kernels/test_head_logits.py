"""head_logits: final norm exactly once, then the head; f32 whatever the activations are."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import Make, check, dot_terms, normed, run, slip, stored
from tests.compare import assert_same_bits

C = 16
EPS = 1e-6


def make(ops, rng, T, D, V, weights):
    make = Make(rng, ops.activations, weights)
    case = {"x": make.a(T, D), "norm": make.v(D, around=1), "eps": EPS, "w": make.w(V, D)}
    return case | {"multiplier": 1.0, "cap": 0.0}


def terms_of(case):
    terms = dot_terms(normed(case["x"], case["norm"], EPS), case["w"])
    return {"logits": case["multiplier"] * terms + case["cap"]}


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize(
    "T, D, V", [(1, 576, 5003), (16, 576, 384), (5, 123, 77), (17, 80, 509), (3, 37, 1), (1, 4096, 320)]
)
def test_matches_oracle(ops, rng, T, D, V, weights):
    case = make(ops, rng, T, D, V, weights)
    check(ops, "head_logits", case, terms_of(case), C)


@pytest.mark.parametrize("multiplier, cap", [(0.375, 9.0), (2.5, 0.0), (1.0, 0.5)])
def test_logits_are_scaled_and_capped(ops, rng, multiplier, cap):
    case = make(ops, rng, 5, 123, 77, "bf16") | {"multiplier": multiplier, "cap": cap}
    check(ops, "head_logits", case, terms_of(case), C)
    bare = terms_of(case)
    for change in ({"multiplier": 1.25 * multiplier}, {"cap": 0.8 * cap if cap else 3.0}):
        assert slip(ops, "head_logits", case, change, bare, C) > 10, change


def test_one_bad_row_stays_alone(ops, rng):
    case = make(ops, rng, 5, 123, 77, "bf16")
    clean = run(ops, "head_logits", case)["logits"]
    case["x"][2] = stored(np.nan, ops.activations)
    dirty = run(ops, "head_logits", case)["logits"]
    assert np.isnan(dirty[2]).all()
    assert_same_bits(np.delete(dirty, 2, 0), np.delete(clean, 2, 0), "the other rows")


def test_sees_wrong_kernels(ops, rng):
    """F05: a norm left out or applied twice is seen, its scale being far from 1."""
    case = make(ops, rng, 5, 123, 77, "bf16")

    def twice(x, norm, eps, w, multiplier, cap, work):
        return oracle.rmsnorm(oracle.rmsnorm(x, norm, eps), norm, eps) @ w.data.T

    wrong = {
        "norm dropped": lambda x, norm, eps, w, multiplier, cap, work: x @ w.data.T,
        "norm twice": twice,
        "scale dropped": {"norm": np.ones(123, np.float32)},
        "mean removed": {"x": stored(np.zeros((5, 123)), ops.activations)},
    }
    for what, change in wrong.items():
        assert slip(ops, "head_logits", case, change, terms_of(case), C) > 10, what
