"""Stops where every character is a token of its own, and stop ids that change between runs of one engine.

With longer tokens the end of a stop string comes together with what is before it: how much text is kept stays
hidden.
"""

import itertools
import json

import pytest

import minidflash as md
from minidflash.text import StopText
from tests.automaton import VOCAB, build

PROMPT = [9] * 20 + [5]
CHAIN = {5: 20, 9: 20, **{20 + i: 20 + (i + 1) % 30 for i in range(30)}}  # 20 ... 49, again and again
LETTERS = [chr(ord("!") + i) for i in range(VOCAB)]


@pytest.mark.parametrize("stops", [["ab"], ["aab"], ["abab"], ["ba", "aab"], ["abba", "b"], ["a"], ["bbbbb"]])
def test_every_text_of_two_letters(stops):
    """Token by token, against a look at the whole text; empty pieces are tokens that showed nothing yet."""
    for text in map("".join, itertools.product("ab", repeat=7)):
        for gaps in ((), (0,), (3, 4), range(7)):
            stop, pieces = (
                StopText(stops),
                [piece for i, c in enumerate(text) for piece in [""] * (i in gaps) + [c]],
            )
            count = next((n for n, piece in enumerate(pieces) if stop.push(piece)), None)
            ends = [text.find(word) + len(word) for word in stops if word in text]
            assert stop.is_found == bool(ends), (text, gaps)
            if not ends:
                continue
            seen = "".join(pieces[: count + 1])
            assert len(seen) == min(ends), (text, gaps)  # with the letter that completes the first one
            at = min(seen.find(word) for word in stops if word in seen)
            assert stop.kept_chars == at and "".join(pieces[: stop.kept_tokens])[:at] == seen[:at]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target, drafter = build(tmp_path_factory.mktemp("letters"), successor=CHAIN, eos=49)
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    model = {"type": "WordLevel", "vocab": {letter: i for i, letter in enumerate(LETTERS)}, "unk_token": "!"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    whole = {
        "version": "1.0",
        **empty,
        "added_tokens": [],
        "pre_tokenizer": split,
        "decoder": {"type": "Fuse"},
    }
    (target / "tokenizer.json").write_text(json.dumps(whole | {"model": model}))
    config = {"eos_token": LETTERS[49], "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return md.load(str(target), drafter=str(drafter), warm=False)


def facts(result):
    return result.tokens, result.text, result.finish_reason


@pytest.mark.parametrize("length", [1, 2, 3, 9])
@pytest.mark.parametrize("end", [9, 10, 17, 24])
def test_a_stop_string_whose_last_letter_is_a_token(engine, end, length):
    ids = list(range(20, 20 + end))
    stop = "".join(LETTERS[i] for i in ids[-length:])
    kept = ids[: end - length]
    for options in ({"drafter": None}, {"verify": 3}, {"verify": 64}, {"verify": "auto"}):
        result = md.generate(engine, PROMPT, max_tokens=60, stop=["zz", stop], ignore_eos=True, **options)
        assert facts(result) == (kept, "".join(LETTERS[i] for i in kept), "stop"), options


def test_buffers_are_not_used_for_other_stop_ids(engine):
    """One engine, runs that end at its own stop id, at none, at another set, plain and drafted in turn."""
    whole, own = [20 + i % 30 for i in range(40)], engine.stop_ids
    runs = [
        (own, False, 30), (own, True, 40), (own, False, 30), (frozenset([33]), False, 14), (own, False, 30),
        (frozenset([40, 26]), False, 7), (frozenset(), False, 40), (frozenset([33]), True, 40),
        (frozenset([33]), False, 14),
    ]  # fmt: skip
    try:
        for drafts in ([True] * 9, [None] * 9, [True, None] * 5, [None, True] * 5):
            for (engine.stop_ids, ignored, count), drafter in zip(runs, drafts, strict=False):
                options = {"drafter": drafter} | ({"verify": 8} if drafter else {})
                result = md.generate(engine, PROMPT, max_tokens=40, ignore_eos=ignored, **options)
                assert result.tokens == whole[:count], (engine.stop_ids, ignored, drafter)
                assert result.finish_reason == ("length" if count == 40 else "stop")
    finally:
        engine.stop_ids = own
