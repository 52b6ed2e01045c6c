"""Sums whose parts cancel: what is left is rounding, so that the order in which parts meet shows.

With random data bf16 hides the order of f32 sums nearly everywhere: slices added as they arrive went unseen.
"""

import numpy as np
import pytest
from minidflash.kernels.gpu.attend_fast import LEAF
from minidflash.kernels.ops import Ops

from tests.cases import Matrix, stored, truth
from tests.compare import assert_same_bits, real
from tests.conftest import open_or_skip, parameters
from tests.fast_rows import fast_run
from tests.kernels import test_fast_attend, test_rows
from tests.kernels.test_fast_bits import CUTS, cut  # noqa: F401 a fixture

EMULATE = pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
CUT = [CUTS[1], CUTS[-1]]  # three slices: in the workspace, in a cluster's shared memory
WHERE = ["workspace", "cluster"]
SUMS = "qkv", "linear", "linear_add", "gate_up", "head", "head_logits", "fuse", "inject"
COLS, HUGE = 192, 2.0**19
SEEDS = 1, 2, 3, 4


def cancelling(form, rng, cols=COLS):
    """A case of 64 rows of `cols` inputs: terms of the first and the last third are huge and opposite."""
    name, case, sizes = test_rows.make_form(form, rng, "bf16", "bf16")
    given = {"linear": "a", "linear_add": "a", "fuse": "taps", "inject": "f"}.get(name, "x")
    x, third = np.abs(rng.standard_normal((len(case[given]), cols))), cols // 3
    x[:, -third:] = x[:, :third]
    case[given] = stored(x, "bf16")
    for what, matrix in case.items():
        if isinstance(matrix, Matrix):
            w = rng.standard_normal((matrix.shape[0], cols))
            w[:, :third] = HUGE * (1 + np.abs(w[:, :third]))
            w[:, -third:] = -w[:, :third]
            case[what] = Matrix(stored(w, "bf16"))
    if case.get("norm") is not None and name not in ("fuse", "linear_add"):
        case["norm"] = np.ones(cols, np.float32)  # what cancels stays so
    return case, sizes


def rows_of(ops, name, case, sizes, rows):
    part = test_rows.some_rows(name, case, list(rows))
    return test_rows.seen(name, part, fast_run(ops, name, part, **sizes), list(rows))


@EMULATE
@pytest.mark.parametrize("cut", CUT, indirect=True, ids=WHERE)
@pytest.mark.parametrize("name", SUMS)
def test_slices_meet_in_their_order_whoever_comes_first(ops, rng, cut, name):  # noqa: F811
    case, sizes = cancelling(name, rng)
    want = rows_of(ops, name, case, sizes, range(11))
    for seed in SEEDS:
        shuffled = Ops(type(ops.backend)("bf16", seed=seed))
        got = rows_of(shuffled, name, case, sizes, range(11))
        test_rows.compare(name, want, got, list(range(11)), f"seed {seed}")


@EMULATE
@pytest.mark.parametrize("cut", CUT[:1], indirect=True, ids=WHERE[:1])
@pytest.mark.parametrize("name", SUMS)
def test_rows_beside_change_no_order(ops, rng, cut, name):  # noqa: F811
    case, sizes = cancelling(name, rng)
    whole = rows_of(ops, name, case, sizes, range(64))
    for count in (1, 3, 9, 16, 33):
        rows = range(64 - count, 64)
        test_rows.compare(name, whole, rows_of(ops, name, case, sizes, rows), list(rows), f"{count} rows")


@EMULATE
@pytest.mark.parametrize("cut", CUT[:1], indirect=True, ids=WHERE[:1])
@pytest.mark.parametrize("name", [name for name in SUMS if name not in ("head", "head_logits")])
def test_the_data_tell(ops, rng, cut, name):  # noqa: F811
    """Most results are far from the truth, as sums in another order are from each other."""
    case, sizes = cancelling(name, rng)
    part = test_rows.some_rows(name, case, list(range(11)))
    got = rows_of(ops, name, case, sizes, range(11))
    want = test_rows.seen(name, part, truth(name, part, **sizes), range(11))
    for what in (name for name in got if name != "taps"):
        error = np.abs(real(got[what]) - real(want[what])) / np.abs(real(want[what]))
        assert np.mean(error > 2.0**-6) > 0.3, what


# ---- attention ---------------------------------------------------------------------------------------------


def cancelling_keys(rng):
    """Four rows over 1,000 keys of one score: values of leaves 0 and 4 are huge and opposite."""
    case = test_fast_attend.make(rng, range(1000, 1004), (4, 1, 64))
    case["q"][:] = 0
    v = rng.standard_normal(case["cache_v"].shape)
    v[:, :, :LEAF] = 2.0**17 * (1 + np.arange(64) / 64)
    v[:, :, 4 * LEAF : 5 * LEAF] = -v[:, :, :LEAF]
    case["cache_v"] = stored(v, "bf16")
    return case


@EMULATE
@pytest.mark.parametrize("waits", [False, True])
def test_pieces_of_a_row_meet_in_their_order(ops, rng, waits):
    case = cancelling_keys(rng)
    want = test_fast_attend.call(ops, case, splits=8, waits=waits)
    exact = np.abs(real(want) - truth("attend", case)["o"]) / np.abs(truth("attend", case)["o"])
    assert np.mean(exact > 2.0**-6) > 0.3, "the data tell nothing"
    for seed in SEEDS:
        other = open_or_skip("emulate", "bf16", seed=seed, sms=4)
        assert_same_bits(test_fast_attend.call(other, case, splits=8, waits=waits), want, f"seed {seed}")
    for row in range(4):
        alone = test_fast_attend.call(ops, test_fast_attend.some(case, [row]), splits=8, waits=waits)
        assert_same_bits(alone[0], want[row], f"row {row} alone")
