"""How much memory a pair needs, before a weight is read: the run's own allocation,
with buffers that only count."""

import os

import numpy as np

from .errors import UserError
from .state import make_state

FILLED = 0.95  # of a GPU's free memory: the rest is for kernels, the driver and what does not fit exactly


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


def needed(ops, target, drafter, ctx, block=None, chunk=256):
    """Bytes of what a run on `ops` holds besides weights.

    target, drafter: configs (drafter None: plain decoding). ctx: positions. block: default what the drafter
    was trained on. Returns {"target_cache", "drafter_cache", "workspace"}. Errors: none.
    Source: engine.md 5, F71.
    """
    block = 1 if drafter is None else block or drafter.block
    drafter = None if block == 1 else drafter
    return make_state(Counting(ops), target, drafter, target.stop_ids, 1, ctx, block, chunk).memory


def weight_bytes(bound):
    """Bytes of bound checkpoint tensors as `engine.build` keeps them:
    matrices as stored, vectors and F16 in f32."""
    total = 0
    for parts in bound.values():
        is_half = len(parts[0].shape) == 2 and all(part.dtype == "BF16" for part in parts)
        total += sum(int(np.prod(part.shape)) for part in parts) * (2 if is_half else 4)
    return total


def fitting_context(ops, target, drafter, limit, weights, chunk=256):
    """The longest context that memory holds: `limit`, halved until the buffers fit beside the weights.

    limit: positions the target allows. chunk: prompt tokens in one pass, never more than the context.
    weights: their bytes. Keeps a tenth of the free memory for others; goes no lower than 512 positions.
    Returns positions.
    Errors: none. Source: engine.md 5 (`--ctx`), F71.
    """
    free = getattr(ops.backend, "free_memory", free_memory)()
    ctx = limit
    while free and ctx > 512:
        if weights + sum(needed(ops, target, drafter, ctx, chunk=min(chunk, ctx)).values()) <= 0.9 * free:
            break
        ctx = max(512, ctx // 2)
    return ctx


def check_fit(ops, target, drafter, ctx, weights, chunk=256):
    """Refuse a context that a GPU's memory does not hold, before a weight is read.

    Arguments as `fitting_context`. The host is not asked: it may swap, and says itself when it cannot.
    Errors: UserError, code 3, with the context that fits. Source: engine.md 5 (`--ctx`).
    """
    if not hasattr(ops.backend, "free_memory"):
        return
    free, chunk = FILLED * ops.backend.free_memory(), min(chunk, ctx)

    def total(positions):
        return weights + sum(needed(ops, target, drafter, positions, chunk=chunk).values())

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
