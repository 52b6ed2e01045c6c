"""The first promise: with a drafter, any drafter, the ids are those of plain decoding,
bit for bit (engine.md 1).

Each case runs a pair with its own and with the replay drafter over blocks, verify widths, prefill chunks,
activation types and backends. bench/lossless.py does the same on the embedded pair at length.
"""

import os
from collections import Counter

import numpy as np
import pytest
from minidflash.kernels.record import EMITTED, TOKENS

import minidflash as md
from minidflash.errors import UserError
from tests.conftest import FULL
from tests.golden_files import golden
from tests.random_pair import write_random
from tests.replay import Replay, check_plan, histogram, proposing

BLOCKS = (1, 2, 4, 8, 16)
WHOLE = 64  # more than any block
WIDTHS = (1, 3, WHOLE, "auto")
GOLDEN = {
    "dflash-qwen3-trained": "qwen3-tiny", "dflash-qwen3-tiny": "qwen3-tiny",
    "dflash-qwen3-swa-tiny": "qwen3-tiny",
    "dflash-llama-tiny": "llama-tiny", "dflash-qwen3-moe-tiny": "qwen3-moe-tiny",
    "dflash-gpt-oss-mxfp4-tiny": "gpt-oss-mxfp4-tiny", "dflash-gemma4-tiny": "gemma4-tiny",
}  # fmt: skip
SLIDING = (["sliding_attention", "full_attention", "sliding_attention"], 9, False)
RANDOM = {
    "odd": {}, "odd-qwen3": {"name": "odd", "family": "qwen3", "dtype": "f32"},
    "grouped": {"name": "grouped"},
    "grouped-sliding": {"name": "grouped", "family": "qwen3", "windows": SLIDING},
}  # fmt: skip


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")


def load(pair, tmp_path, **options):
    """A pair of GOLDEN or RANDOM as an engine."""
    if pair in GOLDEN:
        target, drafter = golden(GOLDEN[pair]), golden(pair)
    else:
        target, drafter = write_random(tmp_path / pair, **RANDOM[pair])
    return md.load(str(target), drafter=str(drafter), **{"ctx": 512, "warm": False, **options})


def prompt_of(engine, length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, engine.target.config.vocab, length).tolist()


def plain(engine, prompt, count):
    result = md.generate(engine, prompt, max_tokens=count, drafter=None)
    assert result.rounds == [] and result.drafter is None
    return result.tokens


def assert_lossless(engine, prompt, known, count, block, verify, propose=None):
    """Generate with a drafter; ids must be the plain ones. Returns the rounds.
    known: the plain run, `count` or more."""
    with proposing(engine, propose or engine.draft):
        rounds = list(md.stream(engine, prompt, max_tokens=count, block=block, verify=verify))
    found = [token for r in rounds for token in r.tokens]
    first = next((i for i, pair in enumerate(zip(found, known, strict=False)) if pair[0] != pair[1]), None)
    where = f"block {block}, verify {verify}, chunk {engine.chunk}"
    assert first is None, f"{where}: token {first} is {found[first]}, plain decoding says {known[first]}"
    assert len(found) == count, f"{where}: {len(found)} tokens, not {count}"
    return rounds


def widths_of(block, blocks, widths, turn):
    """The widest block is verified in all widths; every other one in one of them, by turns, unless
    MINIDFLASH_FULL=1 asks for all."""
    return widths if FULL or block == max(blocks) else [widths[(turn + blocks.index(block)) % len(widths)]]


def sweep(engine, prompt, count, blocks, widths, known=None, turn=0):
    """Own and replay drafter over blocks and verify widths: `count` tokens of whole blocks of the widest, at
    most 48 of all else. Returns accepted lengths of the replay at the widest block."""
    known = known or plain(engine, prompt, count + max(blocks))
    seen = Counter()
    for block in blocks:
        for verify in widths_of(block, blocks, widths, turn):
            is_long = block == max(blocks) and (FULL or verify == WHOLE)
            tokens = count if is_long else min(count, 48)
            assert_lossless(engine, prompt, known, tokens, block, verify)
            replay = Replay(prompt + known, len(prompt), block, engine.target.config.vocab, seed=block)
            rounds = assert_lossless(engine, prompt, known, tokens, block, verify, replay)
            if block > 1:
                check_plan(replay, len(prompt), rounds)
            if block == max(blocks):
                seen += histogram(rounds)
    return seen


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("pair", [*GOLDEN, *RANDOM])
def test_drafted_ids_are_plain_ids(pair, activations, tmp_path):
    engine = load(pair, tmp_path, activations=activations)
    prompt = prompt_of(engine, 37)
    turn = 2 * [*GOLDEN, *RANDOM].index(pair) + (activations == "bf16")
    seen = sweep(engine, prompt, 140, BLOCKS, WIDTHS, turn=turn)
    assert set(seen) == set(range(16)), f"accepted lengths at block 16: {sorted(seen)}"


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("pair", ["odd-qwen3", "dflash-qwen3-swa-tiny"])
def test_prefill_chunks_change_nothing(pair, activations, tmp_path):
    known = None
    for chunk in (1, 7, 16, 64, 1000):
        engine = load(pair, tmp_path, activations=activations, prefill_chunk=chunk)
        prompt = prompt_of(engine, 75)
        ids = plain(engine, prompt, 56)
        known = known or ids
        assert ids == known, f"chunk {chunk} changes plain decoding"
        sweep(engine, prompt, 40, (16,), (3, 64), known)


@pytest.mark.parametrize("length", [100, 120, 127, 128, 129, 250])
def test_contexts_that_cross_chunks_of_keys(length, tmp_path):
    for pair in ("grouped-sliding", "dflash-llama-tiny"):
        engine = load(pair, tmp_path, activations="f32" if length % 2 else "bf16", prefill_chunk=48)
        sweep(engine, prompt_of(engine, length), 24, (4, 16), (3, 64))


@pytest.mark.parametrize("pair", ["dflash-qwen3-trained", "odd", "grouped-sliding"])
@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_the_oracle_keeps_the_promise_too(pair, activations, tmp_path):
    engine = load(pair, tmp_path, activations=activations, backend="oracle", prefill_chunk=5)
    sweep(engine, prompt_of(engine, 11), 20, (2, 8), (3, 64))


def test_numba_and_oracle_agree_on_ids(tmp_path):
    for pair in ("dflash-qwen3-trained", "dflash-llama-tiny"):
        ids = []
        for backend in ("numba", "oracle"):
            engine = load(pair, tmp_path, backend=backend, activations="f32")
            ids.append(plain(engine, prompt_of(engine, 11), 32))
        assert ids[0] == ids[1]


@pytest.mark.parametrize("pair", ["dflash-qwen3-trained", "grouped-sliding"])
def test_drafts_depend_on_the_text_and_not_on_how_rounds_fell(pair, tmp_path):
    """What the drafter says at a position is the same after any history of accepted lengths,
    verify widths and crops."""
    engine = load(pair, tmp_path, activations="f32")
    draft, prompt = engine.draft, prompt_of(engine, 37)
    known = plain(engine, prompt, 140)
    said = {}

    class Watching(Replay):
        """Lets the drafter draft, notes what it said, then replays."""

        def __call__(self, ops, engine, s, drafted_rows):
            draft(ops, engine, s, drafted_rows)

            def note():
                start = int(s.start[0])
                for row in drafted_rows:
                    said.setdefault((start, int(row)), []).append(int(s.drafts.reshape(-1)[row]))

            ops._recording.append(("note", note, ()))
            super().__call__(ops, engine, s, drafted_rows)

    for seed in range(8):
        replay = Watching(prompt + known, len(prompt), 16, engine.target.config.vocab, seed)
        assert_lossless(engine, prompt, known, 120, 16, (64, 5, "auto")[seed % 3], replay)
    differing = {at: ids for at, ids in said.items() if len(set(ids)) > 1}
    assert not differing and sum(len(ids) > 1 for ids in said.values()) > 200
    assert len({ids[0] for ids in said.values()}) > 3  # it does say different things


def test_the_embedded_pair(tmp_path):
    engine = embedded()
    prompts = ["Write a Python function that reverses a string.", "List the first ten multiples of 7.",
               "Tell a short story about a lighthouse."]  # fmt: skip
    seen = Counter()
    ways = [(16, 64, True), (16, "auto", True), (8, 3, True), (4, 64, False)]
    for i, text in enumerate(prompts):
        prompt = ids_of(engine, text)
        known = md.generate(engine, prompt, max_tokens=112, drafter=None, ignore_eos=True).tokens
        some = [ways[i], ways[-1 - i]] if i < 2 else []  # with the replay, each way once
        for block, verify, own in [(16, 64, False), *(ways if FULL else some)]:
            propose = engine.draft
            if not own:
                propose = Replay(prompt + known, len(prompt), block, engine.target.config.vocab, i)
            with proposing(engine, propose):
                options = {"block": block, "verify": verify, "ignore_eos": True}
                rounds = list(md.stream(engine, prompt, max_tokens=96, **options))
            assert [t for r in rounds for t in r.tokens] == known[:96], (text, block, verify)
            if not own:
                check_plan(propose, len(prompt), rounds)
                seen += histogram(rounds) if block == 16 else {}
    assert set(seen) == set(range(16))


def embedded(**options):
    """The default pair; skips in words where its target cannot be had."""
    try:
        return md.load(ctx=512, **options)
    except UserError as error:
        if error.code != 3 or os.environ.get("CI"):
            raise
        pytest.skip(f"the default target cannot be fetched here: {error}")


def ids_of(engine, text):
    from minidflash.request import OPTIONS, prompt_ids

    return prompt_ids(engine, text, OPTIONS)


# ---- broken engines: the tests above must be able to fail --------------------------------------------------


def one_too_many(accept):
    """Accept that also keeps the first wrong draft."""

    def broken(drafts, choice, *rest):
        choice = choice.copy()
        for i in range(len(choice) - 1):
            if drafts[0, i + 1] != choice[i]:
                choice[i] = drafts[0, i + 1]
                break
        accept(drafts, choice, *rest)

    return broken


def not_cropped(accept):
    """Accept after which the caches keep the rejected rows: the next round starts behind them."""

    def broken(drafts, choice, stop, start, *rest):
        before = int(start[0])
        accept(drafts, choice, stop, start, *rest)
        start[0] = before + len(choice)

    return broken


def repeats_the_last(accept):
    """Accept whose anchor is the token before the last one."""

    def broken(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
        accept(drafts, choice, stop, start, anchor, fresh, left, done, record, kept)
        if record[0, EMITTED] > 1:
            anchor[0] = record[0, TOKENS + record[0, EMITTED] - 2]

    return broken


@pytest.mark.parametrize("is_checked", ["0", "1"])
@pytest.mark.parametrize("mistake", [one_too_many, not_cropped, repeats_the_last])
def test_a_broken_loop_is_caught(mistake, is_checked, tmp_path, monkeypatch):
    engine = load("dflash-llama-tiny", tmp_path)
    prompt = prompt_of(engine, 37)
    known = plain(engine, prompt, 80)
    monkeypatch.setenv("MINIDFLASH_CHECK", is_checked)
    broken = load("dflash-llama-tiny", tmp_path)
    broken.ops.backend.accept = mistake(broken.ops.backend.accept)
    replay = Replay(prompt + known, len(prompt), 8, engine.target.config.vocab)
    assert_lossless(engine, prompt, known, 60, 8, 64, replay)
    with pytest.raises(AssertionError):
        assert_lossless(broken, prompt, known, 60, 8, 64, replay)


def test_a_kernel_that_sums_in_another_order_for_one_row_is_caught(tmp_path, monkeypatch):
    """The cause behind most "lossless" engines that fork (F56): plain rows and verified rows round
    differently."""
    engine = load("dflash-llama-tiny", tmp_path, activations="bf16")
    linear_add = engine.ops.backend.linear_add

    def nearly(a, w, *rest):
        linear_add(
            a if len(a) == 1 else a ^ np.uint16(1), w, *rest
        )  # other last bits when rows come together

    engine.ops.backend.linear_add = nearly
    prompt = prompt_of(engine, 37)
    with pytest.raises(AssertionError, match="plain decoding says"):
        for seed in range(3):
            prompt = prompt_of(engine, 37, seed)
            known = plain(engine, prompt, 140)
            replay = Replay(prompt + known, len(prompt), 8, engine.target.config.vocab)
            assert_lossless(engine, prompt, known, 120, 8, 64, replay)
