"""Rounds recorded once and started ahead: a GPU has the next round to do while the host reads this one."""

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidflash.kernels.record import Record

from . import target
from .state import device_ids
from .stats import Detail


@dataclass
class Started:
    """A round that was read. injected: context features it injected, None: it let them wait.
    cost: seconds of its work.

    seconds: since the last one was read, or cost where that is more. experts: distinct ones that its verified
    rows went through, a layer; None where the target has none. detail: as in Round.
    """

    width: int
    injected: int | None
    record: Record
    cost: float
    seconds: float
    logprobs: list | None
    experts: float | None
    detail: Detail | None


@dataclass
class UnderWay:
    """A round that was started. result: waits, and gives its cost and copies of what `read` names.
    clock: of its program."""

    width: int
    is_injecting: bool
    result: Any
    read: tuple
    clock: Any


class Ahead:
    """The rounds of sample `number`, in order, from its first token on. committed: its tokens so far."""

    def __init__(self, engine, s, request, number, first):
        self.engine, self.s, self.request, self._anchor = engine, s, request, first
        self._widths = iter(request.widths[number]) if request.widths else None
        self._begun, self._planned = 0, None  # rounds; the width of the next one, where it has been asked for
        self.committed, self._waiting = 1, 0  # waiting: context features, as s.fresh says
        self._started = deque()
        self._is_alike = engine.ops.for_prefill is engine.ops  # rows have the bits of a prompt's
        rows = s.rows.experts
        self._touched = [rows.touched] if rows else []
        self._seen = [int(engine.ops.download(rows.touched)[0])] if rows else []
        self._most = 0 if os.environ.get("MINIDFLASH_CHECK") == "1" else engine.ops.rounds_ahead

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """What was started and is not wanted: its copies end before their memory is another's."""
        for one in self._started:
            one.result()

    def next(self):
        """Start what can be started, then wait for the oldest: a Started."""
        since = time.perf_counter()
        while len(self._started) <= self._most and self._start():
            pass
        one = self._started.popleft()
        cost, *copies = one.result()
        read = dict(zip(one.read, copies, strict=True))
        experts = self._distinct(read["touched"]) if self._touched else None
        record = Record.of(read["record"][0])
        injected = self._waiting if one.is_injecting else None
        detail = self._detail(one, read, injected or 0) if self.request.trace else None
        self._waiting = record.emitted + (0 if one.is_injecting else self._waiting)
        self.committed += record.emitted
        self._anchor = record.tokens[-1] if record.tokens else None
        if record.emitted and self._is_alike:
            self.s.prefix.follow(record.tokens, self._waiting if self.request.drafts else None)
        logprobs = read["logprob"][: record.emitted].tolist() if "logprob" in read else None
        seconds = max(cost, time.perf_counter() - since)
        return Started(one.width, injected, record, cost, seconds, logprobs, experts, detail)

    def _detail(self, one, read, injected):
        start, margins = len(self.request.ids) + self.committed - 1, read.get("margin")
        return Detail.of(self._anchor, start, injected, read["choice"], margins, one.clock.read())

    def _distinct(self, counter):
        """Experts a layer since the last round was read; the counter goes on for ever, and round."""
        before, self._seen = self._seen, [int(counter[0])]
        layers = sum(experts is not None for experts in self.engine.target.config.each("experts"))
        return (self._seen[0] - before[0]) % 2**32 / layers

    def _start(self):
        """Start one round more; False where it is not needed, or what is under way decides what it does."""
        engine, s, request = self.engine, self.s, self.request
        width, coming = self._width(), sum(one.width for one in self._started)
        is_plain = request.drafts and width == 1  # whether it injects depends on what those before it commit
        if self._started and (self.committed + coming >= request.max_tokens or is_plain):
            return False
        is_injecting = request.drafts and (width > 1 or self._waiting == s.block)
        keys = len(request.ids) + self.committed + coming + s.block
        read = {"record": s.record}
        if request.sampling.logprobs:
            read["logprob"] = s.logprob[:width]
        if request.trace:
            read["choice"] = s.choice[:width]
        if request.choice == "ranked":
            read["margin"] = s.margin[:width]
        if self._touched:
            read["touched"] = self._touched[0]
        s.prefix.write(keys)
        how = request.drafts, width, is_injecting, request.choice
        recorded = program(engine, s, how, keys, self._turn())
        result = engine.ops.start(recorded, *read.values())
        self._started.append(UnderWay(width, is_injecting, result, tuple(read), recorded.clock))
        self._begun, self._planned = self._begun + 1, None
        return True

    def _width(self):
        """Rows that the next round verifies."""
        if self._widths is None:
            return self.engine.schedule.choose(self.request)
        self._planned = self._planned or next(self._widths, 1)
        return self._planned

    def _turn(self):
        """Which of the clocks a traced round has: one that no round under way has."""
        return self._begun % (self._most + 1) if self.request.trace else None


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
    """A new text for the schedule; the first `auto` on these buffers measures what rounds cost (part of
    jit_s).

    So is the first draw of an engine, and the first round by rejection:
    kernels that only they need are compiled then.
    """
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
    is_asked = request.verify == "auto" or (request.trace and request.drafts)
    measures = is_asked and not engine.schedule.seconds
    if not (is_new or measures or request.trace):
        return
    since = time.perf_counter()

    def seconds_of(width):
        s.prefix.cut(0)  # rows from 0 on are written over
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
