"""Slots of a batch lend their rows: a prompt that begins alike runs only what is new, and its text is what it
gets alone."""

import numpy as np
import pytest
from minidflash.kernels.record import STOPPED

import minidflash as md
from minidflash import batch as batch_module
from minidflash import kept
from minidflash.loop import begin_prompt
from minidflash.prefix import alike
from tests.conftest import parameters
from tests.models import engine_of, target_of
from tests.test_batch import CTX, DENSE, RINGS, answer, engine_for, gather, poison

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_rows_are_worth_a_copy(monkeypatch):
    monkeypatch.setattr(kept, "LEAST", 4)


def some(count, seed):
    """A prompt of so many ids."""
    return np.random.default_rng(seed).integers(0, 384, count).tolist()


def ask(batch, prompt, **options):
    """A request run to its end with nobody beside it. Returns (tokens, rows reused)."""
    handle, found = batch.submit(prompt, **options), {}
    gather(batch, found)
    assert handle.reused_tokens + handle.request.rows_run == len(prompt)
    return answer(found[handle])[0], handle.reused_tokens


def second(engine, pair=DENSE):
    """Another engine of the pair: one that generates gives up what a batch keeps."""
    return engine_of(
        target_of(pair), pair, engine.ops.name, engine.ops.activations, ctx=384, prefill_chunk=16
    )


def alone(engine, prompt, pair=DENSE, **options):
    return md.generate(second(engine, pair), prompt, verify=4, **options).tokens


@pytest.mark.parametrize("ops", parameters(["numba", "emulate", "cuda"], ["bf16"]), indirect=True)
def test_two_conversations_take_turns(ops):
    """On the CPU all rows of the turn before are reused but some at its end; on a GPU those of its prompt."""
    engine = engine_for(ops.name, ops.activations, DENSE)
    is_alike = engine.ops.for_prefill is engine.ops
    said = [some(20, seed) for seed in (1, 2)]
    with md.Batch(engine, slots=3, ctx=CTX, verify=4) as batch:
        for turn in range(3 if ops.name == "numba" else 2):
            for own in said:
                before = len(own)
                reply, reused = ask(batch, own, max_tokens=6)
                assert reply == alone(engine, own, max_tokens=6)
                if turn:
                    known = before - 3  # the new message
                    assert known - 6 - (batch.block if is_alike else 1) < reused < before
                    assert is_alike or reused == known - 6
                else:
                    assert reused == 0
                own += [*reply, *some(3, 10 + turn)]


def test_who_asked_longest_ago_is_forgotten_first():
    engine = engine_for("numba", "bf16", DENSE)
    first, *others = (some(30, seed) for seed in range(5))
    with md.Batch(engine, slots=4, ctx=CTX, verify=4) as batch:
        for prompt in (first, *others[:3]):
            assert ask(batch, prompt, max_tokens=4) == (alone(engine, prompt, max_tokens=4), 0)
        assert ask(batch, [*first, 7], max_tokens=4)[1] >= 30, "of four slots, the fourth keeps it"
        for prompt in others[1:]:
            ask(batch, prompt, max_tokens=4)
        assert ask(batch, [*first, 9], max_tokens=4)[1] >= 30
        lost = [*others[0], 7]
        assert ask(batch, lost, max_tokens=4) == (alone(engine, lost, max_tokens=4), 0)


def test_who_goes_on_from_a_prompt_takes_its_place():
    """A reply that is asked for again, or left out of the next prompt, is kept no longer than its prompt."""
    engine, other, prompt = engine_for("numba", "bf16", DENSE), some(30, 1), some(30, 2)
    with md.Batch(engine, slots=2, ctx=CTX, verify=4) as batch:
        ask(batch, other, max_tokens=4)
        ask(batch, prompt, max_tokens=30)
        for again in (prompt, [*prompt, *some(10, 3)]):
            assert ask(batch, again, max_tokens=30)[1] >= 29
        assert ask(batch, [*other, 7], max_tokens=4)[1] == 30, "of two slots, the second keeps it"


def test_a_text_that_moves_leaves_what_was_kept_there():
    engine = engine_for("numba", "bf16", DENSE)
    short, long = some(30, 1), some(20, 2)
    with md.Batch(engine, slots=4, ctx=CTX, verify=4) as batch:
        _, two, found = batch.submit(short, max_tokens=2), batch.submit(long, max_tokens=40), {}
        while not batch._running or [lane.slot for lane in batch._running] != [0]:
            gather(batch, found, rounds=1)
        gather(batch, found)
        assert answer(found[two])[0] == alone(engine, long, max_tokens=40)
        again = [*short, 7]
        assert ask(batch, again, max_tokens=4) == (alone(engine, again, max_tokens=4), 30)


@pytest.mark.parametrize("ops", parameters(["numba", "emulate", "cuda"], ["bf16"]), indirect=True)
def test_those_that_run_share_a_prompt(ops):
    """Asked for at the same time: the first one runs, the others get its rows."""
    engine, stem = engine_for(ops.name, ops.activations, DENSE), some(24, 1)
    prompts = [stem, [*stem, 7], [*stem, 9, 5], stem]
    with md.Batch(engine, slots=4, ctx=CTX, verify=4) as batch:
        handles, found = [batch.submit(one, max_tokens=4) for one in prompts], {}
        gather(batch, found)
    assert [one.reused_tokens for one in handles] == [0, 24, 24, 23]
    for handle, prompt in zip(handles, prompts, strict=True):
        assert answer(found[handle])[0] == alone(engine, prompt, max_tokens=4)


def test_rows_that_hold_no_numbers_are_run_again(monkeypatch):
    """Whose text they are notices it only with its next round; rounds pass the slot over meanwhile."""
    engine, prompt, passed = engine_for("numba", "bf16", DENSE), some(30, 1), []

    def begin(engine, s, request, slot):
        passed.append(s.done[slot] == STOPPED)
        begin_prompt(engine, s, request, slot)

    monkeypatch.setattr(batch_module, "begin_prompt", begin)
    with md.Batch(engine, slots=3, ctx=CTX, verify=4) as batch:
        bad, found = batch.submit(prompt, max_tokens=40), {}
        gather(batch, found, rounds=2)
        poison(engine.ops, batch, 0)
        beside = batch.submit([*prompt, 7], max_tokens=8)
        gather(batch, found)
        assert found[bad][-1].error is not None and beside.reused_tokens == 0
        assert passed == [True] * 3
        assert answer(found[beside])[0] == alone(engine, [*prompt, 7], max_tokens=8)


def test_who_broke_off_leaves_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(batch_module, "begin_prompt", lambda *how: begun.append(how) or begin_prompt(*how))
    engine, prompt = engine_for("numba", "bf16", DENSE), some(30, 1)
    with md.Batch(engine, slots=3, ctx=CTX, verify=4) as batch:
        bad, found = batch.submit(prompt, max_tokens=40), {}
        gather(batch, found, rounds=2)
        poison(engine.ops, batch, 0)
        gather(batch, found)
        assert found[bad][-1].error is not None
        begun.clear()
        assert ask(batch, prompt, max_tokens=8) == (alone(engine, prompt, max_tokens=8), 0)
        assert len(begun) == 1, "not tried with its rows"


def test_a_ring_that_lost_keys_is_not_reused():
    """Nor a copy of it: what a shorter text reused of a longer one has lost the same keys."""
    engine, prompt = engine_for("numba", "bf16", RINGS), some(24, 3)
    with md.Batch(engine, slots=3, ctx=256, verify=4) as batch:
        ask(batch, prompt, max_tokens=2)
        assert ask(batch, [*prompt, 7], max_tokens=2)[1] == 24
        ring, window = min(
            (cache.k.shape[2], layer.window)
            for cache, layer in zip(engine.state.caches, engine.target.config.layers, strict=True)
            if layer.window
        )
        assert ring < 150
        long = [*prompt, *ask(batch, prompt, max_tokens=ring + 30 - len(prompt))[0]]
        ask(batch, some(24, 4), max_tokens=2)  # which moves it into another slot
        for first, reused in ((30 + window + 40, True), (24, False)):
            again = [*long[:first], 9]
            found = ask(batch, again, max_tokens=4)
            assert found == (alone(engine, again, RINGS, max_tokens=4), first if reused else 0)


def keys_of(s, prompt):
    """Bytes of the drafter's keys and values of a prompt, from the slot that keeps it."""
    (slot,) = (
        i for i, one in enumerate(s.prefixes) if one.prompt == len(prompt) and one.ids[:9] == prompt[:9]
    )
    rows = slice(0, len(prompt))
    return [part[slot, :, rows].tobytes() for cache in s.drafter_caches for part in (cache.k, cache.v)]


@pytest.mark.parametrize("beside", [False, True])
def test_texts_that_reuse_rows_draft_alike(beside):
    """Rows whose features wait for the drafter are not reused, wherever they lie now; nor do rounds of others
    inject them into rows of the next text."""
    engine, prompts = engine_for("numba", "bf16", DENSE), [some(n, n) for n in (60, 20, 30)]
    other = second(engine)
    with md.Batch(engine, slots=6, ctx=256, verify=4) as batch:
        neighbours = [batch.submit(some(9, 9), max_tokens=240, ignore_eos=True)] if beside else []
        for turn in range(3):
            for i, own in enumerate(prompts):
                handle, found = batch.submit(own, max_tokens=12), {}
                if beside and len(neighbours) == 1:  # on both sides
                    neighbours.append(batch.submit(some(9, 8), max_tokens=240, ignore_eos=True))
                while handle not in found or found[handle][-1].round.finish_reason is None:
                    gather(batch, found, rounds=1)
                rounds = [one.round for one in found[handle]]
                known = list(md.stream(other, own, max_tokens=12, verify=4))
                assert [one.drafted for one in rounds] == [one.drafted for one in known]
                assert keys_of(batch._state, own) == keys_of(other.state, own)
                assert bool(turn) == bool(handle.reused_tokens)
                prompts[i] = [*own, *(token for one in rounds for token in one.tokens), *some(40, turn)]
        assert set(neighbours) == {lane.handle for lane in batch._running}


def test_features_of_a_text_that_ended_reach_no_other():
    """Rounds of neighbours inject what waits: not into the next prompt, nor into rows that were set aside."""
    engine, texts = engine_for("numba", "bf16", DENSE), [some(8, seed) for seed in range(6)]
    other, found = second(engine), {}

    def run(batch, handle, is_enough):
        while not is_enough([one.round for one in found.get(handle, [])]):
            gather(batch, found, rounds=1)

    with md.Batch(engine, slots=6, ctx=256, verify=4) as batch:
        options = {"max_tokens": 190, "ignore_eos": True}
        _, before, _, high, _, last = [batch.submit(one, **options) for one in texts]  # as many as slots
        run(batch, last, lambda rounds: len(rounds) > 2)
        batch.cancel(before)
        long = some(60, 8)
        low = batch.submit(long, **options)
        run(batch, low, lambda rounds: len(rounds) > 4)
        batch.cancel(low), batch.cancel(high)
        for prompt, reused in ((some(40, 6), 0), ([*long, *some(40, 7)], 60)):
            handle = batch.submit(prompt, max_tokens=12)
            run(batch, handle, lambda rounds: rounds and rounds[-1].finish_reason)
            known = list(md.stream(other, prompt, max_tokens=12, verify=4))
            assert [one.round.drafted for one in found[handle]] == [one.drafted for one in known]
            assert keys_of(batch._state, prompt) == keys_of(other.state, prompt)
            assert handle.reused_tokens >= reused


def test_without_reuse_every_prompt_runs_and_nothing_is_copied(monkeypatch):
    engine, prompt = engine_for("numba", "bf16", DENSE), some(30, 1)
    monkeypatch.setattr(engine, "stop_ids", frozenset(range(0, 384, 9)))
    monkeypatch.setattr(kept, "copy_rows", None)
    with md.Batch(engine, slots=2, ctx=CTX, reuse=False) as batch:
        assert [ask(batch, prompt, max_tokens=3)[1] for _ in range(2)] == [0, 0]
        handles = [batch.submit(prompt, max_tokens=count) for count in (3, 40, 3)]
        gather(batch, {})
        assert [one.reused_tokens for one in handles] == [0, 0, 0]
    moved = md.generate(engine, prompt, max_tokens=60, samples=5, temperature=1.5, verify=4, seed=1)
    assert len({len(one["tokens"]) for one in moved.samples}) > 1, "and lanes moved"
    with pytest.raises(md.UserError, match="reuse is 3"):
        md.Batch(engine, reuse=3)


@pytest.mark.parametrize("most", [0, 1, 5, 8])
def test_alike_counts_what_is_the_same(most):
    ids = list(range(8))
    for at in range(9):
        other = [*ids[:at], -1, *ids[at + 1 :]] if at < 8 else ids
        assert alike(ids, other, most) == min(at, most)
