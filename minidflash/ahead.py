"""Rounds of lanes, recorded once and started ahead: a GPU has one to do while the host reads the last."""

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from minidflash.kernels.record import STOPPED, Record

from . import target
from .invariants import check
from .kept import set_aside
from .state import copy_slot, device_ids
from .stats import Detail, Round

LANES = 1, 2, 4, 8, 16, 24, 32, 48, 64  # that rounds are recorded for
CHOICES = "likeliest", "ranked", "drawn", "scored"  # how tokens are chosen: each does what those before it do


def choice_of(requests):
    """The least of CHOICES that does what each of these wants."""
    return max((request.choice for request in requests), key=CHOICES.index)


@dataclass
class UnderWay:
    """A round that was started. slots: of its lanes, which may move since. count: slots that it runs on.

    result: waits, and gives its cost and copies of what `read` names. clock: of its program.
    """

    width: int
    is_injecting: bool
    count: int
    slots: dict
    result: Any
    read: tuple
    clock: Any


class Ahead:
    """The rounds of lanes that share a State.

    lanes: those that decode; whoever owns this adds one that has begun, between rounds. free: heap of the
    slots that nobody has. shared: SharedWidth of lanes side by side; None: they are one text alone, whose
    schedule and replay choose the rows, and which counts its experts.
    """

    def __init__(self, engine, s, free, shared=None):
        self.engine, self.s, self.free, self.shared = engine, s, free, shared
        self.lanes, self._started, self._parts = [], deque(), {s.slots: s}
        self._begun, self._planned = 0, None  # rounds; the width of the next one, where it has been asked for
        self._is_alike = engine.ops.for_prefill is engine.ops  # rows have the bits of a prompt's
        rows = s.rows.experts if shared is None else None
        self._touched = [rows.touched] if rows else []
        self._seen = [int(engine.ops.download(rows.touched)[0])] if rows else []
        self._is_checked = os.environ.get("MINIDFLASH_CHECK") == "1"
        self._most = 0 if self._is_checked else engine.ops.rounds_ahead

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """What was started and is not wanted: its copies end before their memory is another's."""
        for one in self._started:
            one.result()
        self._started.clear()

    def next(self):
        """Start what can be started, then wait for the oldest round, and tell its lanes what it did.

        Returns its seconds: since the call, or of its work where that took longer.
        """
        since = time.perf_counter()
        while len(self._started) <= self._most and self._start():
            pass
        one = self._started.popleft()
        cost, *copies = one.result()
        read = dict(zip(one.read, copies, strict=True))
        experts = self._distinct(read["touched"]) if self._touched else None
        seconds, emitted = max(cost, time.perf_counter() - since), []
        for lane, slot in one.slots.items():
            if not lane.is_over:
                found = Round([], seconds=seconds, experts=experts)
                emitted.append(self._tell(lane, slot, one, read, cost, found))
                if lane.is_over:
                    self.leave(lane)
        if self.shared is not None and emitted:
            self.shared.learn(one.count, one.width, cost, sum(emitted) / len(emitted))
        return seconds

    def join(self, lane):
        """A lane that has begun is in the next round that starts, if its first token did not end it."""
        if lane.is_over:
            self.leave(lane)
        else:
            self.lanes.append(lane)
            if self.shared is not None:
                self.shared.begin(len(self.lanes))

    def leave(self, lane):
        """A lane ends, or never begins: rounds pass its slot over until the next text has settled there. The
        slot keeps its rows (kept.py), but for those of a lane that broke off."""
        lane.is_over = True
        if lane.error is not None:
            self.s.prefixes[lane.slot].cut(0)
        if lane in self.lanes:
            self.lanes.remove(lane)
        self._vacate(lane.slot)

    def pass_over(self, slot):
        """Rounds have no row of a slot until a text settles there."""
        self.engine.ops.upload(self.s.done[slot : slot + 1], np.full(1, STOPPED, np.int32))

    def _vacate(self, slot):
        self.pass_over(slot)
        heappush(self.free, slot)

    def _tell(self, lane, slot, one, read, cost, found):
        """A lane takes in what a round did to its slot. found: its Round so far. Returns its new tokens."""
        record, request = Record.of(read["record"][slot]), lane.request
        if not record.emitted:  # not even the first of its rows had finite logits
            lane.break_off()
            return 0
        own = slice(slot * one.width, (slot + 1) * one.width)
        injected = lane.waiting if one.is_injecting else None
        if request.trace:
            margins = read["margin"][own] if "margin" in read else None
            found.detail = Detail.of(
                lane.anchor, lane.start, injected or 0, read["choice"][own], margins, one.clock.read()
            )
        lane.waiting = record.emitted + (0 if one.is_injecting else lane.waiting)
        lane.committed += record.emitted
        lane.anchor = record.tokens[-1]
        if self._is_alike:
            self.s.prefixes[lane.slot].follow(record.tokens, lane.waiting if request.drafts else None)
        lane.schedule.learn(one.width, record.accepted, record.emitted, cost)
        if self._is_checked:
            check(self.engine, self._parts[one.count], lane, record, slot, injected)
        found.tokens, found.drafted, found.accepted = record.tokens, record.drafts, record.accepted
        found.verify, found.sample = one.width, lane.number
        if request.sampling.logprobs:
            found.logprobs = read["logprob"][own][: record.emitted].tolist()
        lane.take(found, record.why, self.engine.is_interrupted)
        return record.emitted

    def _distinct(self, counter):
        """Experts a layer since the last round was read; the counter goes on for ever, and round."""
        before, self._seen = self._seen, [int(counter[0])]
        layers = sum(experts is not None for experts in self.engine.target.config.each("experts"))
        return (self._seen[0] - before[0]) % 2**32 / layers

    def _start(self):
        """Start one round more; False where it is not needed, or what is under way decides what it does."""
        engine, lanes = self.engine, self.lanes
        if not lanes:
            return False
        ends = [lane.committed + self._coming(lane) for lane in lanes]  # at most
        count = self._close_ranks()
        width, drafts, is_traced = self._width(count), lanes[0].request.drafts, lanes[0].request.trace
        is_plain = drafts and width == 1  # whether it injects depends on what those before it commit
        is_needed = any(lane.request.max_tokens > end for lane, end in zip(lanes, ends, strict=True))
        if self._started and (is_plain or not is_needed):
            return False
        part = self._parts[count] = self._parts.get(count) or self.s.first(count)
        is_injecting = drafts and (width > 1 or max(lane.waiting for lane in lanes) == part.block)
        choice = choice_of([lane.request for lane in lanes])
        keys = [len(lane.request.ids) + end + part.block for lane, end in zip(lanes, ends, strict=True)]
        for lane, most in zip(lanes, keys, strict=True):
            self.s.prefixes[lane.slot].write(most)
        how = drafts, width, is_injecting, choice
        turn = self._begun % (self._most + 1) if is_traced else None  # a clock that no round under way has
        recorded, read = program(engine, part, how, max(keys), turn), self._read(part, count * width, choice)
        result = engine.ops.start(recorded, *read.values())
        slots = {lane: lane.slot for lane in lanes}
        self._started.append(UnderWay(width, is_injecting, count, slots, result, tuple(read), recorded.clock))
        self._begun, self._planned = self._begun + 1, None
        return True

    def _read(self, part, rows, choice):
        """Buffers that the host reads of a round of so many rows, by name."""
        read = {"record": part.record}
        if choice == "scored":
            read["logprob"] = part.logprob[:rows]
        if choice == "ranked":
            read["margin"] = part.margin[:rows]
        if self.lanes[0].request.trace:
            read["choice"] = part.choice[:rows]
        if self._touched:
            read["touched"] = self._touched[0]
        return read

    def _width(self, count):
        """Rows that the next round verifies."""
        lane = self.lanes[0]
        if lane.widths is not None:
            self._planned = self._planned or next(lane.widths, 1)
            return self._planned
        if self.shared is None or lane.request.verify != "auto":
            return lane.schedule.choose(lane.request)
        return self.shared.choose(count, [lane.schedule for lane in self.lanes])

    def _coming(self, lane):
        """Tokens of a lane that are under way, at most."""
        return sum(one.width for one in self._started if lane in one.slots)

    def _close_ranks(self):
        """How many slots the next round runs on; lanes move into free ones where those are fewer then."""
        count = self._count(len(self.lanes))
        moving = [lane for lane in self.lanes if lane.slot >= count]
        if moving and sum(slot < count for slot in self.free) >= len(moving):
            for lane in moving:
                self._move(lane, heappop(self.free))
        return self._count(1 + max(lane.slot for lane in self.lanes))

    def _move(self, lane, slot):
        """A lane goes on in another slot, behind the rounds that are under way."""
        if lane.request.resumes:
            set_aside(self.engine.ops, self.s, slot, self.free)
        copy_slot(self.engine.ops, self.s, lane.slot, slot, lane.start + self._coming(lane))
        self.s.prefixes[lane.slot].cut(0)
        self._vacate(lane.slot)
        lane.slot = slot

    def _count(self, slots):
        """The least slots that rounds are recorded for and that hold so many."""
        return min(self.s.slots, next(count for count in LANES if count >= slots))


def program(engine, s, how, keys, turn=None):
    """The recorded round of this kind; recorded once, replayed from then on: seed and law lie on the device.

    how: arguments of one_round. keys: that its rows see at most. turn: of a traced run, which of the programs
    with a clock.
    """
    from .loop import one_round

    bucket = engine.ops.bucket(keys)
    kind = how, s.slots, bucket, turn
    if kind not in engine.programs:
        engine.programs[kind] = engine.ops.program(
            lambda: one_round(engine, s, *how), bucket, turn is not None
        )
    return engine.programs[kind]


def prepare(engine, s, request):
    """A new text for the schedule; the first `auto` of one text alone measures its rounds (part of jit_s).

    So is the first draw of an engine, and the first round by rejection: kernels that only they need are
    compiled then. Side by side, rounds are timed as they come.
    """
    several, s = s.slots > 1, s.first(1)
    engine.schedule.begin()
    if request.sampling.choice != "likeliest" and not engine.can_sample:
        since = time.perf_counter()
        request.sampling.place(engine.ops, s, 0)
        engine.ops.upload(s.rows.pos[:1], np.zeros(1, np.int32))
        row = s.rows.first(1), device_ids(engine.ops, [0]), s.choice[:1]
        target.choose(engine.ops, engine.target, s, *row, "scored")
        engine.ops.download(s.choice[:1])
        engine.can_sample = True
        engine.jit_s += time.perf_counter() - since
    is_new = s.mass is not None and request.drafts and not engine.programs
    is_asked = (request.verify == "auto" and not several) or (request.trace and request.drafts)
    measures = is_asked and not engine.schedule.seconds
    if not (is_new or measures or request.trace):
        return
    since = time.perf_counter()

    def seconds_of(width):
        s.prefixes[0].cut(0)  # rows from 0 on are written over
        for buffer, value in ((s.start, 0), (s.fresh, 0), (s.left, 2 * s.block), (s.done, 0), (s.anchor, 0)):
            engine.ops.upload(buffer, np.array([value], np.int32))
        keys = len(request.ids) + request.max_tokens + s.block
        how = request.drafts, width, width > 1, replace(request, trace=False).choice
        return engine.ops.start(program(engine, s, how, keys), s.record)()[0]

    if is_new:
        request.sampling.place(engine.ops, s, 0)
        seconds_of(request.verify)
    if measures:
        engine.schedule.measure(seconds_of)
    if request.trace:
        record_traced(engine, s, request)
    engine.jit_s += time.perf_counter() - since


def record_traced(engine, s, request):
    """Record the first programs of a traced run ahead: none of its rounds is longer for it."""
    widths = engine.schedule.seconds if request.verify == "auto" else [request.verify]
    for turn in range(engine.ops.rounds_ahead + 1):
        for width in widths:
            how = request.drafts, width, request.drafts and width > 1, request.choice
            program(engine, s, how, len(request.ids) + s.block, turn)
