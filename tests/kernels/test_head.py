"""head: the smallest argmax among the first `limit` ids, for the picked rows only."""

import numpy as np
import pytest

from tests.cases import JUNK, Make, Matrix, dot_terms, normed, run, stored, truth
from tests.compare import EPS32

EPS = 1e-6


def make(ops, rng, T, D, V, weights="bf16", pick=None, limit=None):
    make = Make(rng, ops.activations, weights)
    pick = np.arange(T, dtype=np.int32) if pick is None else np.array(pick, np.int32)
    return {
        "x": make.a(T, D), "pick": pick, "norm": make.v(D, around=1), "eps": EPS, "w": make.w(V, D),
        "limit": limit or V, "ids": np.full(T, JUNK["i32"], np.int32), "margin": np.full(T, 7, np.float32),
    }  # fmt: skip


def logits(case):
    return normed(case["x"], case["norm"], EPS) @ case["w"].real.T


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize(
    "T, D, V", [(1, 576, 5003), (16, 576, 384), (5, 123, 77), (17, 80, 509), (3, 37, 1), (1, 4096, 320)]
)
def test_matches_oracle(ops, rng, T, D, V, weights):
    case = make(ops, rng, T, D, V, weights)
    y = normed(case["x"], case["norm"], EPS)
    case["w"] = Matrix(case["w"].array.copy())
    for t in range(T):  # the answer of row t is clear: its own direction is one of the head's rows
        case["w"].array[(7 * t + 3) % V] = stored(y[t] / np.sqrt(D), weights)
    top = np.sort(logits(case), axis=1)[:, ::-1]
    slack = 16 * EPS32 * dot_terms(y, case["w"]).max()
    assert V == 1 or (top[:, 0] - top[:, 1] > 10 * slack).all(), "near-ties: choose other data"
    got = run(ops, "head", case)["ids"]
    assert got.tolist() == truth("head", case)["ids"].tolist() == logits(case).argmax(1).tolist()


def margins_of(logits):
    """How far the largest logit of each row lies above the second one, as the row says it."""
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf)
    top = np.sort(logits, axis=1)
    return np.where(np.isfinite(logits).all(1), top[:, -1] - top[:, -2], np.inf)


@pytest.mark.parametrize("T, D, V, limit", [(16, 576, 384, 384), (17, 80, 509, 400), (3, 37, 9, 1)])
def test_margins_are_the_oracles_and_change_no_id(ops, rng, T, D, V, limit):
    case = make(ops, rng, T, D, V, limit=limit)
    got, want = run(ops, "head", case), truth("head", case)
    slack = 32 * EPS32 * dot_terms(normed(case["x"], case["norm"], EPS), case["w"]).max()
    np.testing.assert_allclose(got["margin"], want["margin"], rtol=0, atol=slack)
    np.testing.assert_allclose(want["margin"], margins_of(logits(case)[:, :limit]), rtol=0, atol=slack)
    assert (got["margin"] > 0).all() and (np.isfinite(got["margin"]) == (limit > 1)).all()
    assert got["ids"].tolist() == run(ops, "head", case | {"margin": None})["ids"].tolist()


@pytest.mark.parametrize("at", [0, 30, 60])
def test_a_margin_is_the_distance_to_the_second_wherever_both_are(ops, at):
    """Of exact logits: 3 in one place, 1.25 in any other, and twice the largest."""
    for second in {1, 16, 60} - {at}:
        values = np.full(61, -2.0)
        values[at], values[second] = 3.0, 1.25
        case = {
            "x": stored(np.ones((2, 1)), ops.activations), "pick": np.array([1], np.int32), "eps": 0.0,
            "norm": np.ones(1, np.float32), "w": Matrix(stored(values.reshape(-1, 1), "bf16")), "limit": 61,
            "ids": np.full(2, JUNK["i32"], np.int32), "margin": np.full(2, 7, np.float32),
        }  # fmt: skip
        got = run(ops, "head", case)
        assert (got["ids"][1], got["margin"].tolist()) == (at, [7.0, 1.75]), "a row that is not picked stays"
        values[second] = 3.0
        got = run(ops, "head", case | {"w": Matrix(stored(values.reshape(-1, 1), "bf16"))})
        assert (got["ids"][1], got["margin"][1]) == (min(at, second), 0.0)


@pytest.mark.parametrize(
    "pick", [[0], [4, 1], [3, 0, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17]]
)
def test_only_picked_rows_are_written(ops, rng, pick):
    case = make(ops, rng, 18, 40, 61, pick=pick)
    got = run(ops, "head", case)["ids"]
    assert got[pick].tolist() == logits(case)[pick].argmax(1).tolist()
    assert (np.delete(got, pick) == JUNK["i32"]).all()


def test_nothing_picked_writes_nothing(ops, rng):
    got = run(ops, "head", make(ops, rng, 3, 40, 61, pick=[]))["ids"]
    assert (got == JUNK["i32"]).all()


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 60])
def test_ids_from_the_limit_on_are_never_chosen(ops, rng, limit):
    case = make(ops, rng, 5, 40, 61, limit=limit)
    case["w"].array[limit:] = stored(normed(case["x"], case["norm"], EPS)[0] * 9, "bf16")
    assert logits(case)[0].argmax() >= limit
    got = run(ops, "head", case)["ids"]
    assert got.tolist() == logits(case)[:, :limit].argmax(1).tolist()


@pytest.mark.parametrize("same", [(3, 4), (15, 16), (0, 60), (17, 33, 49), (5, 21)])
def test_ties_go_to_the_smallest_id(ops, rng, same):
    case = make(ops, rng, 3, 40, 61)
    best = stored(normed(case["x"], case["norm"], EPS)[1], "bf16")
    for row in same:
        case["w"].array[row] = best
    assert run(ops, "head", case)["ids"][1] == min(same)


def test_all_equal_gives_zero(ops, rng):
    case = make(ops, rng, 5, 40, 61)
    case["x"][:] = 0
    assert run(ops, "head", case)["ids"].tolist() == [0] * 5


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [0, 7, 16, 60])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_gives_no_id(ops, rng, bad, value):
    case = make(ops, rng, 3, 40, 61)
    wanted = logits(case).argmax(1).tolist()
    case["x"][1] = stored(value, ops.activations)  # of one row
    got = run(ops, "head", case)
    assert got["ids"].tolist() == [wanted[0], -1, wanted[2]]
    assert np.isinf(got["margin"]).tolist() == [False, True, False]
    case = make(ops, rng, 3, 40, 61, limit=60)
    case["w"].array[bad] = stored(value, "bf16")  # of one id
    wanted = [-1] * 3 if bad < 60 else logits(case)[:, :60].argmax(1).tolist()
    assert run(ops, "head", case)["ids"].tolist() == wanted, "ids from the limit on do not count"
    case = make(ops, rng, 3, 40, 61)
    case["w"].array[bad, 5] = stored(
        value, "bf16"
    )  # of one weight: a logit of plus or minus infinity, and no NaN
    assert run(ops, "head", case)["ids"].tolist() == [-1] * 3


def test_negative_logits_have_a_largest_too(ops, rng):
    case = make(ops, rng, 1, 40, 61)
    y = normed(case["x"], case["norm"], EPS)[0]
    case["w"] = Matrix(stored(-np.outer(1 + (np.arange(61) * 7) % 61, y), "bf16"))
    assert run(ops, "head", case)["ids"].tolist() == [0] == logits(case).argmax(1).tolist()


def test_the_norm_decides(ops, rng):
    """F05: a norm scale that turns the ranking round; without it the other id wins."""
    case = make(ops, rng, 1, 2, 2) | {
        "x": stored([[3.0, 2.0]], ops.activations), "norm": np.array([0.5, 2], np.float32),
        "w": Matrix(stored(np.eye(2), "bf16")),
    }  # fmt: skip
    assert run(ops, "head", case)["ids"].tolist() == [1]
    assert truth("head", case | {"norm": np.ones(2, np.float32)})["ids"].tolist() == [0]
