"""The speculative loop: a round, the prompt, and a run's rounds, in that order."""

import os
import time
from dataclasses import replace

import numpy as np

from minidflash.kernels.record import NOT_FINITE, OUT_OF_BUDGET, STOPPED, Record

from . import drafter, target
from .ahead import Ahead, prepare
from .errors import UserError
from .invariants import check
from .request import release, reserve
from .state import device_ids, reset, restore, snapshot
from .stats import Detail, Round
from .text import RoundText

REASONS = {0: None, STOPPED: "stop", OUT_OF_BUDGET: "length", NOT_FINITE: None}


def one_round(engine, s, drafts, width, is_injecting, choice="likeliest"):
    """The fixed list of kernel calls of a round (engine.md 2): inject, draft, verify, accept, commit.

    A plain round lets its context feature wait (at most B do) and the next drafting round injects them
    together: one read of fc and of the K and V projections for up to B features instead of one each.
    """
    ops, taps = engine.ops, engine.drafter.config.taps if drafts else ()
    if is_injecting:
        ops.mark("inject")
        drafter.inject_fresh(ops, engine.drafter, s)
    if width > 1:
        ops.mark("draft")
        picked = [n * s.block + i for n in range(s.slots) for i in range(1, width)]
        engine.draft(ops, engine, s, device_ids(ops, picked))
    ops.mark("verify")
    target.verify(ops, engine.target, s, width, taps, device_ids(ops, range(s.slots * width)), choice)
    ops.mark("accept")
    accept(ops, s, width)
    target.commit(ops, engine.target, s)
    ops.mark(None)


def accept(ops, s, width, slots=slice(None)):
    """Keep the drafts that the target's choices of `width` rows confirm,
    and go on from its token behind them. slots: whose rows these are, side by side."""
    drafts, stop, *state, record, kept = (
        array[slots]
        for array in (s.drafts, s.stop, s.start, s.anchor, s.fresh, s.left, s.done, s.record, s.kept)
    )
    ops.accept(drafts, s.choice[: len(kept) * width], stop, *state, record, kept)


def prefill(engine, s, request, slot=0):
    """Run the prompt and choose the first token of every sample: all steps of `prompt_steps` at once.

    Returns a list of (token, its logprobs as in Round, its margin as in Detail) for `begin`.
    """
    steps = prompt_steps(engine, s, request, slot)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def prompt_steps(engine, s, request, slot=0):
    """Run the prompt into a slot in chunks, inject every chunk's features, choose the first tokens behind the
    last one: a generator of a chunk a step, that returns what `prefill` does.

    Rounds of other slots may run between the steps. A chunk may begin anywhere; of a request that resumes the
    first one begins behind what the caches hold.
    """
    ops, ids, total = engine.ops.for_prefill, request.ids, len(request.ids)
    taps = engine.drafter.config.taps if request.drafts else ()
    request.rows_reused, request.rows_run = s.prefix.begin(engine, s, request), 0
    for first in range(request.rows_reused, total, s.chunk):
        count = min(s.chunk, total - first)
        s.prefix.write(first + count)
        rows, where = s.rows.first(count), np.arange(first, first + count, dtype=np.int32)
        own = np.full(count, slot)
        values = ids[first : first + count], own, where, where, where, where + 1, where - first
        for buffer, value in zip(rows.staged, values, strict=True):
            ops.upload(buffer, np.asarray(value, np.int32))
        target.forward(ops, engine.target, replace(s, taps=s.prompt_taps), rows, taps)
        if taps:
            drafter.inject(ops, engine.drafter, s, s.prompt_taps[:count], rows.slot, rows.pos)
        s.prefix.add(ids[first : first + count], 0 if taps else None)
        request.rows_run += count
        if first + count < total:
            yield
    settle(ops, s, slot, total - 1, request.max_tokens, () if request.ignore_eos else engine.stop_ids)
    last, pick, law, firsts = s.rows.first(count), device_ids(ops, [count - 1]), request.sampling, []
    for number in range(law.samples):
        law.place(ops, s, number, slot)
        target.choose(ops, engine.target, s, last, pick, s.choice[:count], request.choice)
        newest = slice(count - 1, count)
        logprobs = ops.download(s.logprob[newest]).tolist() if law.logprobs else None
        margins = ops.download(s.margin[newest]) if request.choice == "ranked" else None
        firsts.append((int(ops.download(s.choice[newest])[0]), logprobs, margins))
    return firsts


def settle(ops, s, slot, start, left, stop_ids):
    """A slot begins anew at a position, with a budget and stop ids; until here a round passed it over."""
    reset(ops, s, slot)
    stops = np.full((1, s.stop.shape[1]), -1, np.int32)
    stops[0, : len(stop_ids)] = sorted(stop_ids)
    ops.upload(s.stop[slot : slot + 1], stops)
    for buffer, value in ((s.start, start), (s.left, left)):
        ops.upload(buffer[slot : slot + 1], np.array([value], np.int32))


def begin(engine, s, request, number, first, slot=0):
    """Start sample `number` behind the prompt: commit its first token.
    Rows of an earlier sample are overwritten."""
    ops = engine.ops
    request.sampling.place(ops, s, number, slot)
    s.prefix.cut(len(request.ids))
    s.prefix.anchor = first[0]
    ops.upload(s.choice[:1], np.array([first[0]], np.int32))
    accept(ops, s, 1, slice(slot, slot + 1))
    ops.upload(s.fresh[slot : slot + 1], np.zeros(1, np.int32))  # the prompt's features are all injected


def rounds_of(engine, request, timing):
    """The prompt once, then every sample's rounds."""
    if request.max_tokens == 0:
        return
    s = reserve(engine, request)
    try:
        prepare(engine, s, request)
        begun = time.perf_counter()
        firsts = prefill(engine, s, request)
        now = time.perf_counter()
        timing.prefill_s, timing.ttft_s = now - begun, now - request.begun
        if firsts[0][0] < 0:
            raise not_finite(len(request.ids) - 1)
        behind_prompt = snapshot(engine.ops, s, 0) if len(firsts) > 1 else None
        for number, first in enumerate(firsts):
            if number and not s.prefix.reaches(engine, s, request, len(request.ids)):
                prefill(engine, s, request)  # the answer before it wrote over a ring's keys
            elif number:
                restore(engine.ops, s, 0, behind_prompt)
            reason = yield from sample_rounds(engine, s, request, timing, number, first)
            if reason == "interrupted":
                break
    finally:
        release(engine)


def sample_rounds(engine, s, request, timing, number, first):
    """One sample. Everything a round does happens in the calls of `one_round`; the host reads one record.

    Returns why the sample ended; None at a stop string.
    """
    texts = RoundText(engine.tokenizer, request.stop, request.ids, request.raw)
    begin(engine, s, request, number, first)
    record = Record.of(engine.ops.download(s.record)[0])
    reason = why_it_ends(engine, record.why)
    seconds = 0.0 if number else timing.prefill_s
    begun = Round(record.tokens, seconds=seconds, finish_reason=reason, sample=number, logprobs=first[1])
    if request.trace:
        begun.detail = detail_of_prefill(request, number, first, seconds)
    yield from texts.push(begun, reason is not None)
    with Ahead(engine, s, request, number, first[0]) as ahead:
        while record.why == 0 and reason is None and not texts.is_stopped:
            one = ahead.next()
            record, width = one.record, one.width
            if not record.emitted:  # not even the first of its rows had finite logits
                break
            engine.schedule.learn(width, record.accepted, record.emitted, one.cost)
            timing.decode_s += one.seconds
            reason = why_it_ends(engine, record.why)
            if os.environ.get("MINIDFLASH_CHECK") == "1":
                check(engine, s, request, record, ahead.committed, one.injected)
            found = Round(
                record.tokens, None, record.drafts, record.accepted, width, one.seconds, reason, number,
                one.logprobs, one.experts, one.detail,
            )  # fmt: skip
            yield from texts.push(found, reason is not None)
    yield from texts.finish()
    if record.why == NOT_FINITE and not texts.is_stopped:
        raise not_finite(len(request.ids) + ahead.committed - 1)
    return reason


def detail_of_prefill(request, number, first, seconds):
    """Detail of the round that prefill is; the samples behind the first one go on from where it was."""
    last, features = len(request.ids) - 1, request.rows_run if request.drafts and not number else 0
    stages = {} if number else {"prefill": seconds}
    return Detail.of(request.ids[last], last, features, np.array(first[:1]), first[2], stages)


def why_it_ends(engine, code):
    """Why a sample ends with the round that has just been read, or None."""
    return "interrupted" if code == 0 and engine.is_interrupted else REASONS[code]


def not_finite(position):
    """The UserError of a run whose target computes no numbers. Code 1:
    what was generated before it is right."""
    return UserError(
        f"the target's logits at position {position} are not finite (NaN or infinity): damaged weights, "
        f"or an overflow",
        "fetch the checkpoint again, or try --activations f32",
        code=1,
    )
