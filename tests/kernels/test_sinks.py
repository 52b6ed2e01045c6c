"""attend with sinks: a logit more a query head, which is not scaled and has no value (models.md 4).

The first half asks every variant of the row, the second half that on tensor cores, at gpt-oss's shapes too.
"""

import numpy as np
import pytest
from minidflash.kernels import oracle
from minidflash.kernels.gpu import attend_fast

from minidflash import state
from tests.cases import Make, run, slip
from tests.compare import assert_close, assert_same_bits, real
from tests.conftest import parameters
from tests.kernels import test_fast_attend
from tests.kernels.test_attend import LENGTHS, C, compare, make, weigh
from tests.kernels.test_fast_attend import call, some

# Far below the scores, among them, far above: there nothing is left for the keys.
LEVELS = np.array([-np.inf, -1e30, -20, -1, 0.5, 3, 20, 1000, 1e30], np.float32)
FAST = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)


def with_sinks(case):
    """The case, its query heads' sinks LEVELS in turn."""
    return case | {"sinks": np.resize(LEVELS, case["q"].shape[1])}


def assert_ends(o, without, sinks):
    """The smallest sinks change no bit, the largest leave nothing. o, without: with and without sinks."""
    assert_same_bits(o[:, sinks < -1e29], without[:, sinks < -1e29], "a sink far below all scores")
    assert (real(o[:, sinks >= 1000]) == 0).all(), "a sink far above all scores"


# ---- every variant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(9, 3, 64), (18, 2, 24), (9, 1, 128)], ids=str)
@pytest.mark.parametrize("window", [0, 7, 128])
def test_matches_the_oracle(ops, rng, heads, window):
    case = with_sinks(make(ops, rng, [n - 1 for n in LENGTHS], heads, window=window))
    got = compare(ops, case)["o"]
    assert_ends(got, run(ops, "attend", case | {"sinks": None})["o"], case["sinks"])


def test_equal_scores_share_with_the_sink(ops):
    """Ten keys of score 0 and a sink of log 6: the keys have 10/16 of it, whatever the scale."""
    case = make(ops, np.random.default_rng(0), [9, 9], (2, 1, 64), scale=3.0)
    case = case | {name: np.zeros_like(case[name]) for name in ("q", "cache_v")}
    case["cache_v"][:] = 0x3F80 if ops.activations == "bf16" else 1.0
    got = run(ops, "attend", case | {"sinks": np.log([6.0, 30.0]).astype(np.float32)})["o"]
    assert_close(got, np.broadcast_to([[10 / 16], [10 / 40]], got.shape), 1.0, C)


def test_rows_without_keys_give_zeros(ops, rng):
    case = with_sinks(make(ops, rng, [0, 4, 2, -1], (9, 3, 64), end=[0, 9, 0, 0], causal=0))
    got = real(compare(ops, case)["o"])
    assert (got[[0, 2, 3]] == 0).all() and (got[1, :5] != 0).all()


def test_a_sink_that_is_no_number_shows_in_its_head_alone(ops, rng):
    case = make(ops, rng, [5, 200, 130], (4, 2, 64)) | {"sinks": np.zeros(4, np.float32)}
    clean = run(ops, "attend", case)["o"]
    case["sinks"][2] = np.nan
    got = run(ops, "attend", case)["o"]
    assert np.isnan(real(got[:, 2])).all()
    assert_same_bits(got[:, [0, 1, 3]], clean[:, [0, 1, 3]])


def test_sees_wrong_sinks(ops, rng):
    sinks = np.array([2.0, -1, 4, 1, 3, -2], np.float32)
    case = make(ops, rng, [20, 150, 290], (6, 2, 24)) | {"sinks": sinks}
    terms = {"o": weigh(case)[1]}

    def unshifted(q, k, v, scale, sink):
        scores = scale * (k @ q)
        p = np.exp(scores - scores.max())
        return p @ v / (p.sum() + np.exp(sink))

    def left_out_of_the_maximum(*args):
        """Where a score is far below the sink: exp(sink - m) has no f32."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oracle, "softmax_attend", unshifted)
            return oracle.attend(*args)

    wrong = {
        "left out": {"sinks": None}, "scaled": {"sinks": sinks * np.float32(case["scale"])},
        "counted twice": {"sinks": sinks + np.float32(np.log(2))},
        "of the kv head": {"sinks": np.repeat(sinks[:2], 3)},
        "of the neighbour": {"sinks": np.roll(sinks, 1)}, "negated": {"sinks": -sinks},
        "a power of two": {"sinks": sinks * np.float32(np.log(2))},
        "not over the maximum": left_out_of_the_maximum,
    }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "attend", case, change, terms, C) > 10, what


# ---- on tensor cores ---------------------------------------------------------------------------------------

GPT_OSS = (64, 8, 64)


@FAST
@pytest.mark.parametrize("variant", test_fast_attend.VARIANTS)
@pytest.mark.parametrize("window", [0, 130])
def test_one_row_has_the_bits_of_many(ops, rng, variant, window):
    """In one piece, in several, and in both among the rows of a block."""
    tuning = test_fast_attend.VARIANTS[variant]
    for context in (1, 136, 1000):
        case = with_sinks(test_fast_attend.make(rng, range(context, context + 16), (9, 1, 64), window=window))
        many = call(ops, case, **tuning)
        test_fast_attend.check(case, many)
        assert_ends(many, call(ops, case | {"sinks": None}, **tuning), case["sinks"])
        for row in (0, 7, 15):
            alone = call(ops, some(case, [row]), **tuning)
            assert_same_bits(alone[0], many[row], f"row {row} at {context}")


@FAST
@pytest.mark.parametrize("context, rows, splits", [(2040, 16, 8), (6100, 4, 30)])
def test_a_sink_joins_once_whatever_the_pieces(ops, rng, context, rows, splits):
    """More pieces than a warp takes at a time; by all blocks or by the one that came last; in grids of every
    bucket."""
    case = with_sinks(test_fast_attend.make(rng, range(context, context + rows), (4, 1, 64)))
    case["sinks"] = np.array([-20, 0.5, 3, 6], np.float32)
    many = call(ops, case, splits=splits)
    test_fast_attend.check(case, many)
    assert_same_bits(call(ops, case, splits=splits, waits=False), many)
    for keys in (context + rows, context + 300, 99999):
        assert_same_bits(call(ops, case, splits=splits, keys=keys), many, f"{keys} keys")


@FAST
def test_slots_and_inactive_rows(ops, rng):
    pos = [*range(100, 105), *[-1] * 5, *range(1380, 1385)]
    case = with_sinks(test_fast_attend.make(rng, pos, (18, 2, 64), slots=3))
    whole = call(ops, case)
    test_fast_attend.check(case, whole)
    assert (whole[5:10] == 0).all()
    order = rng.permutation(15)
    assert_same_bits(call(ops, some(case, order)), whole[order])


@FAST
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_a_later_row_holds_cannot_matter(ops, rng):
    """The rows of the tile are taken again, one by one: each has its sink once."""
    case = with_sinks(test_fast_attend.make(rng, range(136, 152), (4, 1, 64)))
    case["sinks"] = np.array([-20, 0.5, 3, 6], np.float32)
    clean = call(ops, case)
    case["cache_v"][0, :, 136 + 9] = 0x7FC0
    got = call(ops, case)
    assert_same_bits(got[:9], clean[:9])
    assert np.isnan(real(got[9:])).all()


def gpt_oss(rng, rows, context, window):
    """A case at the end of a context; with a window, its keys in a ring as long as state.py makes it."""
    (H, G, K), make = GPT_OSS, Make(rng, "bf16")
    pos = np.arange(context, context + rows, dtype=np.int32)
    room = state.cache_rows(window, context + rows, max(rows, 256), attend_fast.LEAF)
    return {
        "q": make.a(rows, H, K), "cache_k": make.a(1, G, room, K), "cache_v": make.a(1, G, room, K),
        "slot": np.zeros(rows, np.int32), "pos": pos, "begin": pos, "end": pos + 1,
        "window": window, "causal": 1,
        "scale": K**-0.5, "sinks": (2 * rng.standard_normal(H)).astype(np.float32),
    }  # fmt: skip


def unrolled(case, rows):
    """The case with these rows alone, its ring as a cache that holds every key: what weigh understands."""
    part, room = some(case, rows), case["cache_k"].shape[2]
    keys = np.arange(part["pos"].max() + 1) % room
    return part | {name: np.ascontiguousarray(part[name][:, :, keys]) for name in ("cache_k", "cache_v")}


@FAST
@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("window", [0, 128])
def test_gpt_oss_decodes_fast(ops, rng, rows, window):
    """64 query heads, 8 of a kv head: eight rows fill a tile. Of the window's ring, 432 rows, the end is
    within."""
    case = gpt_oss(rng, rows, 850, window)
    assert case["cache_k"].shape[2] == (432 if window else 850 + rows)
    got = run(ops, "attend", case)["o"]
    assert ops.backend.variants["attend"] == "fast"
    picked = sorted({0, rows // 2, rows - 1})
    want, terms = weigh(unrolled(case, picked))
    assert_close(got[picked], want, terms, C)
    assert_same_bits(run(ops, "attend", some(case, [rows // 2]))["o"][0], got[rows // 2])
    for whole in (False, True):  # blocks that have some units of their rows, or all: where a sink joins
        assert_same_bits(call(ops, case, whole=whole), got)


@FAST
@pytest.mark.parametrize("window", [0, 128])
def test_gpt_oss_reads_a_prompt_fast(ops, rng, window):
    rows = 40 if ops.name == "emulate" else 2048
    case = gpt_oss(rng, rows, 2048 - rows if ops.name != "emulate" else 420, window)
    prompt = ops.for_prefill
    got = run(prompt, "attend", case)["o"]
    assert prompt.backend.variants["attend"] == "prefill"
    picked = sorted({0, 9, rows // 2, rows - 1})
    want, terms = weigh(unrolled(case, picked))
    assert_close(got[picked], want, terms, C)
    assert_same_bits(run(prompt, "attend", some(case, picked))["o"], got[picked])


def test_rows_of_eight_query_heads_fill_a_tile():
    groups = {
        rows: attend_fast.Shape(rows, *GPT_OSS, 1, 132, 128, True).group for rows in (1, 8, 16, 32, 2048)
    }
    assert groups == {1: 1, 8: 8, 16: 8, 32: 8, 2048: 8}
