"""Rounds that are started before the one ahead of them has been read:
the GPU's case, here with numba's rounds run early.

What is emitted, and what every `Round` says, must not depend on it; every started round's result is asked
for, since its copies must have ended before their memory is another's.
"""

import pytest

import minidflash as md
from tests.models import engine_of

PAIR = "qwen3-tiny", "dflash-qwen3-trained", "numba", "f32"
PROMPT = [5, 9, 17, 3, 70, 41]


@pytest.fixture
def engine(monkeypatch):
    """An engine whose `ahead(n)` lets n rounds be started early; `open` counts results not asked for."""
    monkeypatch.delenv("MINIDFLASH_CHECK", raising=False)
    found, start = engine_of(*PAIR), engine_of(*PAIR).ops.start
    found.open = found.started = 0

    def counted(program, *buffers):
        result = start(program, *buffers)
        found.open, found.started = found.open + 1, found.started + 1

        def wait():
            found.open -= 1
            return result()

        return wait

    monkeypatch.setattr(found.ops, "start", counted)
    found.ahead = lambda count: monkeypatch.setattr(found.ops, "rounds_ahead", count)
    return found


def told(engine, **options):
    """What a run says, but for its times."""
    rounds = list(md.stream(engine, PROMPT, **options))
    assert engine.open == 0, "a round's result was never asked for"
    return [
        (r.tokens, r.drafted, r.accepted, r.verify, r.finish_reason, r.sample, r.logprobs) for r in rounds
    ]


CASES = {
    "block 16": {"verify": 64}, "verify 3": {"verify": 3}, "plain": {"drafter": None},
    "verify 1": {"verify": 1},
    "sampled": {"temperature": 0.8, "seed": 4, "samples": 2, "logprobs": True, "verify": 5},
    "short": {"verify": 64, "max_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_does_not_depend_on_it(engine, case):
    options = {"max_tokens": 70, **CASES[case]}
    engine.ahead(0)
    want, needed = told(engine, **options), engine.started
    for count in (1, 3):
        engine.ahead(count)
        engine.started = 0
        assert told(engine, **options) == want, f"{count} ahead"
        assert needed <= engine.started <= needed + count * options.get("samples", 1)


def test_a_stop_inside_a_round_drops_what_was_started_after_it(engine):
    engine.ahead(0)
    ids = [i for tokens, *_ in told(engine, max_tokens=40, verify=64) for i in tokens]
    stop = engine.stop_ids
    engine.stop_ids = frozenset([ids[20]])
    try:
        want = told(engine, max_tokens=40, verify=64)
        engine.ahead(2)
        assert told(engine, max_tokens=40, verify=64) == want
    finally:
        engine.stop_ids = stop
    assert want[-1][4] == "stop"


def test_programs_are_recorded_for_contexts(engine, monkeypatch):
    """A round's program may be of a bucket only if it holds all keys that the round's rows see."""
    engine.ahead(1)
    want, recorded, plain = told(engine, max_tokens=90, verify=64), [], engine.ops.program
    monkeypatch.setattr(type(engine.ops.backend), "buckets", (40, 64))
    monkeypatch.setattr(engine, "programs", {})

    def noted(fn, bucket=None, is_timed=False):
        program = plain(fn, bucket, is_timed)

        class Checked:
            clock = program.clock

            @staticmethod
            def launch():
                program.launch()
                last = int(engine.ops.download(engine.state.rows.end)[:16].max())
                assert bucket is None or last <= bucket, f"{last} keys in a program for {bucket}"

        recorded.append(bucket)
        return Checked

    monkeypatch.setattr(engine.ops, "program", noted)
    assert told(engine, max_tokens=90, verify=64) == want
    assert recorded == [40, 64, None]


def test_auto_gives_the_same_ids(engine):
    engine.ahead(0)
    want = [i for tokens, *_ in told(engine, max_tokens=90) for i in tokens]
    engine.ahead(2)
    assert [i for tokens, *_ in told(engine, max_tokens=90) for i in tokens] == want


def test_a_closed_stream_waits_for_what_it_started(engine):
    engine.ahead(2)
    rounds = md.stream(engine, PROMPT, max_tokens=60, verify=64)
    next(rounds), next(rounds)
    assert engine.open > 0
    rounds.close()
    assert engine.open == 0
    assert told(engine, max_tokens=20, verify=64)
