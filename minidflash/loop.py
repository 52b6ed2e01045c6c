"""stream(): the speculative loop on one screen; generate(): a whole run as a Result."""

import os
import time
from collections import deque

import numpy as np

from . import drafter as draft
from . import target as verifier
from .errors import UserError
from .invariants import check
from .request import Request, release, reserve
from .stats import Memory, Result, Round, Timing
from .text import RoundText

REASONS = {0: None, 1: "stop", 2: "length"}
NOT_FINITE = 3  # as in kernels/oracle.py


def stream(engine, prompt, **options):
    """Generate, yielding one `Round` a round; the first one is the token that prefill chose.

    prompt: str (chat template applied unless raw=True), list of ids, or list of chat messages. options: keywords as
    the flags, see request.py. Returns a generator; closing it early leaves the engine usable, one that was never begun
    holds nothing. The last Round has a finish_reason, also when `engine.is_interrupted` ended the run.
    Errors: TypeError for an unknown keyword, UserError for what cannot be run, both at the call.
    Source: models.md 7.4, engine.md 2.
    """
    return rounds_of(engine, Request.of(engine, prompt, options), Timing())


def generate(engine, prompt, **options):
    """Run to the end, or to an interruption: Ctrl-C, or `engine.is_interrupted`.

    Arguments and errors as `stream`. Returns a Result. Source: engine.md 5-6.
    """
    request, timing = Request.of(engine, prompt, options), Timing()
    rounds, reason = [], None
    try:
        for r in rounds_of(engine, request, timing):
            rounds.append(r)  # noqa: PERF402 what came before Ctrl-C is kept
    except KeyboardInterrupt:
        reason = "interrupted"
    return finish(engine, request, rounds, timing, reason)


def finish(engine, request, rounds, timing, reason=None):
    """Result of a run from its rounds."""
    memory = Memory(engine.target.nbytes + (engine.drafter.nbytes if engine.drafter else 0))
    for name, value in (engine.state.memory if engine.state else {}).items():
        setattr(memory, name, value)
    timing.load_s, timing.jit_s = engine.load_s, engine.jit_s
    return Result.of(
        rounds, request.block if request.drafts else None, reason, timing, memory, samples=request.sampling.samples, prompt_tokens=len(request.ids),
        backend=engine.ops.name, activations=engine.ops.activations, machine=machine_of(engine.ops), target=engine.target_name,
        drafter=engine.drafter_name if request.drafts else None, options=request.options,
    )  # fmt: skip


def rounds_of(engine, request, timing):
    """The prompt once, then every sample's rounds."""
    if request.max_tokens == 0:
        return
    s = reserve(engine, request)
    try:
        start_schedule(engine, s, request)
        begun = time.perf_counter()
        firsts = prefill(engine, s, request)
        now = time.perf_counter()
        timing.prefill_s, timing.ttft_s = now - begun, now - request.begun
        if firsts[0][0] < 0:
            raise not_finite(len(request.ids) - 1)
        for number, first in enumerate(firsts):
            reason = yield from sample_rounds(engine, s, request, timing, number, first)
            if reason == "interrupted":
                break
    finally:
        release(engine)


def why_it_ends(engine, code):
    """Why a sample ends with the round that has just been read, or None."""
    return "interrupted" if code == 0 and engine.is_interrupted else REASONS.get(code)


def sample_rounds(engine, s, request, timing, number, first):
    """The loop. Everything a round does happens in the calls of `one_round`; the host reads one record.

    Returns why the sample ended; None at a stop string.
    """
    ops, is_scored = engine.ops, request.sampling.logprobs
    texts = RoundText(engine.tokenizer, request.stop, request.ids, request.raw)
    begin(engine, s, request, number, first)
    record = ops.download(s.record)[0]
    why = int(record[2])
    reason = why_it_ends(engine, why)
    seconds = 0.0 if number else timing.prefill_s
    begun = Round([int(record[3])], seconds=seconds, finish_reason=reason, sample=number, logprobs=first[1])
    yield from texts.push(begun, reason is not None)
    waiting, committed = 0, 1  # context features not injected yet, as s.fresh says; tokens of the sample
    is_checked, started = os.environ.get("MINIDFLASH_CHECK") == "1", deque()
    try:
        while why == 0 and reason is None and not texts.is_stopped:
            since = time.perf_counter()
            # A GPU has the next round to do while the host reads this one; it is dropped where this one is the last.
            while len(started) <= (0 if is_checked else ops.rounds_ahead):
                width, coming = engine.schedule.choose(request), sum(v for v, *_ in started)
                if started and (committed + coming >= request.max_tokens or (request.drafts and width == 1)):
                    break  # not needed; or what this one commits decides whether the next one injects
                is_injecting = request.drafts and (width > 1 or waiting == s.block)
                read = s.record, *([s.logprob[:width]] if is_scored else [])
                keys = len(request.ids) + committed + coming + s.block
                result = ops.start(program(engine, s, request, width, is_injecting, keys), *read)
                started.append((width, is_injecting, result))
            width, is_injecting, result = started.popleft()
            cost, (record,), *scores = result()
            seconds = max(cost, time.perf_counter() - since)
            drafts = record[3 + s.block + 1 : 3 + s.block + width].tolist()
            emitted, accepted, why = (int(v) for v in record[:3])
            injected = waiting if is_injecting else None
            waiting, committed = emitted if is_injecting else waiting + emitted, committed + emitted
            if not emitted:  # not even the first of its rows had finite logits
                break
            engine.schedule.learn(width, accepted, emitted, cost)
            timing.decode_s += seconds
            reason = why_it_ends(engine, why)
            if is_checked:
                check(engine, s, request, record, committed, injected)
            tokens, logprobs = record[3 : 3 + emitted].tolist(), [p[:emitted].tolist() for p in scores]
            found = Round(tokens, None, drafts, accepted, width, seconds, reason, number, *logprobs)
            yield from texts.push(found, reason is not None)
    finally:
        for _, _, result in started:
            result()  # its copies end before their memory is another's
    yield from texts.finish()
    if why == NOT_FINITE and not texts.is_stopped:
        raise not_finite(len(request.ids) + committed - 1)
    return reason


def not_finite(position):
    """The UserError of a run whose target computes no numbers. Code 1: what was generated before it is right."""
    return UserError(
        f"the target's logits at position {position} are not finite (NaN or infinity): damaged weights, or an overflow",
        "fetch the checkpoint again, or try --activations f32",
        code=1,
    )


def one_round(engine, s, drafts, width, is_injecting, choice="likeliest"):
    """The fixed list of kernel calls of a round (engine.md 2): inject, draft, verify, accept, commit, next anchor.

    A plain round lets its context feature wait (at most B do) and the next drafting round injects them together:
    one read of fc and of the K and V projections for up to B features instead of one each.
    """
    ops, taps = engine.ops, engine.drafter.config.taps if drafts else ()
    if is_injecting:
        draft.inject_fresh(ops, engine.drafter, s)
    if width > 1:
        picked = [n * s.block + i for n in range(s.slots) for i in range(1, width)]
        engine.propose(ops, engine, s, device_ids(ops, picked))
    verifier.verify(ops, engine.target, s, width, taps, device_ids(ops, range(s.slots * width)), choice)
    ops.accept(
        s.drafts, s.choice[: s.slots * width], s.stop, s.start, s.anchor, s.fresh, s.left, s.done, s.record
    )


def program(engine, s, request, width, is_injecting, keys):
    """The recorded round of this kind; recorded once, replayed from then on: seed and law lie on the device.

    keys: that its rows see at most.
    """
    how, bucket = (request.drafts, width, is_injecting, request.sampling.choice), engine.ops.bucket(keys)
    if (how, bucket) not in engine.programs:
        engine.programs[how, bucket] = engine.ops.program(lambda: one_round(engine, s, *how), bucket)
    return engine.programs[how, bucket]


def start_schedule(engine, s, request):
    """A new text for the schedule; the first `auto` on these buffers measures what rounds cost (part of jit_s).

    So is the first draw of an engine, and the first round by rejection: kernels that only they need are compiled then.
    """
    engine.schedule.begin()
    if request.sampling.choice != "likeliest" and not engine.can_sample:
        since = time.perf_counter()
        request.sampling.place(engine.ops, s, 0)
        engine.ops.upload(s.rows.pos[:1], np.zeros(1, np.int32))
        row = s.rows.first(1), device_ids(engine.ops, [0]), s.choice[:1]
        verifier.choose(engine.ops, engine.target, s, *row, "scored")
        engine.ops.download(s.choice[:1])
        engine.can_sample = True
        engine.jit_s += time.perf_counter() - since
    is_new = s.mass is not None and request.drafts and not engine.programs
    if not is_new and (request.verify != "auto" or engine.schedule.seconds):
        return
    since = time.perf_counter()

    def run(width):
        for buffer, value in ((s.start, 0), (s.fresh, 0), (s.left, 2 * s.block), (s.done, 0), (s.anchor, 0)):
            engine.ops.upload(buffer, np.array([value], np.int32))
        keys = len(request.ids) + request.max_tokens + s.block
        return engine.ops.start(program(engine, s, request, width, width > 1, keys), s.record)()[0]

    if is_new:
        request.sampling.place(engine.ops, s, 0)
        run(request.verify)
    else:
        engine.schedule.measure(run)
    engine.jit_s += time.perf_counter() - since


def prefill(engine, s, request):
    """Run the prompt in chunks, inject every chunk's features, choose the first token of every sample.

    Returns a list of (token, its logprobs as in Round) for `begin`.
    """
    ops, ids, total = engine.ops.for_prefill, request.ids, len(request.ids)
    taps = engine.drafter.config.taps if request.drafts else ()
    for first in range(0, total, s.chunk):
        count = min(s.chunk, total - first)
        rows = s.rows.first(count)
        where = np.arange(first, first + count, dtype=np.int32)
        ops.upload(rows.ids, np.array(ids[first : first + count], np.int32))
        ops.upload(rows.slot, np.zeros(count, np.int32))
        ops.upload(rows.pos, where)
        ops.upload(rows.at, where)
        ops.upload(rows.end, where + 1)
        ops.upload(rows.tap_row, where - first)
        verifier.forward(ops, engine.target, s, rows, taps)
        if taps:
            draft.inject(ops, engine.drafter, s, s.taps[:count], rows.slot, rows.pos)
    last, pick, law, firsts = s.rows.first(count), device_ids(ops, [count - 1]), request.sampling, []
    for number in range(law.samples):
        law.place(ops, s, number)
        verifier.choose(ops, engine.target, s, last, pick, s.choice[:count], law.choice)
        logprobs = ops.download(s.logprob[count - 1 : count]).tolist() if law.logprobs else None
        firsts.append((int(ops.download(s.choice[count - 1 : count])[0]), logprobs))
    return firsts


def begin(engine, s, request, number, first):
    """Start sample `number` behind the prompt: commit its first token. Rows of an earlier sample are overwritten."""
    ops, start = engine.ops, len(request.ids) - 1
    request.sampling.place(ops, s, number)
    for buffer, value in (
        (s.start, start), (s.left, request.max_tokens), (s.done, 0), (s.fresh, 0), (s.choice[:1], first[0])
    ):  # fmt: skip
        ops.upload(buffer, np.array([value], np.int32))
    ops.accept(s.drafts, s.choice[:1], s.stop, s.start, s.anchor, s.fresh, s.left, s.done, s.record)
    ops.upload(s.fresh, np.zeros(1, np.int32))  # the prompt's features are all injected


def device_ids(ops, values):
    """An i32 buffer with these values."""
    values = np.array(list(values), np.int32)
    out = ops.array(values.shape, "i32")
    ops.upload(out, values)
    return out


def machine_of(ops):
    """One line about what a backend runs on."""
    return getattr(ops.backend, "machine", machine_name)()


def machine_name():
    """One line about the processor."""
    import platform

    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
