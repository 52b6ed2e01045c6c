"""The speculative loop: a round, the prompt, and a run's rounds, in that order."""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidflash.kernels.record import Record

from . import drafter, target
from .ahead import Ahead, choice_of, prepare
from .lane import Lane
from .request import release, reserve
from .schedule import Schedule
from .state import copy_slot, device_ids, reset, restore, snapshot
from .stats import Detail, Round


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
    """Run the prompt into a slot in chunks and choose the first token of every sample.

    Returns a list of (token, its logprobs as in Round, its margin as in Detail) for `begin`.
    """
    begin_prompt(engine, s, request, slot)
    while True:
        part = Part.next(request, slot, s.chunk)
        prompt_pass(engine, s, [part])
        if not request.rows_left:
            return first_tokens(engine, s, [(part, part.count - 1)], part.count)[0]


@dataclass(frozen=True)
class Part:
    """Tokens of a prompt that runs into a slot, `count` of them from its `first`th on."""

    request: Any
    slot: int
    first: int
    count: int

    @classmethod
    def next(cls, request, slot, most):
        """What runs next of it, `most` tokens at most."""
        return cls(request, slot, len(request.ids) - request.rows_left, min(most, request.rows_left))

    @property
    def end(self):
        return self.first + self.count

    @property
    def ids(self):
        return self.request.ids[self.first : self.end]


def begin_prompt(engine, s, request, slot):
    """A prompt begins, behind what the caches of the slot hold of it now."""
    request.rows_reused, request.rows_run = s.prefixes[slot].begin(engine, s, request), 0


def prompt_pass(engine, s, parts):
    """One pass over the next tokens of prompts of different slots, whose features are injected. A part may
    begin and end anywhere: no bit of a row depends on the rows beside it. Rounds of other slots may run
    between passes."""
    for part in parts:
        s.prefixes[part.slot].write(part.end)
    size = stage_prompts(engine.ops.for_prefill, s, parts)
    run_prompt(engine, s, size, parts[0].request.drafts)
    for part in parts:
        s.prefixes[part.slot].add(part.ids, 0 if part.request.drafts else None)
        part.request.rows_run += part.count


def first_tokens(engine, s, ended, count):
    """What `prefill` returns, for each prompt that ended with the newest pass, of `count` rows.

    ended: (its Part, which row of the pass was its last). Several have one sample each.
    """
    ops, requests, found = engine.ops.for_prefill, [part.request for part, _ in ended], [[] for _ in ended]
    for part, _ in ended:
        request = part.request
        stop_ids = () if request.ignore_eos else engine.stop_ids
        settle(ops, s, part.slot, len(request.ids) - 1, request.max_tokens, stop_ids)
    last, pick = s.rows.first(count), device_ids(ops, [row for _, row in ended])
    choice = choice_of(requests)
    for number in range(max(request.sampling.samples for request in requests)):
        for part, _ in ended:
            part.request.sampling.place(ops, s, number, part.slot)
        target.choose(ops, engine.target, s, last, pick, s.choice[:count], choice)
        tokens = ops.download(s.choice[:count]).tolist()
        for firsts, (part, row) in zip(found, ended, strict=True):
            own = slice(row, row + 1)
            logprobs = ops.download(s.logprob[own]).tolist() if part.request.sampling.logprobs else None
            margins = ops.download(s.margin[own]) if part.request.choice == "ranked" else None
            firsts.append((tokens[row], logprobs, margins))
    return found


def stage_prompts(ops, s, parts):
    """Rows of a prompts' pass, part by part; then inactive ones up to the next size that passes are recorded
    for, where there is one. Returns how many."""
    count = sum(part.count for part in parts)
    size = next((size for size in ops.prompt_passes if count <= size <= s.chunk), count)

    def padded(numbers):
        return np.concatenate([*numbers, np.zeros(size - count, np.int32)]).astype(np.int32)

    where = padded([np.arange(part.first, part.end) for part in parts])
    slot = padded([np.full(part.count, part.slot) for part in parts])
    rows = np.arange(size, dtype=np.int32)
    pos = np.where(rows < count, where, -1)
    values = padded([part.ids for part in parts]), slot, pos, where, where, where + 1, rows
    for buffer, value in zip(s.rows.first(size).staged, values, strict=True):
        ops.upload(buffer, np.asarray(value, np.int32))
    return size


def run_prompt(engine, s, size, drafts):
    """A prompt's pass over so many staged rows: all layers, then their features go to the drafter.

    Its first time a size runs as it is, from the second on it is recorded: an engine that sees one prompt
    need not wait for that.
    """
    ops = engine.ops.for_prefill

    def run():
        rows, taps = s.rows.first(size), engine.drafter.config.taps if drafts else ()
        target.forward(ops, engine.target, replace(s, taps=s.prompt_taps), rows, taps)
        if taps:
            drafter.inject(ops, engine.drafter, s, s.prompt_taps[:size], rows.slot, rows.pos)

    kind = "prompt", size, drafts
    if size not in ops.prompt_passes:
        run()
    elif kind not in engine.programs:
        engine.programs[kind] = None
        run()
    else:
        engine.programs[kind] = engine.programs[kind] or ops.program(run)
        engine.programs[kind].launch()


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
    s.prefixes[slot].cut(len(request.ids))
    s.prefixes[slot].anchor = first[0]
    ops.upload(s.choice[:1], np.array([first[0]], np.int32))
    accept(ops, s, 1, slice(slot, slot + 1))
    ops.upload(s.fresh[slot : slot + 1], np.zeros(1, np.int32))  # the prompt's features are all injected


def first_round(engine, s, lane, first, seconds):
    """A lane decodes from here on: its first round is the token that was chosen behind its prompt.

    first: of `prefill`. seconds: that the prompt took, 0 for a sample whose prompt is another's.
    """
    request = lane.request
    if first[0] < 0:
        lane.break_off()
        return
    begin(engine, s, request, lane.number, first, lane.slot)
    record = Record.of(engine.ops.download(s.record[lane.slot : lane.slot + 1])[0])
    found = Round(record.tokens, seconds=seconds, sample=lane.number, logprobs=first[1])
    if request.trace:
        features = request.rows_run if request.drafts and not lane.number else 0
        stages = {} if lane.number else {"prefill": seconds}
        anchor = request.ids[-1], lane.start
        found.detail = Detail.of(*anchor, features, np.array(first[:1]), first[2], stages)
    lane.anchor, lane.committed = first[0], 1
    lane.take(found, record.why, engine.is_interrupted)


def rounds_of(engine, request, timing):
    """The prompt once, then the rounds of every sample: side by side as far as there are slots, and given out
    one answer behind the other."""
    if request.max_tokens == 0:
        return
    s = reserve(engine, request)
    try:
        prepare(engine, s, request)
        begun = time.perf_counter()
        firsts = prefill(engine, s, request)
        now = time.perf_counter()
        timing.prefill_s, timing.ttft_s = now - begun, now - request.begun
        behind_prompt = snapshot(engine.ops, s, 0) if len(firsts) > 1 else None
        for number in range(0, len(firsts), s.slots):
            if number and not s.prefixes[0].reaches(engine, s, request, len(request.ids)):
                prefill(engine, s, request)  # an answer before it wrote over a ring's keys
            elif number:
                restore(engine.ops, s, 0, behind_prompt)
            if (yield from side_by_side(engine, s, request, timing, number, firsts)):
                break
    finally:
        release(engine)


def side_by_side(engine, s, request, timing, number, firsts):
    """Samples from `number` on, one a slot: the rounds of the first one as they come, of the others once all
    before them have ended. Returns whether they were interrupted.

    The prompt lies in slot 0. firsts: of `prefill`. timing: counts a round that lanes share once.
    """
    schedule, shared = (engine.schedule, None) if s.slots == 1 else (Schedule(s.block), engine.shared)
    lanes = [
        Lane.of(engine, request, slot, schedule, number + slot)
        for slot in range(min(s.slots, len(firsts) - number))
    ]
    for lane in lanes[1:]:
        copy_slot(engine.ops, s, 0, lane.slot, len(request.ids))
    with Ahead(engine, s, list(range(len(lanes), s.slots)), shared) as ahead:
        for lane in lanes:
            seconds = 0.0 if lane.number else timing.prefill_s
            first_round(engine, s, lane, firsts[lane.number], seconds)
            ahead.join(lane)
        for lane in lanes:
            while lane.given or not lane.is_over:
                if lane.given:
                    yield lane.given.popleft()
                else:
                    timing.decode_s += ahead.next()
            if lane.error is not None:
                raise lane.error
    return any(lane.is_interrupted for lane in lanes)
