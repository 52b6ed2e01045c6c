"""How much memory a pair needs, before a weight is read: the run's own allocation, with buffers that only count."""

import os

import numpy as np

from .state import make_state


class Counting:
    """An Ops whose arrays have a shape and a size but take no memory. ops: whose storage types and workspace rule."""

    def __init__(self, ops):
        self.backend, self._types = ops.backend, {kind: ops.array((1,), kind) for kind in ("A", "f32", "i32")}

    def array(self, shape, kind):
        return np.broadcast_to(self._types[kind], shape)

    def upload(self, buffer, values):
        pass


def needed(ops, target, drafter, ctx, block=None, chunk=256):
    """Bytes of what a run on `ops` holds besides weights.

    target, drafter: configs (drafter None: plain decoding). ctx: positions. block: default what the drafter was
    trained on. Returns {"target_cache", "drafter_cache", "workspace"}. Errors: none. Source: engine.md 5, F71.
    """
    block = 1 if drafter is None else block or drafter.block
    drafter = None if block == 1 else drafter
    return make_state(Counting(ops), target, drafter, target.stop_ids, 1, ctx, block, chunk).memory


def weight_bytes(bound):
    """Bytes of bound checkpoint tensors as `engine.build` keeps them: matrices as stored, vectors and F16 in f32."""
    total = 0
    for parts in bound.values():
        is_half = len(parts[0].shape) == 2 and all(part.dtype == "BF16" for part in parts)
        total += sum(int(np.prod(part.shape)) for part in parts) * (2 if is_half else 4)
    return total


def fitting_context(ops, target, drafter, limit, weights, chunk=256):
    """The longest context that memory holds: `limit`, halved until the buffers fit beside the weights.

    limit: positions the models allow. weights: their bytes. Keeps a tenth of the free memory for others; goes no
    lower than 512 positions. Returns positions. Errors: none. Source: engine.md 5 (`--ctx`), F71.
    """
    free = getattr(ops.backend, "free_memory", free_memory)()
    ctx = limit
    while free and ctx > 512:
        if weights + sum(needed(ops, target, drafter, ctx, chunk=chunk).values()) <= 0.9 * free:
            break
        ctx = max(512, ctx // 2)
    return ctx


def free_memory():
    """Bytes of memory that programs can still get, or None where the system does not say."""
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
