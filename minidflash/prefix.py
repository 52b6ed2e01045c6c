"""What the caches of a slot hold of a text, so that a prompt which begins alike runs only what is new."""

from dataclasses import dataclass, field, replace
from itertools import count

BEGUN = count(1)  # texts


@dataclass
class Prefix:
    """Ids whose rows the caches hold with the bits of a prompt's pass, row 0 first.

    It lies with the buffers that it tells of: whoever runs on them, what the next prompt reuses is found by
    comparing ids. ids: of the target's rows. anchor: the id behind the last row that a round left: chosen,
    not run. injected: how many of the rows the drafter's caches hold. waiting: how many of the last rows have
    context features that wait for injection, where the last round left them. top: one past the last row
    written since row 0 was; a ring lost the keys that lie its length before it. prompt: ids of the newest
    prompt that began here. used: when that was, as a number that grows.
    """

    ids: list = field(default_factory=list)
    anchor: int = -1
    injected: int = 0
    waiting: int = 0
    top: int = 0
    prompt: int = 0
    used: int = 0

    def begin(self, engine, s, request):
        """The first row that a prompt must run, from which on rows are forgotten: 0 where it may not reuse
        any."""
        if request.resumes and request.drafts and s.slots == 1:
            self.inject_waiting(engine, s)
        row = self.holds(engine, s, request)
        self.cut(row)
        self.prompt, self.used = len(request.ids), next(BEGUN)
        return row

    def holds(self, engine, s, request):
        """How many rows of a prompt need not run. Its last row always runs, since the first token is chosen
        from it."""
        from .layers import COMMITS, addressed_by_position

        # What another mixer keeps is of its newest row alone.
        mixers = {layer.mixer for layers, _ in parts(engine, s, request) for layer in layers}
        if not request.resumes or not all(COMMITS[mixer] is addressed_by_position for mixer in mixers):
            return 0
        most = min(self.injected if request.drafts else len(self.ids), len(request.ids) - 1)
        row = alike(self.ids, request.ids, most)
        return row if self.reaches(engine, s, request, row) else 0

    def inject_waiting(self, engine, s):
        """The drafter's caches get what waits, if the device is where the last whole round left it."""
        from .drafter import inject_fresh

        found = [int(engine.ops.download(number)[0]) for number in (s.start, s.fresh)]
        if self.waiting and found == [len(self.ids), self.waiting]:
            inject_fresh(engine.ops, engine.drafter, s)
            self.injected, self.waiting = len(self.ids), 0

    def reaches(self, engine, s, request, row):
        """Whether the caches hold the keys before `row` that rows from there on see."""
        return all(
            (max(0, row - layer.window + 1) if layer.window else 0) + cache.k.shape[2] >= self.top
            for layers, caches in parts(engine, s, request)
            for layer, cache in zip(layers, caches, strict=True)
        )

    def cut(self, count):
        """Rows from `count` on are forgotten."""
        del self.ids[count:]
        self.injected, self.waiting = min(self.injected, count), 0
        self.top = self.top if count else 0

    def write(self, end):
        """A pass is about to write rows up to `end`, not included: what it overwrites is lost from now on,
        whether the pass ends or not."""
        self.top = max(self.top, end)

    def add(self, ids, waiting=None):
        """Rows were written as a prompt's pass writes them. waiting: how many of all rows' context features
        still wait for injection; None: these are not for the drafter."""
        self.ids += ids
        self.waiting = waiting or 0
        if waiting is not None:
            self.injected = len(self.ids) - waiting

    def follow(self, tokens, waiting):
        """A round with rows like a prompt's committed tokens: its rows hold the anchor and all but the last
        one."""
        self.add([self.anchor, *tokens[:-1]], waiting)
        self.anchor = tokens[-1]

    def copy(self, count):
        """What another slot holds that got the first `count` rows of this one's caches."""
        found = replace(self, ids=self.ids[:count])
        found.cut(count)
        return found


def alike(ids, others, most):
    """How many of the first `most` ids are the same, which both have at least."""
    low, high = 0, most
    while low < high:
        half = (low + high + 1) // 2
        low, high = (half, high) if ids[low:half] == others[low:half] else (low, half - 1)
    return low


def parts(engine, s, request):
    """(layers, their caches) of the models that take part in a run."""
    target = engine.target.config.layers, s.caches
    return [target, (engine.drafter.config.layers, s.drafter_caches)] if request.drafts else [target]
