"""How much memory a pair needs, before a weight is read: the run's own allocation,
with buffers that only count."""

import os
from dataclasses import dataclass

import numpy as np

from .config import WIDEST
from .errors import UserError
from .rope import table_bytes
from .state import make_state
from .values import told, whole

FILLED = 0.95  # of a GPU's free memory: the rest is for kernels, the driver and what does not fit exactly
KEPT_FREE = 0.9  # of all free memory, where nobody said how long the context is


class Counting:
    """An Ops whose arrays have a shape and a size but take no memory.
    ops: whose storage types and workspace rule."""

    def __init__(self, ops):
        self.backend, self._types = (
            ops.backend,
            {kind: np.zeros(1, ops.array((1,), kind).dtype) for kind in ("A", "f32", "i32")},
        )

    def array(self, shape, kind):
        return np.broadcast_to(self._types[kind], shape)

    def upload(self, buffer, values):
        pass


@dataclass(frozen=True)
class Plan:
    """What `load` will hold. ctx: positions of a run. limit: that the target allows.
    chunk: prompt tokens in one pass.

    memory: name -> bytes: weights, rope_tables, target_cache, drafter_cache, workspace.
    """

    ctx: int
    limit: int
    chunk: int
    memory: dict


def make_plan(ops, pair, ctx=None, chunk=None, block=None):
    """The Plan of a pair on a backend.

    ctx: None: what the target allows and memory holds. chunk: None: the backend's. block: None: as trained.
    Errors: UserError for a context that the target does not allow, or a GPU's memory does not hold.
    Source: engine.md 5 (`--ctx`), F71.
    """
    limit, chunk = pair.target.config.max_positions, chunk or ops.prefill_chunk
    if ctx is not None and not 1 <= ctx <= limit:
        raise UserError(f"context of {told(ctx)} positions: the target allows 1 to {limit}", "change --ctx")

    def memory(positions):
        return needed(ops, *pair.configs, positions, block, min(chunk, positions), pair.weights)

    def total(positions):
        return sum(memory(positions).values())

    ctx = ctx or fitting_context(ops, limit, total)
    check_fit(ops, ctx, total)
    return Plan(ctx, limit, min(chunk, ctx), memory(ctx))


def needed(ops, target, drafter, ctx, block=None, chunk=256, weights=0, slots=1, rejects=False):
    """Bytes of what a run on `ops` holds, as Plan.memory.

    target, drafter: configs (drafter None: plain decoding). ctx: positions. block: default what the drafter
    was trained on. weights: their bytes. slots: texts at a time, each of ctx positions. rejects:
    as of make_state. Errors: none.
    """
    tables = table_bytes(positions_of(target, drafter, ctx))
    block = 1 if drafter is None else block or drafter.block
    drafter = None if block == 1 else drafter
    stops = len(target.stop_ids)
    held = make_state(Counting(ops), target, drafter, stops, slots, ctx, block, chunk, rejects).memory
    return {"weights": weights, "rope_tables": tables} | held


def batch_context(engine, slots, ctx, block):
    """Positions of each slot of a batch.

    slots: texts at a time. ctx: asked for, None: what memory holds, at most the engine's. block: B, 1: plain.
    Errors: UserError for more than the engine has, or than a GPU's memory holds.
    """
    ops = engine.ops

    def total(positions):
        return _buffers(engine, slots, positions, block)

    if ctx is None:
        ctx = min(engine.ctx, fitting_context(ops, engine.ctx, total))
    ctx = whole("ctx", ctx, 1, engine.ctx)
    free = FILLED * ops.backend.free_memory() if hasattr(ops.backend, "free_memory") else None
    if free is not None and total(ctx) > free:
        need = f"{slots} slots of {ctx} positions need {total(ctx) / 1e9:.1f} GB"
        raise UserError(
            f"{need}, the GPU has {free / 1e9:.1f} GB for them", "fewer slots, or a lower ctx", code=3
        )
    return ctx


def fitting_slots(engine, most, ctx, block, rejects):
    """Slots of a run that memory holds, 1 to `most`, once the State of the run before is given up.

    ctx: positions of each. block: B, 1: plain. rejects: as of make_state. Errors: none.
    """
    free = getattr(engine.ops.backend, "free_memory", free_memory)()
    if free is None:
        return most
    room = KEPT_FREE * (free + (sum(engine.state.memory.values()) if engine.state else 0))
    fits = (n for n in range(most, 1, -1) if _buffers(engine, n, ctx, block, rejects) <= room)
    return next(fits, 1)


def _buffers(engine, slots, ctx, block, rejects=False):
    """Bytes that a State of an engine takes."""
    configs = engine.target.config, engine.drafter and engine.drafter.config
    held = needed(engine.ops, *configs, ctx, block, min(engine.chunk, ctx), 0, slots, rejects)
    return sum(held.values()) - held["rope_tables"]  # they are there


def positions_of(target, drafter, ctx):
    """(rope, rotary width) -> positions that its tables of angles hold:
    equal ones of both models share them."""
    found = dict.fromkeys(target.rotations, ctx + WIDEST)
    for rotation in drafter.rotations if drafter else ():
        found[rotation] = max(found.get(rotation, 0), drafter.context(ctx) + WIDEST)
    return found


def fitting_context(ops, limit, total):
    """The longest context that memory holds: `limit`, halved until all fits, 512 at the least.

    total: positions -> bytes. A share of the free memory is left for others. Returns positions. Errors: none.
    """
    free = getattr(ops.backend, "free_memory", free_memory)()
    ctx = limit
    while free and ctx > 512 and total(ctx) > KEPT_FREE * free:
        ctx = max(512, ctx // 2)
    return ctx


def check_fit(ops, ctx, total):
    """Refuse a context that a GPU's memory does not hold, before a weight is read.

    total: positions -> bytes. The host is not asked: it may swap, and says itself when it cannot.
    Errors: UserError, code 3, with the context that fits.
    """
    if not hasattr(ops.backend, "free_memory"):
        return
    free = FILLED * ops.backend.free_memory()
    if total(ctx) <= free:
        return
    one = (total(2048) - total(1024)) / 1024  # bytes of a position
    fits = int((free - total(1024)) / one + 1024) // 64 * 64
    need, have = f"{total(ctx) / 1e9:.1f} GB", f"{free / 1e9:.1f} GB"
    words = f"{ctx} positions need {need} with the weights, the GPU has {have} for them"
    if fits < 64:
        raise UserError(words, "take a smaller model or another GPU, or use --backend numba", code=3)
    raise UserError(words, f"--ctx {fits} fits", code=3)


def free_memory():
    """Bytes of memory that programs can still get, or None where the system does not say."""
    found = [size for size in (_system_memory(), _room_under_limit()) if size is not None]
    return min(found, default=None)


def _system_memory():
    """Bytes that the system has free, or None."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _room_under_limit():
    """Bytes of address space that `ulimit -v` leaves this process, or None: no limit, or not said."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        with open("/proc/self/statm") as file:
            return max(0, limit - int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError):
        return None
