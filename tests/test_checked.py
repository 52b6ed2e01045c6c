"""MINIDFLASH_CHECK=1: each invariant of the loop (engine.md 2) speaks up for itself,
whatever becomes of the ids."""

import pytest

import minidflash as md
from tests.golden_files import golden

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def after(change):
    """What makes a kernel whose arguments are changed once it has run. change: function of them."""

    def wrap(kernel):
        def broken(*args):
            kernel(*args)
            change(*args)

        return broken

    return wrap


def anchor_before(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    anchor[0] += 1


def start_behind(drafts, choice, stop, start, *rest):
    start[0] += 1


def id_outside(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    record[0, 3] = 10**6


def one_feature_more(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    fresh[0] += 1


def more_than_its_rows(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    record[0, 0] = 9


def rows_shifted(anchor, start, fresh, done, fill, ids, slot, pos, *rest):
    pos += 1


def features_shifted(start, fresh, slot, pos):
    pos[pos > 0] -= 1


MISTAKES = {
    "anchor": ("accept", anchor_before, "is not the last token emitted"),
    "start": ("accept", start_behind, "start .* after"),
    "ids": ("accept", id_outside, "ids outside 0"),
    "fresh": ("accept", one_feature_more, "fresh rows are not start|context features wait"),
    "emitted": ("accept", more_than_its_rows, "emitted 9 tokens"),
    "rows": ("stage", rows_shifted, "target cache rows"),
    "injected": ("stage_context", features_shifted, "drafter rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_invariant_speaks_up(name, monkeypatch):
    kernel, change, words = MISTAKES[name]
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")
    engine = md.load(str(golden("llama-tiny")), drafter=str(golden("dflash-llama-tiny")), warm=False, ctx=128)
    options = {"max_tokens": 12, "verify": 4, "ignore_eos": True}
    assert len(md.generate(engine, PROMPT, **options).tokens) == 12
    backend = engine.ops.backend
    monkeypatch.setattr(backend, kernel, after(change)(getattr(backend, kernel)))
    engine.ops.__dict__.pop(kernel, None)  # looked up again
    engine.programs.clear()
    with pytest.raises(AssertionError, match=words):
        list(md.stream(engine, PROMPT, **options))
