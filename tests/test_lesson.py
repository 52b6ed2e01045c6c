"""The pictures that explain a round say what the loop does: beside its own buffers, and drawn anew."""

import importlib
import sys
from pathlib import Path

import pytest

import minidflash as md
from minidflash import loop

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def lesson():
    sys.path.insert(0, str(ROOT / "bench"))
    yield importlib.import_module("lesson")
    sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def engine():
    return md.load(backend="numba")


def test_the_pictures_are_those_of_this_loop(lesson, engine):
    for name, text in lesson.pictures(engine).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: python bench/lesson.py"


def test_the_steps_are_the_loop_s_own_buffers(lesson, engine, monkeypatch):
    """start, anchor, target cache rows and injected features of every round, as the device has them."""
    seen = []

    def look(engine, s, request, record, committed, injected):
        start, anchor = (int(engine.ops.download(b)[0]) for b in (s.start, s.anchor))
        rows = engine.ops.download(s.rows.pos)[: len(record.drafts) + 1].tolist()
        stored = [p for p in engine.ops.download(s.context_pos).tolist() if p >= 0]
        seen.append((start, anchor, rows, stored, record))

    monkeypatch.setattr(loop, "check", look)
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")
    ids, steps = lesson.worked(engine)
    assert len(ids) == lesson.BLOCK == 4 and len(seen) == len(steps) >= 2
    for step, (start, anchor, rows, stored, record) in zip(steps, seen, strict=True):
        assert rows == list(range(step.start, step.start + len(rows)))
        assert start == len(step.cached) and anchor == step.tokens[-1]
        assert stored == list(step.features)
        assert (step.drafted, step.accepted, step.tokens) == (record.drafts, record.accepted, record.tokens)
    first, second = steps[:2]
    assert (first.start, first.accepted, list(first.features)) == (4, 1, [0, 1, 2, 3])
    assert (second.start, list(first.cached), list(second.features)) == (6, list(range(6)), [4, 5])
    assert second.anchor == first.tokens[-1] != first.drafted[1]


def test_what_is_kept_is_the_target_s_own_text(lesson, engine):
    """The tokens of the picture are those of plain decoding."""
    ids, steps = lesson.worked(engine)
    plain = md.generate(engine, ids, max_tokens=5, drafter=None, ignore_eos=True).tokens
    assert [steps[0].anchor] + [t for step in steps for t in step.tokens] == plain
