from collections import deque
from dataclasses import dataclass
from typing import Any
from .request import Request
from .loop import rounds_of
from .stats import Timing
from .errors import UserError
@dataclass(eq=False)
class Handle:
    request: Any
    @property
    def prompt_tokens(self): return len(self.request.ids)
@dataclass(frozen=True)
class Item:
    handle: Any
    round: Any
    error: Any = None
class Batch:
    def __init__(self, engine, slots=1, ctx=None, block=None, verify="auto", drafter=True):
        self.engine, self.slots, self.ctx, self.given = engine, slots, ctx, {"block": block, "verify": verify}
        self.waiting, self.cancelled = deque(), set()
    def submit(self, prompt, **options):
        was, self.engine.is_busy = self.engine.is_busy, False
        try: h = Handle(Request.of(self.engine, prompt, options | self.given))
        finally: self.engine.is_busy = was
        self.waiting.append(h)
        return h
    def cancel(self, handle): self.cancelled.add(handle)
    def close(self): self.waiting.clear()
    def __iter__(self):
        while self.waiting:
            h = self.waiting.popleft()
            if h in self.cancelled: continue
            rounds = rounds_of(self.engine, h.request, Timing())
            for r in rounds:
                if h in self.cancelled: break
                yield Item(h, r)
            rounds.close()
