"""Samples side by side: each is, bit for bit, what it is alone, and they come one behind the other."""

import numpy as np
import pytest

import minidflash as md
from minidflash import fit, request
from tests import automaton
from tests.conftest import FULL, parameters
from tests.models import engine_of, target_of

DENSE, EXPERTS, RINGS = "dflash-qwen3-trained", "dflash-qwen3-moe-tiny", "dflash-gpt-oss-mxfp4-tiny"
GEMMA = "dflash-gemma4-tiny"
pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = np.random.default_rng(3).integers(0, 83, 37).tolist()  # three chunks
DRAWN = {"temperature": 1.2, "seed": 5, "verify": 4}
WAYS = {
    "greedy": {"temperature": 1.0, "top_k": 1, "verify": 4},
    "drawn": DRAWN | {"logprobs": True},
    "auto": DRAWN | {"verify": "auto"},
    "plain": {"temperature": 0.9, "top_p": 0.9, "drafter": False},
    "reject": DRAWN | {"accept": "reject", "logprobs": True},
}


@pytest.fixture
def slots(monkeypatch):
    """Call it with how many samples run at a time."""
    return lambda count: monkeypatch.setattr(request, "SIDE_BY_SIDE", count)


@pytest.fixture
def stopping():
    """(pair, backend, activations) -> an engine that from now on stops at some ids that are often chosen."""
    changed = []

    def with_stops(pair, backend="numba", activations="f32"):
        engine = engine_of(target_of(pair), pair, backend, activations, ctx=256, prefill_chunk=16)
        changed.append((engine, engine.stop_ids))
        engine.stop_ids = frozenset(range(0, engine.target.config.vocab, 17))
        return engine

    yield with_stops
    for engine, stop_ids in changed:
        engine.stop_ids = stop_ids


def told(engine, count, prompt=PROMPT, **options):
    """Every sample of a run, and the number of slots that it ran in."""
    rounds = list(md.stream(engine, prompt, samples=count, **options))
    numbers = [r.sample for r in rounds]
    assert numbers == sorted(numbers) and set(numbers) == set(range(count))
    found = []
    for number in range(count):
        own = [r for r in rounds if r.sample == number]
        assert [r.finish_reason for r in own[:-1]] == [None] * (len(own) - 1)
        text = None if own[0].text is None else "".join(r.text for r in own)
        tokens = [token for r in own for token in r.tokens]
        logprobs = [pair for r in own for pair in r.logprobs or []]
        drafted = [(r.drafted, r.accepted) for r in own] if options.get("verify") != "auto" else None
        found.append((text, tokens, own[-1].finish_reason, logprobs, drafted))
    return found, engine.state.slots


PAIRS = [(DENSE, way) for way in WAYS] + [(EXPERTS, "drawn"), (RINGS, "drawn"), (GEMMA, "drawn")]


@pytest.mark.parametrize("pair, way", PAIRS)
def test_samples_are_those_alone(stopping, slots, monkeypatch, pair, way):
    """Also in groups, behind which the next ones begin, and with rounds that start ahead of their results."""
    engine, options = stopping(pair), {"max_tokens": 21, **WAYS[way]}
    slots(1)
    alone, used = told(engine, 7, **options)
    assert used == 1
    assert way == "greedy" or len({one[1][0] for one in alone}) > 2 < len({one[1][-1] for one in alone})
    lengths = {len(one[1]) for one in alone}
    assert way == "greedy" or (len(lengths) > 2 and {"stop", "length"} == {one[2] for one in alone})
    for count, ahead in (16, 0), (3, 0), (16, 1), (3, 2):
        slots(count)
        monkeypatch.setattr(engine.ops, "rounds_ahead", ahead)
        found, used = told(engine, 7, **options)
        assert used == min(count, 7)
        assert found == alone, f"{count} slots, {ahead} rounds ahead"
    widths = {lanes for _, lanes, *_ in engine.programs}
    assert way == "greedy" or 1 in widths, "lanes that are left move together"


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
def test_samples_are_those_alone_on_a_card(ops, stopping, slots):
    engine, options = stopping(DENSE, ops.name, ops.activations), DRAWN | {"max_tokens": 3, "logprobs": True}
    count = 7 if FULL or ops.name == "cuda" else 2
    slots(1)
    alone, _ = told(engine, count, **options)
    slots(16)
    assert told(engine, count, **options) == (alone, count)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """An engine whose tokens are words; it goes on by chance."""
    target, drafter = automaton.build(tmp_path_factory.mktemp("pair"), "FX-S")
    return md.load(str(target), drafter=str(drafter), ctx=256, warm=False)


def test_invariants_hold_of_every_sample(words, slots, monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")
    for verify in (4, "auto"):
        options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 30, "verify": verify}
        found, used = told(words, 5, [5], **options)
        assert used == 5
        slots(1)
        assert told(words, 5, [5], **options)[0] == found
        slots(16)


def test_stop_strings_end_each_where_they_end_it_alone(words, slots):
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 40, "verify": 4, "block": 4}
    first = md.generate(words, [5], samples=4, **options).samples[0]["text"].split()
    options["stop"] = [" ".join(first[12:14])]
    slots(1)
    alone = md.generate(words, [5], samples=9, **options).samples
    assert {one["finish_reason"] for one in alone} == {"stop", "length"}
    assert len({len(one["tokens"]) for one in alone}) > 2
    for count in (16, 4):
        slots(count)
        assert md.generate(words, [5], samples=9, **options).samples == alone


def test_the_first_sample_comes_round_by_round(words):
    """When its n-th round is given out, n - 1 rounds have run; of the others none is left to run."""
    ran, start = [], words.ops.start
    words.ops.start = lambda *args: ran.append(1) or start(*args)
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 9, "verify": 1}
    try:
        seen = [(r.sample, len(ran)) for r in md.stream(words, [5], samples=3, **options)]
    finally:
        words.ops.start = start
    assert seen == [(0, n) for n in range(9)] + [(n, 8) for n in (1, 2) for _ in range(9)]


def test_samples_run_in_as_many_slots_as_memory_holds(words, monkeypatch):
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 30, "verify": 4}
    want = md.generate(words, [5], samples=6, **options).samples
    room = sum(words.state.memory.values())
    assert words.state.slots == 6
    used = set()
    for share in (0.7, 0.1):
        words.state = words.state_shape = None
        monkeypatch.setattr(fit, "free_memory", lambda share=share: share * room)
        assert md.generate(words, [5], samples=6, **options).samples == want
        used.add(words.state.slots)
    assert used == {1, 3} or used == {1, 4}


def test_a_trace_tells_of_one_sample_at_a_time(words):
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 9, "verify": 4, "samples": 3}
    want = md.generate(words, [5], **options).samples
    rounds = list(md.stream(words, [5], trace=True, **options))
    assert words.state.slots == 1 and all(r.detail is not None for r in rounds)
    assert [[t for r in rounds if r.sample == n for t in r.tokens] for n in range(3)] == [
        one["tokens"] for one in want
    ]
    costs = [r.detail.stages for r in rounds if r.sample]
    assert costs[0] == {} and "verify" in costs[1]
