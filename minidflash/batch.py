"""Batch: several texts at a time, side by side in one engine; each is, bit for bit, what it gets alone."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop
from typing import Any

import numpy as np

from minidflash.kernels.record import STOPPED

from .ahead import LANES, Ahead
from .errors import UserError
from .fit import batch_context
from .kept import bring, gains_by_waiting
from .lane import Lane
from .loop import Part, begin_prompt, first_round, first_tokens, prompt_pass
from .request import Request, Shape, checked, hold, refuse_busy, release
from .schedule import Schedule, SharedWidth
from .stats import Round
from .values import flag, whole

MOST_SLOTS = LANES[-1]
SHARED = "block", "verify", "drafter"  # options of the whole batch


@dataclass(eq=False, repr=False)
class Handle:
    """A submitted request; a handle equals itself alone, and may be a key of a dict. request: as checked."""

    request: Request

    @property
    def prompt_tokens(self):
        """How many ids the prompt has."""
        return len(self.request.ids)

    @property
    def reused_tokens(self):
        """How many of them did not run, since a slot held them; 0 before it begins."""
        return self.request.rows_reused


@dataclass(frozen=True)
class Item:
    """What iterating a Batch gives. handle: of the request. round: as `stream` gives them; its seconds are of
    all lanes together. error: why a request broke off, on its last item, whose finish_reason is then "error".
    """

    handle: Handle
    round: Round
    error: UserError | None = None


@dataclass(eq=False)
class Seat(Lane):
    """The lane of a request. has_begun: its prompt. seconds: that the prompt's passes took."""

    handle: Handle | None = None
    has_begun: bool = False
    seconds: float = 0.0


@dataclass
class Batch:
    """Requests of one engine, side by side in slots; iterate to run them, `submit` at any time.

        with md.Batch(engine, slots=8) as batch:
            handles = [batch.submit(prompt, max_tokens=64, seed=i) for i, prompt in enumerate(prompts)]
            for one in batch:
                print(one.handle, one.round.text)

    A text is what `generate` gives alone, whatever runs beside it. A request joins when a slot is free, in
    the order of `submit`; between two rounds at most one pass of prompts runs while others decode, on a GPU a
    short one. A prompt that begins as another one, of a text that runs or ended, runs only what is new
    (kept.py).
    Iteration ends when nothing runs or waits, and may begin anew after a further `submit`. The engine is busy
    from the first step until then, or until `close`. One thread iterates; `submit` and `cancel` may be called
    from others. engine.is_interrupted ends all requests. So does an exception out of iteration.
    Source: engine.md 6.
    """

    engine: Any
    slots: int = 16
    ctx: int | None = None
    block: int | None = None
    verify: int | str = "auto"
    drafter: bool | None = True
    reuse: bool = True

    def __post_init__(self):
        """engine: of `load`. slots: texts at a time, 1 to 64. ctx: positions of a slot, prompt and new
        tokens; default what memory holds, at most the engine's. block, verify, drafter: as of `generate`.
        reuse: False: every prompt runs whole.
        Errors: UserError for a bad value, a context that memory does not hold, and a busy engine.
        """
        engine = self.engine
        self.slots, self.reuse = whole("slots", self.slots, 1, MOST_SLOTS), flag("reuse", self.reuse)
        refuse_busy(engine)
        options, _ = checked(engine, {name: getattr(self, name) for name in SHARED})
        self._drafts = engine.drafter is not None and options["drafter"]
        self.block = (options["block"] or engine.drafter.config.block) if self._drafts else 1
        self._drafts = self._drafts and self.block > 1
        self.verify = options["verify"] if options["verify"] == "auto" else min(options["verify"], self.block)
        self.verify = self.verify if self._drafts else 1
        engine.state, engine.state_shape, engine.programs = None, None, {}  # its memory is for the slots
        self.ctx = batch_context(engine, self.slots, self.ctx, self.block if self._drafts else 1)
        self._shape = Shape(self.slots, self.ctx, self.block, self._drafts)
        self._width = SharedWidth(self.block)
        self._state = self._ahead = None
        self._waiting, self._joining = deque(), deque()
        self._ready, self._cancelled = deque(), deque()

    def submit(self, prompt, **options):
        """Add a request; its rounds come out of iteration. prompt, options: as of `generate`, but for block,
        verify and drafter, which are the batch's, and samples, trace and accept "reject", which need a run
        alone.

        Returns a Handle. Errors: TypeError for an unknown keyword, UserError for what cannot be run.
        """
        refuse_alone(options)
        shared = {"block": self.block if self._drafts else None, "verify": self.verify}
        given = options | shared | {"drafter": None if not self._drafts else True}
        handle = Handle(Request.of(self.engine, prompt, given, resumes=self.reuse, batch=self))
        self._waiting.append(handle)
        return handle

    def cancel(self, handle):
        """End a request: no further item of it comes, its slot is free before the next round. Of one that has
        ended, or of another batch: nothing."""
        self._cancelled.append(handle)

    def close(self):
        """End every request and give the engine back. The batch may be used again."""
        self._drop_all()
        self._let_go()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            self._leave()
            if self._ready:
                return self._ready.popleft()
            if not (self._waiting or self._joining or self._running):
                self._let_go()
                raise StopIteration
            try:
                self._step()
            except BaseException:
                self.close()  # a step cut short leaves slots that nobody knows
                raise

    def _step(self):
        """At most a chunk of the oldest prompts, then a round of those that decode."""
        if self._state is None:
            self._take()
        if self.engine.is_interrupted:
            self._end_what_has_not_begun()
        self._admit()
        self._run_prompts()
        if self._running:
            self._run_round()

    def _take(self):
        """The engine's buffers; no slot of them is in use."""
        self._state = hold(self.engine, self._shape)
        self._ahead = Ahead(self.engine, self._state, list(range(self.slots)), self._width)
        self.engine.ops.upload(self._state.done, np.full(self.slots, STOPPED, np.int32))

    def _let_go(self):
        if self._state is None:
            return
        try:
            self._ahead.close()
        finally:
            self._state = self._ahead = None
            release(self.engine)

    @property
    def _running(self):
        """Lanes that decode."""
        return self._ahead.lanes if self._ahead else []

    def _admit(self):
        """Waiting requests get the lowest free slots, in their order."""
        while self._waiting and self._ahead.free:
            handle = self._waiting.popleft()
            if handle.request.max_tokens == 0:
                self._end_without_a_token(handle, "length")
                continue
            slot = heappop(self._ahead.free)
            lane = Seat.of(self.engine, handle.request, slot, Schedule(self.block))
            lane.handle = handle
            self._joining.append(lane)

    def _leave(self):
        """Cancelled requests go, with what was not given out yet."""
        while self._cancelled:
            handle = self._cancelled.popleft()
            with suppress(ValueError):
                self._waiting.remove(handle)  # in place: another thread may submit meanwhile
            self._ready = deque(one for one in self._ready if one.handle is not handle)
            for lane in [one for one in (*self._joining, *self._running) if one.handle is handle]:
                self._end_lane(lane)

    def _end_what_has_not_begun(self):
        """An interruption ends requests that have no token yet; the others end with their next round."""
        for handle in [*(lane.handle for lane in self._joining), *self._waiting]:
            self._end_without_a_token(handle, "interrupted")
        self._waiting.clear()
        for lane in list(self._joining):
            self._end_lane(lane)

    def _end_without_a_token(self, handle, reason):
        text = "" if self.engine.tokenizer else None
        self._ready.append(Item(handle, Round([], text, finish_reason=reason)))

    def _end_lane(self, lane):
        """A lane ends before its text does."""
        if lane in self._joining:
            self._joining.remove(lane)
        self._ahead.leave(lane)

    def _drop_all(self):
        self._waiting.clear()
        self._ready.clear()
        self._cancelled.clear()
        self._joining.clear()

    def _run_prompts(self):
        """One pass over what is next of the oldest prompts, as many as have room in it; it is shorter while
        others wait for it. A prompt that begins as one of them does waits for its rows."""
        engine, s = self.engine, self._state
        room = min(s.chunk, engine.ops.chunk_between_rounds) if self._running else s.chunk
        parts, ends, count = {}, {}, 0  # by lane: its part, the rows with it; all rows
        for lane in self._joining:
            if count == room:
                break
            if not lane.has_begun:
                if gains_by_waiting(engine, s, lane.request, [one.request for one in parts]):
                    break
                self._begin(lane)
            parts[lane] = Part.next(lane.request, lane.slot, room - count)
            count += parts[lane].count
            ends[lane] = count
        if not parts:
            return
        since = time.perf_counter()
        prompt_pass(engine, s, list(parts.values()))
        ended = [lane for lane in parts if not lane.request.rows_left]
        rows = [(parts[lane], ends[lane] - 1) for lane in ended]
        firsts = first_tokens(engine, s, rows, count) if ended else []
        seconds = time.perf_counter() - since
        for lane in parts:
            lane.seconds += seconds
        for lane, first in zip(ended, firsts, strict=True):
            self._end_prompt(lane, *first)

    def _begin(self, lane):
        """A prompt is about to run: its slot gets what others hold of it by now."""
        how = self.engine, self._state, lane.request, lane.slot
        bring(*how, self._ahead.free)
        begin_prompt(*how)
        lane.has_begun = True

    def _end_prompt(self, lane, first):
        """The request decodes. Where its prompt has no numbers but rows were reused, all rows run: it may be
        theirs."""
        if first[0] < 0 and lane.request.rows_reused:
            self._ahead.pass_over(lane.slot)
            self._state.prefixes[lane.slot].cut(0)
            begin_prompt(self.engine, self._state, lane.request, lane.slot)
            return
        self._joining.remove(lane)
        first_round(self.engine, self._state, lane, first, lane.seconds)
        self._ahead.join(lane)
        self._give(lane)

    def _run_round(self):
        """One round of all lanes that decode."""
        lanes = list(self._running)
        self._ahead.next()
        for lane in lanes:
            self._give(lane)

    def _give(self, lane):
        """What a lane can give goes out; behind it, why it broke off, which its neighbours do not notice."""
        while lane.given:
            self._ready.append(Item(lane.handle, lane.given.popleft()))
        if lane.error is not None:
            self._ready.append(Item(lane.handle, Round([], "", finish_reason="error"), lane.error))


def refuse_alone(options):
    """Refuse what a request of a batch cannot have of its own. Errors: UserError naming it."""
    for name in SHARED:
        if options.get(name) is not None:
            raise UserError(
                f"{name} belongs to the whole batch",
                f"give it there: Batch(engine, {name}={options[name]!r})",
            )
    if options.get("samples") not in (None, 1):
        raise UserError(
            "a request of a batch has one answer", "submit it once a sample, with seeds of their own"
        )
    if options.get("trace"):
        raise UserError("a request of a batch has no trace", "leave out trace, or use stream")
    if options.get("accept") == "reject":
        raise UserError(
            "accept='reject' cannot run in a batch: its text depends on the rows verified, which neighbours "
            "share",
            "leave it out, or use generate",
        )
