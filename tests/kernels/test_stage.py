"""stage: the rows of one pass, from the anchors and what fills the block behind them."""

import numpy as np
import pytest

from tests.cases import run, truth

B = 8


def case_of(rng, N, done=None, fresh=None):
    return {
        "anchor": rng.integers(0, 999, N).astype(np.int32),
        "start": rng.integers(0, 5000, N).astype(np.int32),
        "fresh": np.zeros(N, np.int32) if fresh is None else np.array(fresh, np.int32),
        "done": np.zeros(N, np.int32) if done is None else np.array(done, np.int32),
        "fill": rng.integers(1000, 1999, (N, B)).astype(np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 7, B])
@pytest.mark.parametrize(
    "N, done, fresh", [(1, [0], [0]), (1, [2], [0]), (3, [0, 1, 0], [0, 5, 3]), (2, [0, 0], [7, 1])]
)
def test_rows(ops, rng, N, done, fresh, width):
    case = case_of(rng, N, done, fresh)
    got = run(ops, "stage", case, T=N * width)
    for n in range(N):
        for i in range(width):
            r = n * width + i
            want = {
                "ids": case["fill"][n, i] if i else case["anchor"][n],
                "slot": n,
                "pos": -1 if done[n] else case["start"][n] + i,
                "at": case["start"][n] + i,
                "begin": case["start"][n],
                "end": case["start"][n] + width,
                "row": n * B + fresh[n] + i if fresh[n] + i < B else -1,
            }
            assert {name: int(got[name][r]) for name in want} == want
    for name, value in truth("stage", case, T=N * width).items():
        assert got[name].tolist() == value.tolist(), name


def test_column_0_of_fill_is_not_read(ops, rng):
    case = case_of(rng, 2)
    before = run(ops, "stage", case, T=2 * B)
    case["fill"][:, 0] = -5
    after = run(ops, "stage", case, T=2 * B)
    assert all((before[name] == after[name]).all() for name in before)


def test_a_fill_that_is_no_id_becomes_id_0(ops, rng):
    case = case_of(rng, 2)
    case["fill"][0, 3] = case["fill"][1, 1] = -1
    ids = run(ops, "stage", case, T=2 * B)["ids"].reshape(2, B)
    assert ids[0, 3] == ids[1, 1] == 0 and (ids > 0).sum() == 2 * B - 2
