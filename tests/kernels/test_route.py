"""route: norm, router, the likeliest experts of each row, their shares and their groups.

Which experts are right is asked of the u that the kernel stored: from there on only sums in f32 can differ.
"""

import numpy as np
import pytest
from minidflash.kernels import oracle_moe

from tests.cases import Make, Matrix, normed, run, slip, stored, truth
from tests.compare import EPS32, assert_close, assert_same_bits, real
from tests.conftest import open_or_skip

C = 16
EPS = 1e-5
SHAPES = [(1, 128, 8, 512), (16, 32, 4, 96), (5, 7, 3, 123), (17, 5, 5, 24), (2, 1, 1, 8), (33, 100, 2, 37)]


def make(ops, rng, T, E, U, D, weights="f32", bias=True, normalise=1, idle=()):
    """(a case, the size that no argument shows). Rows in `idle` are inactive;
    three experts were touched before."""
    make = Make(rng, ops.activations, weights)
    pos = np.arange(3, T + 3, dtype=np.int32)
    pos[list(idle)] = -1
    return {
        "x": make.a(T, D), "norm": make.v(D, around=1), "eps": EPS, "w": make.w(E, D),
        "bias": make.v(E) if bias else None,
        "normalise": normalise, "pos": pos, "touched": np.array([3], np.int32),
    }, {"U": U}  # fmt: skip


def logits_of(case, u):
    """(logits, their sum |terms|) of stored rows u, in float64."""
    y, bias = real(u), 0 if case["bias"] is None else case["bias"].astype(np.float64)
    return y @ case["w"].real.T + bias, np.abs(y) @ np.abs(case["w"].real.T) + np.abs(bias)


def router_sees(case):
    """The rows that logits are made of, where u is not them."""
    return run(open_or_skip("oracle", "f32" if case["x"].dtype == np.float32 else "bf16"), "route",
               case | {"u_norm": None}, U=1)["u"]  # fmt: skip


def misplaced(ids, logits, terms):
    """How many tolerances the choice of a row is off: an expert before one with a larger logit,
    or in place of it."""
    rest = np.setdiff1d(np.arange(len(logits)), ids)
    behind = [*logits[ids[1:]], *logits[rest].max(initial=-np.inf, keepdims=True)]
    return max(np.asarray(behind) - logits[ids]) / (C * EPS32 * terms.max())


def assert_grouped(got, E):
    """first, order and touched follow from the experts, to the last integer."""
    first, order = oracle_moe.group(got["expert"], E)
    np.testing.assert_array_equal(got["first"], first)
    np.testing.assert_array_equal(got["order"], order)
    assert got["touched"][0] == 3 + len(np.unique(got["expert"][got["expert"] >= 0]))


def share_terms(share, terms):
    """An error of d in the logits moves a share by 2 d of itself; its exponentials and its sum by a few ulp
    more."""
    return share * (2 * terms.max(-1, keepdims=True) + 4)


def assert_routed(got, case, U, E):
    """All that route says, for active and inactive rows."""
    active = case["pos"] >= 0
    for what in ("u", "share"):
        assert not real(got[what][~active]).any(), f"{what} of inactive rows"
    assert (got["expert"][~active] == -1).all()
    own = case.get("u_norm")
    u = normed(case["x"], case["norm"] if own is None else own, EPS)[active]
    assert_close(got["u"][active], u, np.abs(u), C, "u")
    # What the router sees: u, or what it would be without a norm of its own.
    seen = got["u"] if own is None else router_sees(case)
    logits, terms = logits_of(case, seen)
    for t in np.flatnonzero(active):
        ids = got["expert"][t]
        assert len(set(ids)) == U and 0 <= ids.min() and ids.max() < E, f"row {t} has {ids}"
        assert misplaced(ids, logits[t], terms[t]) <= 1, f"row {t} has {ids}"
        p = np.exp(logits[t] - logits[t].max())
        share = p[ids] / (p[ids] if case["normalise"] else p).sum()
        share = share if case.get("expert_scale") is None else share * case["expert_scale"][ids]
        assert_close(got["share"][t], share, share_terms(np.abs(share), terms[t]), C, f"share of row {t}")
    assert_grouped(got, E)


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("bias, normalise", [(False, 1), (True, 1), (False, 0)])
@pytest.mark.parametrize("T, E, U, D", SHAPES)
def test_matches_oracle(ops, rng, T, E, U, D, bias, normalise, weights):
    case, size = make(ops, rng, T, E, U, D, weights, bias, normalise)
    assert_routed(run(ops, "route", case, **size), case, U, E)


@pytest.mark.parametrize("T, E, U, D", [(1, 6, 2, 64), (5, 20, 4, 120), (17, 128, 8, 64), (40, 33, 3, 72)])
def test_u_may_have_a_norm_of_its_own_and_experts_a_scale(ops, rng, T, E, U, D):
    """models.md 5: the router's input is another than the experts', and shares need not sum to 1."""
    case, size = make(ops, rng, T, E, U, D, weights="bf16", bias=False, idle=[T - 1] if T > 1 else [])
    make_ = Make(rng)
    case |= {"u_norm": make_.v(D, around=1), "expert_scale": make_.v(E, around=1)}
    assert_routed(run(ops, "route", case, **size), case, U, E)
    right = truth("route", case, **size)
    _, terms = logits_of(case, right["u"])
    bounds = {"u": np.abs(right["u"]), "share": share_terms(np.abs(right["share"]), terms)}
    for change in (
        {"u_norm": None},
        {"expert_scale": None},
        {"expert_scale": np.roll(case["expert_scale"], 1)},
    ):
        assert slip(ops, "route", case, change, bounds, C, **size) > 10, change


@pytest.mark.parametrize("idle", [[0], [4], [1, 2, 6], range(7)], ids=str)
def test_inactive_rows_have_no_experts(ops, rng, idle):
    case, size = make(ops, rng, 7, 12, 3, 40, idle=idle)
    case["x"][list(idle)] = stored(np.nan, ops.activations)
    with np.errstate(invalid="ignore"):
        assert_routed(run(ops, "route", case, **size), case, 3, 12)


@pytest.mark.parametrize("U", [1, 3, 4, 7])
def test_of_equal_logits_the_smaller_id_comes_first(ops, rng, U):
    """Experts e and e + 5 have the same weights, and expert 10 has those of 3."""
    case, size = make(ops, rng, 9, 11, U, 40, bias=False)
    rows = case["w"].array
    rows[5:10], rows[10] = rows[:5], rows[3]
    got = run(ops, "route", case, **size)
    assert_routed(got, case, U, 11)
    logits, _ = logits_of(case, got["u"])
    for ids, row in zip(got["expert"], np.round(logits, 3), strict=True):
        np.testing.assert_array_equal(ids, oracle_moe.choose(row, U, 1)[0])
    flat = case | {"w": Matrix(np.zeros_like(rows))}
    assert (run(ops, "route", flat, **size)["expert"] == np.arange(U)).all()


def test_one_expert_may_have_all_rows(ops, rng):
    case, size = make(ops, rng, 33, 6, 1, 40)
    case["bias"][:] = [0, 0, 0, 0, 1000, 0]
    got = run(ops, "route", case, **size)
    assert_routed(got, case, 1, 6)
    assert (got["expert"] == 4).all() and (got["order"] == np.arange(33)).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_the_least_likely_and_ids_stay_in_range(ops, rng):
    case, size = make(ops, rng, 6, 9, 4, 40)
    case["bias"][[1, 5]] = np.nan, -np.inf
    case["x"][2] = stored(np.nan, ops.activations)
    got = run(ops, "route", case, **size)
    assert (got["expert"][2] == np.arange(4)).all() and np.isnan(got["share"][2]).all()
    others = np.delete(got["expert"], 2, 0)
    assert not np.isin(others, [1, 5]).any() and np.isfinite(np.delete(got["share"], 2, 0)).all()
    assert_grouped(got, 9)
    case, size = make(ops, rng, 3, 9, 9, 40)
    case["bias"][[1, 5, 7]] = np.nan, -np.inf, np.nan
    got = run(ops, "route", case, **size)
    assert (got["expert"][:, 6:] == [1, 5, 7]).all() and not got["share"][:, 6:].any()


@pytest.mark.parametrize("T, E, U, D", [(9, 20, 4, 123), (33, 128, 8, 64)])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_rows_bits_are_its_own(ops, rng, T, E, U, D):
    """Alone, in company, beside rows of NaN and beside inactive ones."""
    case, size = make(ops, rng, T, E, U, D, "bf16")
    whole = run(ops, "route", case, **size)
    mine = [0, 3, T - 1]
    others = np.setdiff1d(np.arange(T), mine)
    spoiled = case | {"x": case["x"].copy()}
    spoiled["x"][others] = stored(np.nan, ops.activations)
    idle = case | {"pos": case["pos"].copy()}
    idle["pos"][others] = -1
    for words, beside in (
        ("NaN", run(ops, "route", spoiled, **size)),
        ("idle", run(ops, "route", idle, **size)),
    ):
        for what in ("u", "expert", "share"):
            assert_same_bits(beside[what][mine], whole[what][mine], f"{what}, {words} beside")
    for t in mine:
        one = case | {"x": case["x"][t : t + 1], "pos": case["pos"][t : t + 1]}
        alone = run(ops, "route", one, **size)
        for what in ("u", "expert", "share"):
            assert_same_bits(alone[what], whole[what][t : t + 1], f"{what} of row {t} alone")


def test_sees_wrong_kernels(ops, rng):
    case, size = make(ops, rng, 5, 9, 3, 123)
    right = truth("route", case, **size)
    logits, terms = logits_of(case, right["u"])
    bounds = {"u": np.abs(right["u"]), "share": share_terms(right["share"], terms)}
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "softmax over all": {"normalise": 0},
        "bias dropped": {"bias": None},
        "bias shifted": {"bias": np.roll(case["bias"], 1)},
        "last input dropped": {"w": Matrix(np.where(np.arange(123) == 122, 0, case["w"].array))},
        "rows shifted": {"x": np.roll(case["x"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "route", case, change, bounds, C, **size) > 10, what
    ids = right["expert"]
    for what, chosen in {
        "least likely": np.argsort(logits, 1)[:, :3],
        "another in the middle": np.stack([ids[:, 0], ids[:, 2], ids[:, 1]], 1),
        "the next in place of the last": np.argsort(-logits, 1)[:, [0, 1, 3]],
    }.items():  # fmt: skip
        assert max(map(misplaced, chosen, logits, terms)) > 10, what
