"""A run with every kernel call looked at: `watching` gives an engine Ops that keep what each call read and
wrote."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from minidflash.kernels.ops import Ops
from minidflash.kernels.table import ROWS

CACHES = "cache_k", "cache_v"
UNSEEN = "work", "cos", "sin", "mass", "narrow"  # scratch, tables, and laws that greedy text does not have
READ_ELSEWHERE = {("attend", "cache_k"), ("attend", "cache_v"), ("linear_add", "taps"),
                  ("experts_down", "taps"), ("join", "taps")}  # fmt: skip  # qkv and fuse have them


@dataclass
class Call:
    """A kernel call. round: 0 in the prompt. after: host copies of its arrays behind the call, of caches the
    rows of slot 0 that it stored, (..., G, T, K); numbers as they are. logits: of a head, f32 (M, V), of its
    picked rows."""

    name: str
    round: int
    after: dict
    logits: object = None


class Watched(Ops):
    """Ops that run every call at once, recorded or not, and keep a Call of each in `calls`."""

    def __init__(self, backend, calls):
        super().__init__(backend)
        self.calls, self.round = calls, 0
        self.rounds_ahead, self.start = 0, self._start

    @property
    def for_prefill(self):
        """As Ops has it; the calls go to the same list."""
        if self._for_prefill is None:
            make = getattr(self.backend, "for_prefill", None)
            self._for_prefill = Watched(make(), self.calls) if make else self
        return self._for_prefill

    def __getattr__(self, name):
        call, row = super().__getattr__(name), ROWS[name]

        def watched(*args):
            given = {arg: value for arg, value in zip(row.args, args, strict=True) if self._is_seen(row, arg)}
            call(*args)
            after = {arg.name: self._copy(value) for arg, value in given.items() if arg.name not in CACHES}
            after |= {
                arg.name: self._stored(value, after) for arg, value in given.items() if arg.name in CACHES
            }
            logits = self._logits(*args) if name == "head" else None
            self.calls.append(Call(name, self.round, after, logits))

        self.__dict__[name] = watched
        return watched

    @staticmethod
    def _is_seen(row, arg):
        return arg.type != "W" and arg.name not in UNSEEN and (row.name, arg.name) not in READ_ELSEWHERE

    def _copy(self, value):
        return self.download(value) if hasattr(value, "shape") else value

    def _stored(self, cache, address):
        """Slot 0's rows of a cache (..., N, G, S, K) at the keys of a call; of inactive rows any."""
        rows = np.where(address["pos"] >= 0, address["at"], 0) % cache.shape[-2]
        first, last = rows.min(), rows.max() + 1
        return self.download(cache[..., 0, :, first:last, :])[..., rows - first, :]

    def _logits(self, x, pick, norm, eps, w, *_):
        """What the head itself never stores: head_logits of the same rows, by a kernel of the same
        backend."""
        rows = self.array((len(pick), x.shape[1]), "A")
        self.upload(rows, self.download(x)[self.download(pick)])
        out = self.array((len(pick), w.rows), "f32")
        work = self.array((self.backend.work_size(len(pick), w.cols, w.rows),), "f32")
        self.backend.head_logits(rows, norm, eps, w, 1.0, 0.0, work, out)
        return self.download(out)

    def program(self, fn, bucket=None, is_timed=False):
        """What runs `fn` again at each launch, as a round of its own, which nobody times."""
        return Eager(self, fn)

    def _start(self, program, *buffers):
        since = time.perf_counter()
        program.launch()
        copies = [self.download(buffer) for buffer in buffers]
        seconds = time.perf_counter() - since
        return lambda: (seconds, *copies)


@dataclass
class Eager:
    """Stands where a recorded program does."""

    ops: Watched
    fn: object
    clock: object = None

    def launch(self):
        self.ops.round += 1
        self.fn()


@contextmanager
def standing_in(engine, name, value):
    """Inside, this is the engine's attribute; its programs, recorded with the other, are dropped on both
    sides."""
    kept = getattr(engine, name)
    setattr(engine, name, value)
    engine.programs.clear()
    try:
        yield value
    finally:
        setattr(engine, name, kept)
        engine.programs.clear()


@contextmanager
def watching(engine):
    """Inside, the engine's calls are kept: yields the list of Calls."""
    calls = []
    with standing_in(engine, "ops", Watched(engine.ops.backend, calls)):
        yield calls
