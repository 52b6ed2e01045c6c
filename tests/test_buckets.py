"""Rounds recorded for a context (a graph whose attention has no blocks behind it), across its end.

On the emulator, with the replay drafter: many accepted lengths happen near the border, and plain text is what
must come out.
"""

from contextlib import contextmanager

import numpy as np
import pytest
from minidflash.kernels.gpu.attend_fast import LEAF
from minidflash.kernels.host import Replay as Calls

import minidflash as md
from tests.conftest import FULL, open_or_skip
from tests.random_pair import write_random
from tests.replay import Replay, check_plan, histogram, proposing

BORDER, BLOCK, TOKENS = LEAF, 8, 34


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    open_or_skip("emulate", "bf16")
    target, drafter = write_random(tmp_path_factory.mktemp("pair"), "fast")
    return md.load(
        str(target), drafter=str(drafter), backend="emulate", activations="bf16", ctx=512, warm=False
    )


@contextmanager
def buckets(engine, *sizes):
    """Programs are recorded for these contexts: the backend knows its bucket while they run,
    as in a capture."""
    backend, asked = engine.ops.backend, []

    def compile(calls, bucket=None):
        program = Calls(backend.in_order, calls)

        class Bucketed:
            @staticmethod
            def launch():
                backend.bucket = bucket
                asked.append(bucket)
                try:
                    program.launch()
                finally:
                    backend.bucket = None

        return Bucketed

    engine.programs.clear()
    backend.buckets, backend.compile = sizes, compile
    try:
        yield asked
    finally:
        del backend.buckets, backend.compile
        engine.programs.clear()


@pytest.mark.parametrize("ahead", [0, 2], ids=["alone", "ahead"])
@pytest.mark.parametrize("before", [12, 21, 30] if FULL else [12])
def test_replayed_rounds_across_a_border(engine, before, ahead, monkeypatch):
    """The prompt ends `before` keys short of it. ahead: rounds that are started early."""
    prompt = np.random.default_rng(before).integers(0, 83, BORDER - before).tolist()
    known = md.generate(engine, prompt, max_tokens=TOKENS + BLOCK, drafter=None).tokens
    assert engine.ops.backend.variants["attend"] == "fast"
    monkeypatch.setattr(engine.ops, "rounds_ahead", ahead)
    seen = set()
    with buckets(engine, BORDER, 2 * BORDER) as asked:
        assert md.generate(engine, prompt, max_tokens=TOKENS, drafter=None).tokens == known[:TOKENS]
        for seed in range(2):
            replay = Replay(prompt + known, len(prompt), BLOCK, 83, seed)
            with proposing(engine, replay):
                rounds = list(md.stream(engine, prompt, max_tokens=TOKENS, block=BLOCK, verify=BLOCK))
            assert [token for r in rounds for token in r.tokens] == known[:TOKENS], seed
            check_plan(replay, len(prompt), rounds)
            seen |= set(histogram(rounds))
        assert set(asked) == {BORDER, 2 * BORDER} and len(seen) > 4
