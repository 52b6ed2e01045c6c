"""One thread runs the batch; asyncio hands requests over and gets their rounds back."""

import asyncio
import logging
import threading
import time

from ..errors import UserError
from ..request import OPTIONS, checked, prompt_ids
from .metrics import Meters
from .refusal import Refusal

RETRY_S = 1  # a text takes about so long
LAST_WORDS_S = 5.0  # for error events to be sent, once the grace is over
log = logging.getLogger("minidflash.serve")


class Ticket:
    """An answer that somebody waits for. handle: the batch's. items: Rounds and Refusals that came.
    since: when it was asked for. newest: when its newest Round came, None before the first one."""

    def __init__(self, handle):
        self.handle, self.items, self.since = handle, asyncio.Queue(), time.monotonic()
        self.newest = None


class EngineThread:
    """The batch, the thread that runs it, and who waits for what.

    Everything but `_run` and what it calls belongs to the event loop that `start` was called on. error: why
    the batch could not be opened, or None. meters: counters. busy: answers that run or wait.
    """

    def __init__(self, open_batch, max_waiting, defaults):
        """open_batch: () -> Batch, called in the thread. max_waiting: answers beyond the batch's slots.
        defaults: keywords of a run that a request need not give."""
        self._open_batch, self.max_waiting, self._defaults = open_batch, max_waiting, defaults
        self.batch = self.error = self._loop = None
        self.meters, self.busy = Meters(), 0
        self.is_stopping, self._until, self._stops = False, float("inf"), None
        self._tickets, self._lock = {}, threading.Lock()  # of both threads, as are these two
        self._wake, self._is_ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="minidflash-engine", daemon=True)

    # ---- on the event loop ---------------------------------------------------------------------------------

    def start(self, on_open=None):
        """Begin. on_open: called on the loop once the batch is open, or `error` says why it is not."""
        self._loop, self._on_open = asyncio.get_running_loop(), on_open
        self._thread.start()

    async def end(self):
        """End the thread, as far as it listens: one that still loads does not."""
        self._is_ended = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, LAST_WORDS_S)

    @property
    def is_alive(self):
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop_soon(self, grace, then):
        """Take on nothing more, wait for what runs, after `grace` seconds tell it that it ends, call `then`.
        From any thread, or a signal's handler; a second call may shorten the grace."""
        self._until = min(self._until, time.monotonic() + grace)
        if self._loop is None:
            then()
        elif not self.is_stopping:
            self.is_stopping = True
            self._tell(self._stop, then)

    def _stop(self, then):
        self._stops = asyncio.ensure_future(self._stopped(then))  # a task that nobody holds may vanish

    async def _stopped(self, then):
        while self.busy and time.monotonic() < self._until:
            await asyncio.sleep(0.02)
        for ticket in self._all_tickets():
            ticket.items.put_nowait(Refusal(503, "the server stops", code="stopping"))
        until = time.monotonic() + LAST_WORDS_S
        while self.busy and time.monotonic() < until:
            await asyncio.sleep(0.02)
        then()

    def _all_tickets(self):
        with self._lock:
            return list(self._tickets.values())

    def place(self, answers):
        """Room for a request's answers, as a context manager. Errors: Refusal 503, 429, 400."""
        if self.is_stopping:
            raise Refusal(503, "the server stops", code="stopping")
        if self.batch is None:
            raise Refusal(503, "the model is loading", code="loading", retry_s=RETRY_S)
        most = self.batch.slots + self.max_waiting
        if answers > most:
            raise Refusal(400, f"n is {answers}, and this server takes on {most} answers at a time", "n")
        if self.busy + answers > most:
            words = f"all {self.batch.slots} slots are busy, and {self.max_waiting} answers wait already"
            raise Refusal(429, words, code="queue_full", retry_s=RETRY_S)
        return Place(self, answers)

    async def submit(self, asked, tickets):
        """Begin a request; each of its answers adds a ticket. Errors: Refusal."""
        try:
            ids = await asyncio.to_thread(
                self._prompt_ids, asked
            )  # a template and a long text take their time
            for number in range(asked.answers):
                own = self._defaults | asked.seeded(number) | {"template_args": None}  # they are in the ids
                with self._lock:  # a round may come before its ticket is known
                    ticket = Ticket(self.batch.submit(ids, **own))
                    self._tickets[ticket.handle] = ticket
                tickets.append(ticket)
        except UserError as error:
            raise Refusal.of(error) from error
        self.meters.begin(len(ids))
        self._wake.set()

    def _prompt_ids(self, asked):
        options, _ = checked(self.batch.engine, self._defaults | asked.options)
        return prompt_ids(self.batch.engine, asked.prompt, OPTIONS | options)

    def forget(self, ticket):
        """Nobody waits for this any more; what of it still runs ends."""
        with self._lock:
            del self._tickets[ticket.handle]
        self.batch.cancel(ticket.handle)

    def _came(self, ticket, item, now):
        """An item of the batch came. now: when, by time.monotonic."""
        is_first, before = ticket.newest is None, ticket.newest
        ticket.newest = now
        waited, gap = (now - ticket.since, None) if is_first else (None, now - before)
        if is_first:
            self.meters.reuse(ticket.handle.reused_tokens)
        self.meters.add(item.round, self.batch.engine.drafter is not None, waited, gap)
        ticket.items.put_nowait(item.round if item.error is None else Refusal.of(item.error))

    # ---- in the thread -------------------------------------------------------------------------------------

    def _run(self):
        try:
            self.batch = self._open_batch()
        except BaseException as error:  # noqa: BLE001 whoever started the server is told
            self.error = error
        if self._on_open:
            self._tell(self._on_open)
        while self.error is None and not self._is_ended:
            self._wake.wait()
            self._wake.clear()
            try:
                self._run_batch()
            except Exception as error:
                log.exception("a round failed")
                self._fail(error)

    def _run_batch(self):
        """Run until nothing waits."""
        for item in self.batch:
            with self._lock:
                ticket = self._tickets.get(item.handle)
            if ticket is not None:
                self._tell(self._came, ticket, item, time.monotonic())
            if self._is_ended:
                self.batch.close()
                return

    def _fail(self, error):
        refusal = Refusal.of(error) if isinstance(error, UserError) else Refusal(500, "the round failed")
        for ticket in self._all_tickets():
            self._tell(ticket.items.put_nowait, refusal)

    def _tell(self, function, *args):
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody listens
            pass


class Place:
    """Room for a request's answers. Left in whatever way, nothing of the request runs on."""

    def __init__(self, engine_thread, answers):
        self._thread, self._answers, self._tickets = engine_thread, answers, []

    def __enter__(self):
        self._thread.busy += self._answers
        return self

    def __exit__(self, *_):
        self._thread.busy -= self._answers
        for ticket in self._tickets:
            self._thread.forget(ticket)

    async def submit(self, asked):
        """Begin. Returns the tickets. Errors: Refusal."""
        await self._thread.submit(asked, self._tickets)
        return self._tickets
