"""attend: which keys a row sees, GQA, and that the keys it does not see cannot matter."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import Make, check, run, slip, stored
from tests.compare import assert_same_bits, real
from tests.conftest import FULL, parameters

C = 8
LENGTHS = [1, 2, 16, 127, 128, 129, 255, 256, 257, 300]  # around the chunks of 128 keys


def make(ops, rng, pos, heads=(5, 1, 24), begin=None, end=None, window=0, causal=1, room=310, scale=None):
    """A case with a slot for each row, in shuffled order. begin,
    end: default the row's own position and the next."""
    H, G, K = heads
    T = len(pos)
    make = Make(rng, ops.activations)
    pos = np.array(pos, np.int32)
    return {
        "q": make.a(T, H, K), "cache_k": make.a(T, G, room, K), "cache_v": make.a(T, G, room, K),
        "slot": rng.permutation(T).astype(np.int32), "pos": pos,
        "begin": pos if begin is None else np.array(begin, np.int32),
        "end": pos + 1 if end is None else np.array(end, np.int32),
        "window": window, "causal": causal, "scale": K**-0.5 if scale is None else scale, "sinks": None,
    }  # fmt: skip


def is_seen(case):
    """(T, S) bool, from the words of models.md 0 and 7.5, not from oracle.key_range."""
    key = np.arange(case["cache_k"].shape[2])[None]
    pos, begin, end = (case[name][:, None] for name in ("pos", "begin", "end"))
    seen = key <= pos if case["causal"] else key < end
    if case["window"]:
        near = abs(pos - key) < case["window"]
        seen = seen & (near | (key >= begin) & (key <= pos))
    return seen & (pos >= 0)


def weigh(case):
    """Dense float64 attention under is_seen, and its terms."""
    q, k, v = (real(case[name]) for name in ("q", "cache_k", "cache_v"))
    k, v = (np.repeat(c[case["slot"]], q.shape[1] // c.shape[1], axis=1) for c in (k, v))
    seen = is_seen(case)[:, None]
    scores = case["scale"] * np.einsum("thk,thsk->ths", q, k)
    size = case["scale"] * np.einsum("thk,thsk->ths", abs(q), abs(k))
    any_key = seen.any(-1, keepdims=True)
    sink = (np.full(q.shape[1], -np.inf) if case["sinks"] is None else real(case["sinks"]))[:, None]
    best = np.maximum(np.where(seen, scores, -np.inf).max(-1, keepdims=True), sink)
    top = np.where(any_key, best, 0)
    p = np.where(seen, np.exp(np.where(seen, scores - top, 0)), 0)
    rest = np.exp(np.where(any_key, sink - top, -np.inf))
    total = np.where(any_key, p.sum(-1, keepdims=True) + rest, 1)
    p /= total
    slack = 2 + 2 * np.where(seen, size, 0).max(-1)  # an error of e in a score is one of e * p in p
    slack = slack + 2 * (np.where(rest > 0, abs(sink), 0) * rest / total)[..., 0]
    return np.einsum("ths,thsk->thk", p, v), np.einsum("ths,thsk->thk", p, abs(v)) * slack[..., None]


def compare(ops, case):
    want, terms = weigh(case)
    got = check(ops, "attend", case, {"o": terms}, C)
    np.testing.assert_allclose(oracle.attend(*[case[n] for n in CASE], None), want, rtol=1e-9, atol=1e-9)
    return got


CASE = ["q", "cache_k", "cache_v", "slot", "pos", "begin", "end", "window", "causal", "scale", "sinks"]


@pytest.mark.parametrize("ops, heads, window", [
    pytest.param(p.values[0], heads, window, id=f"{p.id}-{window}-{heads}", marks=p.marks)
    for i, heads in enumerate([(9, 3, 64), (5, 1, 24), (4, 4, 80), (16, 8, 128), (3, 1, 13)])
    for j, window in enumerate([0, 1, 7, 128, 200]) for p in parameters()
    if FULL or p.values[0][0] != "emulate" or (i + j) % 2 == 0  # each size has windows, each window sizes
], indirect=["ops"])  # fmt: skip
def test_causal(ops, rng, heads, window):
    compare(ops, make(ops, rng, [n - 1 for n in LENGTHS], heads, window=window))


@pytest.mark.parametrize("heads", [(9, 3, 64), (5, 1, 32)], ids=str)
@pytest.mark.parametrize(
    "context, block", [(0, 1), (0, 5), (1, 16), (121, 8), (126, 2), (127, 1), (128, 17), (250, 16)]
)
def test_whole_block(ops, rng, context, block, heads):
    """The drafter's own rule: every row sees the context and all of the block."""
    pos = range(context, context + block)
    compare(ops, make(ops, rng, pos, heads, [context] * block, [context + block] * block, causal=0))


@pytest.mark.parametrize("context", [0, 1, 3, 4, 5, 6, 127, 128, 130])
@pytest.mark.parametrize("window", [1, 4, 5, 9])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_windows_over_a_block(ops, rng, context, window, block):
    """F19, F65: two-sided windows, and the causal rule whose window bounds the context only;
    both against a mask."""
    pos = range(context, context + block)
    ends, begins = [context + block] * block, [context] * block
    compare(ops, make(ops, rng, pos, (3, 1, 32), pos, ends, window, causal=0))
    compare(ops, make(ops, rng, pos, (3, 1, 32), begins, ends, window, causal=1))


def test_no_key_at_all_gives_zeros(ops, rng):
    case = make(ops, rng, [0, 4, 2], end=[0, 9, 0], causal=0)
    got = compare(ops, case)["o"]
    assert (got[[0, 2]] == 0).all() and (got[1] != 0).all()


def test_inactive_rows_give_zeros(ops, rng):
    case = make(ops, rng, [5, -1, 200, -1])
    case["q"][1::2] = stored(np.nan, ops.activations)
    case["cache_k"][case["slot"][1]] = stored(np.nan, ops.activations)
    got = run(ops, "attend", case)["o"]
    assert (got[1::2] == 0).all()
    alone = {
        name: np.ascontiguousarray(value[::2])
        if isinstance(value, np.ndarray) and "cache" not in name
        else value
        for name, value in case.items()
    }
    assert_same_bits(got[::2], run(ops, "attend", alone)["o"])


@pytest.mark.parametrize("window, causal", [(0, 1), (40, 1), (0, 0), (40, 0)])
@pytest.mark.parametrize("other", [1e30, -1e30, np.inf, np.nan])
def test_keys_outside_the_range_cannot_matter(ops, rng, window, causal, other):
    """F64: changing unseen keys and values changes no bit."""
    pos = [0, 3, 126, 127, 128, 129, 200, 255]
    case = make(ops, rng, pos, (3, 1, 24), end=[p + 5 for p in pos], window=window, causal=causal)
    clean = run(ops, "attend", case)["o"]
    unseen = np.zeros(case["cache_k"].shape[:1] + case["cache_k"].shape[2:3], bool)
    unseen[case["slot"]] = ~is_seen(case)
    for name in ("cache_k", "cache_v"):
        case[name] = np.where(unseen[:, None, :, None], stored(other, ops.activations), case[name])
    assert_same_bits(run(ops, "attend", case)["o"], clean)


def test_nan_inside_the_range_shows(ops, rng):
    case = make(ops, rng, [5, 200, 130], (3, 1, 24))
    case["cache_k"][case["slot"][1], :, 17] = stored(np.nan, ops.activations)
    got = np.isnan(real(run(ops, "attend", case)["o"]))
    assert got[1].all() and not got[[0, 2]].any()


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_large_scores(ops, rng, size):
    """Scores of hundreds and thousands, a maximum that grows and one that falls from chunk to chunk."""
    case = make(ops, rng, [299, 299], (2, 1, 16), scale=1.0)
    ramp = np.linspace(-size, size, 310)[:, None] / 16 * np.ones(16)
    case["q"] = stored(np.ones((2, 2, 16)), ops.activations)
    case["cache_k"][0, 0], case["cache_k"][1, 0] = (stored(r, ops.activations) for r in (ramp, -ramp))
    assert np.isfinite(real(compare(ops, case)["o"])).all()


def test_slots_are_the_rows_own(ops, rng):
    """Several rows of several slots in one pass, at different positions."""
    case = make(ops, rng, [200, 3, 7, 128, 64, 9])
    case["slot"] = np.array([1, 0, 1, 2, 0, 2], np.int32)
    compare(ops, case)


def test_sees_wrong_kernels(ops, rng):
    pos = [20, 22, 23, 140]
    case = make(ops, rng, pos, (6, 2, 24), [19, 20, 20, 138], [24, 24, 24, 142], window=9)
    terms = {"o": weigh(case)[1]}

    def interleaved_heads(q, *rest):
        order = np.arange(6).reshape(2, 3).T.reshape(-1)  # head h reads group h % G
        return oracle.attend(q[:, np.argsort(order)], *rest)[:, order]

    wrong = {
        "window one wider": {"window": 10}, "window one narrower": {"window": 8}, "no window": {"window": 0},
        "not causal": {"causal": 0}, "begin off by one": {"begin": case["begin"] - 13},
        "last key dropped": {"pos": case["pos"] - 1, "window": 8},
        "k and v swapped": {"cache_k": case["cache_v"], "cache_v": case["cache_k"]},
        "scale dropped": {"scale": 1.0}, "slots shifted": {"slot": np.roll(case["slot"], 1)},
        "heads spread over groups": interleaved_heads,
    }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "attend", case, change, terms, C) > 10, what
