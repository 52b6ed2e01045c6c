"""widen: ids and laws of a reduced head become the target's."""

import numpy as np
import pytest

from tests.cases import run, truth


def case_of(rng, T, Y, V, pick=None, mass=True):
    names = np.sort(rng.permutation(V)[:Y]).astype(np.int32)
    case = {
        "pick": np.arange(T, dtype=np.int32) if pick is None else np.array(pick, np.int32),
        "pos": rng.integers(0, 900, T).astype(np.int32), "names": names, "narrow": None, "mass": None,
        "ids": rng.integers(0, Y, T).astype(np.int32),
    }  # fmt: skip
    if mass:
        masses = np.floor(rng.random((T, Y)) * 2**43 * (rng.random((T, Y)) < 0.5))
        case |= {"narrow": masses.astype(np.float32), "mass": np.full((T, V), 7, np.float32)}
    return case


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("T, Y, V, pick", [(5, 7, 20, None), (17, 150, 384, [3, 1, 16]), (1, 1, 1, None),
                                           (3, 700, 5003, [2]), (4, 9, 9, [])])  # fmt: skip
def test_matches_oracle(ops, rng, T, Y, V, pick, mass):
    case = case_of(rng, T, Y, V, pick, mass)
    got, want = run(ops, "widen", case), truth("widen", case)
    for name, value in want.items():
        assert (got[name] == value).all(), name
    for r in case["pick"]:
        assert got["ids"][r] == case["names"][case["ids"][r]]
        assert not mass or (got["mass"][r, case["names"]] == case["narrow"][r]).all()
        assert not mass or got["mass"][r].sum(dtype=np.float64) == case["narrow"][r].sum(dtype=np.float64)


def test_inactive_rows_and_ids_that_are_none_stay(ops, rng):
    """A slot that is done keeps the target's ids of its last draft, which the head has no rows for."""
    case = case_of(rng, 6, 9, 40)
    case["pos"][[1, 4]] = -1
    case["ids"][[1, 4]], case["ids"][2] = (39, 2**30), -1
    got = run(ops, "widen", case)
    assert got["ids"][[1, 2, 4]].tolist() == [39, -1, 2**30]
    assert (got["mass"][[1, 4]] == 7).all() and (got["mass"][2, case["names"]] == case["narrow"][2]).all()


def test_rows_without_mass_may_have_any_name(ops, rng):
    """Of a head with more rows than the target has ids, those beyond are never drawn."""
    case = case_of(rng, 3, 9, 40)
    case["names"][-2:], case["narrow"][:, -2:] = (40, 2**30), 0
    got = run(ops, "widen", case)
    assert (got["mass"][:, case["names"][:-2]] == case["narrow"][:, :-2]).all()
    assert (got["mass"] > 0).sum() == (case["narrow"] > 0).sum()
