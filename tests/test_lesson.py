"""The pictures that explain a round say what the loop does: beside its own buffers, and drawn anew."""

import importlib
import sys
from pathlib import Path

import numba
import pytest

import minidflash as md
from minidflash import ahead

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def lesson():
    sys.path.insert(0, str(ROOT / "bench"))
    yield importlib.import_module("lesson")
    sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def told(lesson):
    """(pictures, ids of the prompt, its steps, what the device held behind each round, plain decoding's ids).

    No test has the engine itself as an argument: pytest would print all its weights where one fails.
    """
    before, seen = numba.get_num_threads(), []
    numba.set_num_threads(1)  # loading runs rounds too

    def look(engine, s, lane, record, slot, injected):
        start, anchor = (int(engine.ops.download(b)[0]) for b in (s.start, s.anchor))
        rows = engine.ops.download(s.rows.pos)[: len(record.drafts) + 1].tolist()
        stored = [p for p in engine.ops.download(s.context_pos).tolist() if p >= 0]
        seen.append((start, anchor, rows, stored, record))

    engine = md.load(backend="numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "check", look)
        patch.setenv("MINIDFLASH_CHECK", "1")
        ids, steps = lesson.worked(engine)
    plain = md.generate(engine, ids, max_tokens=5, drafter=None, ignore_eos=True).tokens
    yield lesson.pictures(engine), ids, steps, seen, plain
    numba.set_num_threads(before)


def test_the_pictures_are_those_of_this_loop(told):
    for name, text in told[0].items():
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name} is not what is drawn now: python bench/lesson.py"


def test_the_steps_are_the_loop_s_own_buffers(told):
    """start, anchor, target cache rows and injected features of every round, as the device has them."""
    _, ids, steps, seen, _ = told
    assert len(ids) == 4 and len(seen) == len(steps) >= 2
    for number, (step, (start, anchor, rows, stored, record)) in enumerate(zip(steps, seen, strict=True)):
        assert rows == list(range(step.start, step.start + len(rows)))
        assert start == len(step.cached) and anchor == step.tokens[-1]
        # The prompt's features are injected with the prompt's pass, before the first round.
        assert stored == (list(step.features) if number else [])
        assert (step.drafted, step.accepted, step.tokens) == (record.drafts, record.accepted, record.tokens)
    first, second = steps[:2]
    assert (first.start, first.accepted, list(first.features)) == (4, 1, [0, 1, 2, 3])
    assert (second.start, list(first.cached), list(second.features)) == (6, list(range(6)), [4, 5])
    assert second.anchor == first.tokens[-1] != first.drafted[1]


def test_what_is_kept_is_the_target_s_own_text(told):
    """The tokens of the picture are those of plain decoding."""
    _, _, steps, _, plain = told
    assert [steps[0].anchor] + [t for step in steps for t in step.tokens] == plain
