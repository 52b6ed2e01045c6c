"""Rounds recorded once and started ahead: a GPU has the next round to do while the host reads this one."""

import os
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from minidflash.kernels.record import Record

from . import target
from .state import device_ids


@dataclass
class Started:
    """A round that was read. injected: context features it injected, None: it let them wait.
    cost: seconds of its work.

    seconds: since the last one was read, or cost where that is more. experts: distinct ones that its verified
    rows went through, a layer; None where the target has none.
    """

    width: int
    injected: int | None
    record: Record
    cost: float
    seconds: float
    logprobs: list | None
    experts: float | None


class Ahead:
    """The rounds of one sample, in order. committed: tokens of the sample so far."""

    def __init__(self, engine, s, request):
        self.engine, self.s, self.request = engine, s, request
        self.committed, self._waiting, self._started = (
            1,
            0,
            deque(),
        )  # waiting: context features, as s.fresh says
        self._is_alike = engine.ops.for_prefill is engine.ops  # rows have the bits of a prompt's
        rows = s.rows.experts
        self._touched = [rows.touched] if rows else []
        self._seen = [int(engine.ops.download(rows.touched)[0])] if rows else []
        self._most = 0 if os.environ.get("MINIDFLASH_CHECK") == "1" else engine.ops.rounds_ahead

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """What was started and is not wanted: its copies end before their memory is another's."""
        for _, _, result in self._started:
            result()

    def next(self):
        """Start what can be started, then wait for the oldest: a Started."""
        since = time.perf_counter()
        while len(self._started) <= self._most and self._start():
            pass
        width, is_injecting, result = self._started.popleft()
        cost, (numbers,), *read = result()
        experts = self._distinct(read.pop()) if self._touched else None
        record = Record.of(numbers)
        injected = self._waiting if is_injecting else None
        self._waiting = record.emitted + (0 if is_injecting else self._waiting)
        self.committed += record.emitted
        if record.emitted and self._is_alike:
            self.s.prefix.follow(record.tokens, self._waiting if self.request.drafts else None)
        logprobs = read[0][: record.emitted].tolist() if read else None
        seconds = max(cost, time.perf_counter() - since)
        return Started(width, injected, record, cost, seconds, logprobs, experts)

    def _distinct(self, counter):
        """Experts a layer since the last round was read; the counter goes on for ever, and round."""
        before, self._seen = self._seen, [int(counter[0])]
        layers = sum(experts is not None for experts in self.engine.target.config.each("experts"))
        return (self._seen[0] - before[0]) % 2**32 / layers

    def _start(self):
        """Start one round more; False where it is not needed, or what is under way decides what it does."""
        engine, s, request = self.engine, self.s, self.request
        width, coming = engine.schedule.choose(request), sum(v for v, *_ in self._started)
        is_plain = request.drafts and width == 1  # whether it injects depends on what those before it commit
        if self._started and (self.committed + coming >= request.max_tokens or is_plain):
            return False
        is_injecting = request.drafts and (width > 1 or self._waiting == s.block)
        keys = len(request.ids) + self.committed + coming + s.block
        read = s.record, *([s.logprob[:width]] if request.sampling.logprobs else []), *self._touched
        s.prefix.write(keys)
        how = request.drafts, width, is_injecting, request.sampling.choice
        result = engine.ops.start(program(engine, s, how, keys), *read)
        self._started.append((width, is_injecting, result))
        return True


def program(engine, s, how, keys):
    """The recorded round of this kind; recorded once, replayed from then on: seed and law lie on the device.

    how: arguments of one_round. keys: that its rows see at most.
    """
    from .loop import one_round

    bucket = engine.ops.bucket(keys)
    kind = how, s.slots, bucket
    if kind not in engine.programs:
        engine.programs[kind] = engine.ops.program(lambda: one_round(engine, s, *how), bucket)
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
    if not is_new and (request.verify != "auto" or engine.schedule.seconds):
        return
    since = time.perf_counter()

    def seconds_of(width):
        s.prefix.cut(0)  # rows from 0 on are written over
        for buffer, value in ((s.start, 0), (s.fresh, 0), (s.left, 2 * s.block), (s.done, 0), (s.anchor, 0)):
            engine.ops.upload(buffer, np.array([value], np.int32))
        keys = len(request.ids) + request.max_tokens + s.block
        how = request.drafts, width, width > 1, request.sampling.choice
        return engine.ops.start(program(engine, s, how, keys), s.record)()[0]

    if is_new:
        request.sampling.place(engine.ops, s, 0)
        seconds_of(request.verify)
    else:
        engine.schedule.measure(seconds_of)
    engine.jit_s += time.perf_counter() - since
