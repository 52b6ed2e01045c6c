"""bench/curve.py: what a closed loop counts, that no text of it goes unread, and the point it makes."""

import json
import sys
from itertools import count
from types import SimpleNamespace

import pytest

from minidflash.stats import Round
from tests import automaton
from tests.models import engine_of, target_of

PAIR = "dflash-qwen3-trained"
PROMPTS = [[5, 9, i] for i in range(5)]


@pytest.fixture
def curve(bench):
    return bench("curve")


@pytest.fixture(scope="module")
def engine():
    return engine_of(target_of(PAIR), PAIR, "numba", "bf16", ctx=256, prefill_chunk=16)


class Scripted:
    """Stands in for a Batch: a text ends behind `length` rounds, all that run have a token in each; a round
    takes ten seconds."""

    def __init__(self, clock, length):
        self.clock, self.length, self.running, self.most, self.asked = clock, length, {}, 0, []

    def submit(self, prompt, max_tokens):
        self.asked.append(prompt)
        self.running[number := len(self.asked)] = 0
        self.most = max(self.most, len(self.running))
        return number

    def __iter__(self):
        while self.running:
            self.clock.now += 10.0
            for handle in list(self.running):
                done = self.running[handle] = self.running[handle] + 1
                verify, end = 4 * (done > 1), "length" if done == self.length else None
                if end:
                    del self.running[handle]
                yield SimpleNamespace(
                    handle=handle, error=None,
                    round=Round([7], verify=verify, seconds=self.clock.now, finish_reason=end),
                )  # fmt: skip


def test_a_place_is_taken_again_at_once_and_the_clock_stops_when_one_stays_free(curve, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(curve, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    batch = Scripted(clock, length=3)
    run = curve.closed_loop(batch, ["a", "b"], concurrency=2, requests=5, tokens=3)
    assert batch.most == 2 and batch.asked == ["a", "b", "a", "b", "a"]
    # Rounds 1 to 3, then 4 to 6 with the next two; the fifth text runs alone, unclocked.
    assert (run.seconds, run.tokens) == (60.0, 12)
    assert run.passes == {(4, 2): 4, (4, 1): 2}
    assert [user.speed for user in run.users] == [0.1] * 5
    assert [user.first - user.asked for user in run.users] == [10.0] * 5


def test_every_width_gives_the_texts_alone_and_says_what_it_did(curve, engine):
    results = curve.alone(engine, PROMPTS, 20)
    found = curve.points(engine, PROMPTS, results, 3, ["1", "4", "auto"], 20, 9, repeat=2)
    assert [one["width"] for one in found] == ["1", "4", "auto"]
    assert [(one["texts"], one["differing"]) for one in found] == [(18, 0)] * 3
    plain, fixed, auto = found
    assert {one["plain_tokens_per_s"] for one in found} == {plain["tokens_per_s"]}
    assert plain["tau"] == 1 and set(plain["passes_by_width"]) == {"1"}
    assert set(fixed["passes_by_width"]) == {"4"} and fixed["tau"] > 1
    assert set(auto["passes_by_width"]) <= {"1", "4", "8", "16"}
    for one in found:
        assert sum(one["passes_by_width"].values()) == one["passes"]
        assert 1 < one["lanes"] <= 3 and len(one["runs_tokens_per_s"]) == 2
        assert 0 < one["slowest_user_tokens_per_s"] <= one["user_tokens_per_s"]
        assert 0 < one["first_token_ms"] <= one["slowest_first_token_ms"]
    assert plain["rows_a_pass"] == plain["lanes"] and fixed["rows_a_pass"] == pytest.approx(
        4 * fixed["lanes"], abs=0.05
    )


def test_a_text_that_differs_is_counted(curve, engine):
    results = curve.alone(engine, PROMPTS, 8)
    results[1].tokens[-1] += 1  # of five prompts the second, which two of eight requests have
    (found,) = curve.points(engine, PROMPTS, results, 2, ["4"], 8, 8)
    assert found["differing"] == 2


def test_drafts_are_right_as_often_as_asked_for(curve, engine):
    """And cost what the drafter costs: it runs."""
    drafts, draft = count(), engine.draft

    def counted(*args):
        next(drafts)
        return draft(*args)

    engine.draft = counted
    try:
        for chance, least, most in ((0.0, 1.0, 1.0), (0.9, 2.5, 4.0)):
            with curve.made_right(engine, PROMPTS[0], 40, chance):
                results = curve.alone(engine, PROMPTS[:1], 40)
                (found,) = curve.points(engine, PROMPTS[:1], results, 2, ["4"], 40, 4)
            assert found["differing"] == 0 and least <= found["tau"] <= most
    finally:
        engine.draft = draft
    assert next(drafts) > 1


def test_kinds_come_by_turns(curve):
    prompts = [{"kind": kind, "n": n} for kind, most in (("a", 3), ("b", 1), ("c", 2)) for n in range(most)]
    told = [one["kind"] + str(one["n"]) for one in curve.by_turns(prompts)]
    assert told == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_a_run_writes_its_points_and_fails_where_texts_differ(curve, monkeypatch, tmp_path, capsys):
    target, drafter = automaton.build(tmp_path, "FX-B")
    monkeypatch.setenv("OUT", str(tmp_path))
    prompts = [{"kind": "a", "tokens": [9]}, {"kind": "b", "tokens": [5, 20]}]
    monkeypatch.setattr(curve, "read_prompts", lambda: prompts)
    words = ["--target", target, "--drafter", drafter, "--concurrency", 1, 2, "--widths", 1, 4, "--tokens", 6]
    monkeypatch.setattr(sys, "argv", ["bench/curve.py", *map(str, words), "--requests", "3", "--name", "few"])
    assert curve.main() == 0
    found = json.loads((tmp_path / "few.json").read_text())
    at = [(one["width"], one["concurrency"]) for one in found["points"]]
    assert at == [("1", 1), ("4", 1), ("1", 2), ("4", 2)]
    assert (found["texts"], found["differing"]) == (18, 0) and found["settings"]["max_tokens"] == 6
    assert (
        found["pair"] == str(target)
        and found["backend"] == "numba"
        and found["commit"]
        and found["on"]
        and found["versions"]["numba"]
    )
    monkeypatch.setattr(curve, "alone", lambda *_: [SimpleNamespace(tokens=[1], prompt_tokens=2)] * 2)
    assert curve.main() == 1
    assert json.loads((tmp_path / "few.json").read_text())["differing"] == 18
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["bench/curve.py", "--accept", "0.5"])
        curve.main()
    assert "--accept is a chance below 1, and for --shape" in capsys.readouterr().err
