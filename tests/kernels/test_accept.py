"""accept: the longest prefix, the target's own token, the cuts, the next anchor;
against rules written anew."""

import itertools

import numpy as np
import pytest

from tests.cases import run, truth

B = 6
STOP = 77
RUNS, STOPPED, OUT_OF_BUDGET, NOT_FINITE = 0, 1, 2, 3


def expect(drafts, own, stops, left, start, fresh, done, anchor):
    """One slot in plain words. drafts: B - 1 proposals or fewer; own: the target's token after each row."""
    if done:
        return {"record": [0, 0, 0], "tokens": [], "start": start, "fresh": fresh, "left": left, "done": done,
                "anchor": anchor}  # fmt: skip
    right = [d == t and t != -1 for d, t in zip(drafts, own, strict=False)]
    kept = len(list(itertools.takewhile(bool, right)))
    tokens, why = own[: kept + 1][:left], RUNS
    for i, token in enumerate(tokens):
        if token == -1 or token in stops:
            tokens, why = (tokens[:i], NOT_FINITE) if token == -1 else (tokens[: i + 1], STOPPED)
            break
    why = why or (OUT_OF_BUDGET if len(tokens) == left else RUNS)
    anchor = tokens[-1] if tokens else anchor
    return {"record": [len(tokens), kept, why], "tokens": tokens, "start": start + len(tokens),
            "fresh": fresh + len(tokens), "left": left - len(tokens), "done": why,
            "anchor": anchor}  # fmt: skip


def play(ops, slots, width, stops=(STOP,)):
    """slots: dicts of own (width ids), drafts (width - 1), left, done, fresh, stops (else `stops`).
    Compares everything with `expect`."""
    N = len(slots)
    i32 = np.int32
    drafts = np.full((N, B), -3, i32)
    for n, s in enumerate(slots):
        drafts[n, 1:width] = s["drafts"]
        drafts[n, width:] = 5  # never verified, so never read
    case = {
        "drafts": drafts, "choice": np.array([s["own"] for s in slots], i32).reshape(-1),
        "stop": np.array([s.get("stops", list(stops) or [-1]) for s in slots], i32),
        "start": np.arange(N, dtype=i32) * 100 + 40,
        "anchor": np.full(N, 9, i32), "fresh": np.array([s.get("fresh", 0) for s in slots], i32),
        "left": np.array([s.get("left", 100) for s in slots], i32),
        "done": np.array([s.get("done", 0) for s in slots], i32),
    }  # fmt: skip
    got = run(ops, "accept", case, T=N * width)
    for n, s in enumerate(slots):
        given = [int(case[k][n]) for k in ("left", "start", "fresh", "done", "anchor")]
        want = expect(s["drafts"], s["own"], s.get("stops", stops), *given)
        tokens = want.pop("tokens")
        seen = [] if s.get("done") else [max(draft, 0) for draft in s["drafts"]]
        record = (
            want.pop("record") + tokens + [-1] * (B - len(tokens)) + [-1, *seen] + [-1] * (B - 1 - len(seen))
        )
        assert got["record"][n].tolist() == record, s
        assert {name: int(got[name][n]) for name in want} == want, s
    for name, value in truth("accept", case, T=N * width).items():
        assert got[name].tolist() == value.tolist(), name


def slot(kept, width, **rest):
    """Drafts right up to `kept`, then wrong, then right again: a trap, those must not count."""
    own = [10 + i for i in range(width)]
    drafts = [own[i] if i != kept else 999 for i in range(width - 1)]
    return {"own": own, "drafts": drafts, **rest}


@pytest.mark.parametrize("width", [1, 2, 5, B])
def test_every_accepted_length(ops, width):
    for kept in range(width):
        play(ops, [slot(kept, width)], width)


@pytest.mark.parametrize("budget", range(1, B + 2))
def test_budget_cuts(ops, budget):
    for kept in range(B):
        play(ops, [slot(kept, B, left=budget)], B)


@pytest.mark.parametrize("at", range(B))
@pytest.mark.parametrize("budget", [1, 3, B, 100])
def test_stop_in_the_middle(ops, at, budget):
    """A stop id inside, at the end of, and behind the accepted prefix;
    where both cut, the stop is the reason."""
    for kept in range(B):
        s = slot(kept, B, left=budget)
        s["own"][at] = STOP
        if at < kept:
            s["drafts"][at] = STOP
        play(ops, [s], B)


def test_several_stop_ids_and_none(ops):
    s = slot(4, B)
    play(ops, [s], B, stops=(12, 11, 500))
    play(ops, [s], B, stops=())
    play(ops, [slot(4, B)], B, stops=(10,))


def test_slots_have_their_own_stop_ids(ops):
    slots = [slot(4, B, stops=(500,)), slot(4, B, stops=(12,)), slot(4, B, stops=(-1,))]
    play(ops, slots, B)


def test_done_slots_stay_as_they_are(ops):
    slots = [slot(3, B, done=1, left=7, fresh=2), slot(2, B, fresh=1), slot(B - 1, B, done=2, left=0)]
    play(ops, slots, B)


@pytest.mark.parametrize("at", range(B))
@pytest.mark.parametrize("stops", [(STOP,), (12,), ()])  # without stop ids the list holds a -1
def test_logits_that_are_not_finite_end_the_slot(ops, at, stops):
    for kept in range(B):
        for budget in (1, 3, 100):
            s = slot(kept, B, left=budget)
            s["own"][at] = -1
            play(ops, [s], B, stops)
            s["drafts"][at % (B - 1)] = -1  # a draft that is no number either: the two must not agree
            play(ops, [s], B, stops)


def test_plain_rounds_let_features_wait(ops):
    play(ops, [slot(0, 1, fresh=4), slot(0, 1), slot(0, 1, left=1, fresh=5)], 1)


def test_random_slots(ops, rng):
    """Three slots at once, two symbols, so that prefixes, stops and budgets meet in every way."""
    for _ in range(150):
        width = int(rng.integers(1, B + 1))
        slots = []
        for _ in range(3):
            done = int(rng.integers(0, 5)) // 4
            slots.append({
                "own": rng.choice([3, 4, 4, 4, STOP], width).tolist(),
                "drafts": rng.choice([3, 4, 4, 4, STOP], width - 1).tolist(),
                "left": 0 if done else int(rng.integers(1, 9)), "done": 2 * done,
                "fresh": int(rng.integers(0, 4)),
            })  # fmt: skip
        play(ops, slots, width)
