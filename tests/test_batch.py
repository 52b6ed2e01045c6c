"""Batch: whatever runs beside it, joins, leaves or breaks, a request's text is what it gets alone."""

from functools import lru_cache
from itertools import cycle

import numpy as np
import pytest

import minidflash as md
from minidflash import kept, target
from minidflash.errors import UserError
from minidflash.schedule import widths
from tests.conftest import FULL, parameters
from tests.models import engine_of, target_of

DENSE, EXPERTS, RINGS = "dflash-qwen3-trained", "dflash-qwen3-moe-tiny", "dflash-gpt-oss-mxfp4-tiny"
pytestmark = pytest.mark.usefixtures("one_thread")
CTX = 96
TOKENS = {"numba": (1, 24), "emulate": (3, 6), "cuda": (1, 40)}  # new ones: from, below


def engine_for(backend, activations, pair):
    """A golden pair, whose prompts run in chunks of 16."""
    return engine_of(target_of(pair), pair, backend, activations, ctx=256, prefill_chunk=16)


@lru_cache
def requests(backend, activations, pair, count):
    """(prompt, options, what it gives alone) of requests that differ in all they may."""
    engine, rng, found = engine_for(backend, activations, pair), np.random.default_rng(11), []

    def some(least, most):
        return rng.integers(0, engine.target.config.vocab, int(rng.integers(least, most))).tolist()

    stems = some(8, 20), some(8, 20), []  # that prompts share
    for i in range(count):
        stem = stems[i // 8]
        prompt = stem + some(2, 30 - len(stem))
        options = {"max_tokens": int(rng.integers(*TOKENS[backend]))}
        if i % 3:
            options |= {"temperature": 0.4 + 0.3 * (i % 4), "seed": int(rng.integers(2**63)), "top_k": i % 5}
        if i % 4 == 1:
            options["logprobs"] = True
        if i % 5 == 2:
            options["ignore_eos"] = True
        found.append((prompt, options, told(md.generate(engine, prompt, verify=4, **options))))
    return found


def told(result):
    return result.tokens, result.finish_reason, result.logprobs


@pytest.fixture
def stopping(monkeypatch):
    """pair -> its engine, which from now on stops at some ids that are often chosen."""
    changed = []
    monkeypatch.setattr(kept, "LEAST", 4)  # prompts are short

    def with_stops(backend, activations, pair):
        engine = engine_for(backend, activations, pair)
        changed.append((engine, engine.stop_ids))
        monkeypatch.setattr(engine.ops, "chunk_between_rounds", 11)  # parts of prompts share passes
        engine.stop_ids = frozenset(range(0, engine.target.config.vocab, 9))
        return engine

    yield with_stops
    for engine, stop_ids in reversed(changed):
        engine.stop_ids = stop_ids


def gather(batch, found, rounds=None):
    """Iterate to the end, or for so many items; found: handle -> its items."""
    for number, one in enumerate(batch, 1):
        found.setdefault(one.handle, []).append(one)
        if number == rounds:
            return


def answer(items):
    """As `told`, of the items of one request."""
    rounds = [one.round for one in items]
    logprobs = [pair for r in rounds for pair in r.logprobs or []] or None
    return [token for r in rounds for token in r.tokens], rounds[-1].finish_reason, logprobs


CASES = [(DENSE, 1, 24), (DENSE, 3, 24), (DENSE, 8, 24), (DENSE, 16, 24), (RINGS, 3, 12), (EXPERTS, 8, 24)]


@pytest.mark.parametrize("activations", ["f32", "bf16"] if FULL else ["bf16"])
@pytest.mark.parametrize("pair, slots, count", CASES)
def test_texts_are_those_alone(pair, slots, count, activations, stopping):
    play("numba", activations, pair, slots, count, stopping)


@pytest.mark.parametrize("ahead", [1, 2])
def test_texts_do_not_depend_on_rounds_started_ahead(ahead, stopping, monkeypatch):
    """Nor on requests that join, leave and move behind a round that is under way."""
    engine = stopping("numba", "bf16", DENSE)
    requests("numba", "bf16", DENSE, 24)  # alone, as they are
    monkeypatch.setattr(engine.ops, "rounds_ahead", ahead)
    play("numba", "bf16", DENSE, 4, 24, stopping)


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
def test_texts_are_those_alone_on_a_card(ops, stopping):
    count = 24 if FULL or ops.name == "cuda" else 5
    play(ops.name, ops.activations, DENSE, 3, count, stopping)


class AnyWidth:
    """Stands in for the batch's SharedWidth, which would follow the clock: widths in any order."""

    def __init__(self, block):
        self._widths, self._rng = widths(block), np.random.default_rng(block)

    def choose(self, lanes, schedules):
        return int(self._rng.choice([1, *self._widths]))

    def begin(self, *_):
        pass

    learn = begin


def play(backend, activations, pair, slots, count, stopping):
    """Requests join at random rounds, some are cancelled at random ones."""
    engine = stopping(backend, activations, pair)
    wanted, rng = requests(backend, activations, pair, count), np.random.default_rng(slots)
    found, handles, cancelled = {}, [], set()
    verify = 4 if backend == "emulate" else "auto"
    with md.Batch(engine, slots=slots, ctx=CTX, verify=verify) as batch:
        batch._width = AnyWidth(batch.block)
        for number, (prompt, options, _) in enumerate(wanted):
            handles.append(batch.submit(prompt, **options))
            if number % 6 == 5:
                cancelled.add(handles[number - int(rng.integers(3))])
                batch.cancel(handles[number])
                cancelled.add(handles[number])
                for handle in cancelled:
                    batch.cancel(handle)
            if rng.random() < 0.4:
                gather(batch, found, rounds=int(rng.integers(1, 6)))
        gather(batch, found)
        assert not engine.is_busy
        assert max(lanes for how, lanes, *_ in engine.programs if how != "prompt") >= min(slots, 8), (
            "they did not meet"
        )
    for handle, (_, _, alone) in zip(handles, wanted, strict=True):
        if handle not in cancelled:
            assert answer(found[handle]) == alone
        else:
            given = answer(found[handle])[0] if handle in found else []
            assert given == alone[0][: len(given)]
    assert count < 12 or any(handle.reused_tokens for handle in handles)
    reasons = {alone[1] for _, _, alone in wanted}
    assert backend == "emulate" or reasons == {"stop", "length"}


def poison(ops, batch, slot):
    """All keys and values of a slot become NaN."""
    s = batch._state
    for cache in [*s.caches, *s.drafter_caches]:
        for buffer in (cache.k, cache.v):
            values = ops.download(buffer[slot : slot + 1])
            nan = 0x7FC0 if values.dtype == np.uint16 else np.nan
            ops.upload(buffer[slot : slot + 1], np.full_like(values, nan))


@pytest.mark.parametrize("ops", parameters(["numba", "emulate", "cuda"], ["bf16"]), indirect=True)
def test_a_poisoned_neighbour_changes_nobody_and_its_slot_is_clean_afterwards(ops):
    engine, rng = engine_for(ops.name, ops.activations, DENSE), np.random.default_rng(2)
    prompts = [rng.integers(0, 384, 20).tolist() for _ in range(3)]
    alone = [md.generate(engine, prompt, max_tokens=8).tokens for prompt in prompts]
    found = {}
    with md.Batch(engine, slots=4, ctx=CTX, verify=4) as batch:
        first, bad, last = [batch.submit(p, max_tokens=n) for p, n in zip(prompts, (8, 40, 8), strict=True)]
        while not {first, bad, last} <= set(found):
            gather(batch, found, rounds=1)
        for slot in (1, 3):  # that of `bad`, and one that nobody has used
            poison(ops, batch, slot)
        again = batch.submit(prompts[1], max_tokens=8), batch.submit(prompts[2], max_tokens=8)
        gather(batch, found)
    assert [answer(found[one])[0] for one in (first, last, *again)] == [alone[i] for i in (0, 2, 1, 2)]
    assert found[bad][-1].round.finish_reason == "error"
    assert "not finite" in str(found[bad][-1].error)
    assert answer(found[bad])[0] == alone[1][: len(answer(found[bad])[0])]


@pytest.mark.parametrize("apart", [0, 7])
def test_drafts_are_those_alone(apart):
    """Features that wait survive the prompts of others, and rounds that let them wait: what is drafted behind
    a text is what is drafted there alone."""
    engine, rng = engine_for("numba", "bf16", DENSE), np.random.default_rng(6)
    prompts = [rng.integers(0, 384, int(n)).tolist() for n in rng.integers(2, 50, 8)]
    budgets = [40 - apart * (i % 3) for i in range(8)]  # texts that begin together end so far apart
    asked = list(zip(prompts, budgets, strict=True))
    alone = [drafts_at(md.stream(engine, p, max_tokens=n, verify=4)) for p, n in asked]
    with md.Batch(engine, slots=3, ctx=CTX) as batch:
        plan = cycle([4, 4, 1, 4, *[1] * 18, 4, 4])
        batch._width = AnyWidth(batch.block)
        batch._width.choose = lambda *_: next(plan)
        found, handles = {}, [batch.submit(p, max_tokens=n) for p, n in asked]
        gather(batch, found)
    seen = 0
    for handle, known in zip(handles, alone, strict=True):
        for at, drafts in drafts_at(one.round for one in found[handle]).items():
            seen += at in known
            assert drafts == known.get(at, drafts)
    assert seen > 20


def drafts_at(rounds):
    """Tokens before a round -> what was drafted behind them."""
    found, count = {}, 0
    for one in rounds:
        if one.drafted:
            found[count] = one.drafted
        count += len(one.tokens)
    return found


def test_a_lane_without_a_text_has_no_row_of_its_own():
    """Nor a slot that makes the round longer: lanes move into free ones."""
    engine = engine_for("numba", "bf16", DENSE)
    with md.Batch(engine, slots=8, ctx=CTX, verify=4) as batch:
        handles, found = [batch.submit([5, i], max_tokens=60) for i in range(5)], {}
        while len(found) < 5:
            gather(batch, found, rounds=1)
        rows = batch._state.rows.pos[:32].reshape(8, 4)  # of the first round of eight slots
        assert (rows[5:] == -1).all() and (rows[:5] > 0).all()
        handles += [batch.submit([5, i], max_tokens=60) for i in (5, 6)]
        while len(found) < 7:
            gather(batch, found, rounds=1)
        batch.cancel(handles[1])
        gather(batch, found, rounds=8)
        assert (rows[[1, 7]] == -1).all() and (rows[[0, 2, 3, 4, 5, 6]] > 0).all()
        batch.cancel(handles[2]), batch.cancel(handles[3])
        gather(batch, found, rounds=8)
        assert (rows[:4] > 0).all() and sorted(lane.slot for lane in batch._ahead.lanes) == [0, 1, 2, 3]
        rows[:] = -2
        batch.cancel(handles[6])  # which moved
        gather(batch, found, rounds=5)
        assert (rows[4:] == -2).all()
        assert sorted((rows[:4] == -1).all(1).tolist()) == [False, False, False, True]


def test_a_prompt_runs_a_chunk_at_a_time_while_others_decode():
    engine = engine_for("numba", "bf16", DENSE)
    prompt = np.random.default_rng(4).integers(0, 384, 80).tolist()
    with md.Batch(engine, slots=2, ctx=CTX, drafter=False) as batch:
        decoding, found = batch.submit([5, 9], max_tokens=60), {}
        gather(batch, found, rounds=2)
        joining = batch.submit(prompt, max_tokens=3)
        later = batch.submit([7], max_tokens=2)
        order = [one.handle for one in batch]
    assert order.index(joining) == 4, "five chunks of 16, four rounds between them"
    assert order.index(later) > order.index(joining)
    assert order.count(decoding) == 58 and order.count(joining) == 3


def test_a_prompt_runs_in_shorter_chunks_while_others_decode(monkeypatch):
    """Of a card; it may begin with a longer one, and the text is the same."""
    engine = engine_for("numba", "bf16", DENSE)
    monkeypatch.setattr(engine.ops, "chunk_between_rounds", 8)
    prompt, passes = np.random.default_rng(4).integers(0, 384, 60).tolist(), []
    alone = md.generate(engine, prompt, max_tokens=3, drafter=False).tokens
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda ops, model, s, rows, *args:
        (passes.append(len(rows.ids)), forward(ops, model, s, rows, *args))[1],
    )  # fmt: skip
    with md.Batch(engine, slots=2, ctx=CTX, drafter=False) as batch:
        first = batch.submit(prompt[29::-1], max_tokens=20)
        joining = batch.submit(prompt, max_tokens=3)
        found = [(one.handle, one.round.tokens) for one in batch]
    long = [count for count in passes if count > 2]  # of prompts, not of rounds
    assert long == [16, 16, *[8] * 7], "nobody decodes until the first prompt has run"
    assert [token for handle, tokens in found if handle is joining for token in tokens] == alone
    assert sum(handle is first for handle, _ in found) == 20


def test_several_prompts_share_a_pass():
    """As many tokens of the oldest ones as a chunk has room for; texts and first tokens are what they are
    alone."""
    engine = engine_for("numba", "bf16", DENSE)
    prompts = [[7 + i] * count for i, count in enumerate((8, 3, 8, 9, 4))]
    drawn = {"temperature": 5.0, "seed": 3}
    options = [{}, drawn, drawn | {"logprobs": True}, {}, {"logprobs": True}]
    asked = [one | {"max_tokens": 3} for one in options]
    alone = [list(md.stream(engine, p, drafter=False, **how)) for p, how in zip(prompts, asked, strict=True)]
    with md.Batch(engine, slots=6, ctx=CTX, drafter=False) as batch:
        decoding, found = batch.submit([5, 9], max_tokens=60), {}
        gather(batch, found, rounds=2)
        joining = [batch.submit(p, **how) for p, how in zip(prompts, asked, strict=True)]
        items = list(batch)
    order = [one.handle for one in items]
    when = [order[: order.index(one)].count(decoding) for one in joining]
    assert when == [0, 0, 1, 1, 1], "16 tokens of 8, 3 and 8, then the other 3, 9 and 4"
    for own, want in zip(joining, alone, strict=True):
        rounds = [one.round for one in items if one.handle is own]
        assert [(one.tokens, one.logprobs) for one in rounds] == [(one.tokens, one.logprobs) for one in want]


def test_joining_and_leaving_record_nothing_new():
    engine = engine_for("numba", "bf16", DENSE)
    with md.Batch(engine, slots=3, ctx=CTX, verify=4) as batch:
        found = []
        for _ in range(2):
            for count in (3, 9, 5, 12, 4):
                batch.submit([5, 9, count], max_tokens=count)
            assert all(one.error is None for one in batch)
            found.append(set(engine.programs))
    assert found[0] == found[1] and {kind[1] for kind in found[0]} <= {1, 2, 3}


def test_what_a_batch_refuses_is_named():
    engine = engine_for("numba", "bf16", DENSE)
    batch = md.Batch(engine, slots=2, ctx=32)
    for options, words in (
        ({"temperature": 1.0, "accept": "reject", "verify": 4}, "verify belongs to the whole batch"),
        ({"temperature": 1.0, "accept": "reject"}, "accept='reject' cannot run in a batch"),
        ({"temperature": 1.0, "samples": 2}, "one answer"),
        ({"trace": True}, "no trace"),
        ({"block": 4}, "block belongs to the whole batch"),
        ({"max_tokens": 40}, "43 positions, 32 are there"),
    ):
        with pytest.raises(UserError, match=words) as refusal:
            batch.submit([5, 9, 9], **options)
        assert refusal.value.hint
    with pytest.raises(TypeError, match="unknown keyword 'tokens'"):
        batch.submit([5], tokens=3)
    with pytest.raises(UserError, match="slots is 0, need a whole number from 1 to 64"):
        md.Batch(engine, slots=0)
    with pytest.raises(UserError, match="ctx is 300, need a whole number from 1 to 256"):
        md.Batch(engine, slots=2, ctx=300)
    assert list(batch) == []


def test_the_engine_is_busy_while_a_batch_runs_and_free_again():
    engine = engine_for("numba", "bf16", DENSE)
    with md.Batch(engine, slots=2, ctx=CTX) as batch:
        some, none = (batch.submit([5, 9], max_tokens=count) for count in (9, 0))
        assert {next(batch).handle, next(batch).handle} == {some, none}
        with pytest.raises(UserError, match="generating already"):
            md.generate(engine, [5, 9])
    assert not engine.is_busy and list(batch) == []
    assert len(md.generate(engine, [5, 9], max_tokens=3).tokens) == 3
    one = batch.submit([5, 9], max_tokens=0)
    assert [(item.handle, item.round.tokens, item.round.finish_reason) for item in batch] == [
        (one, [], "length")
    ]


def test_an_interruption_ends_all_requests():
    engine = engine_for("numba", "bf16", DENSE)
    with md.Batch(engine, slots=2, ctx=CTX, verify=1) as batch:
        handles, found = [batch.submit([5, i], max_tokens=50) for i in range(4)], {}
        gather(batch, found, rounds=4)
        engine.is_interrupted = True
        gather(batch, found)
    assert [found[one][-1].round.finish_reason for one in handles] == ["interrupted"] * 4
    assert not engine.is_busy
