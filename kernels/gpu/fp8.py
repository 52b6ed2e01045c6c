"""FP8 weights on a GPU: packed as kernels/cuda/fp8.cuh says, whatever the activations, for plain and fast
kernels."""

from dataclasses import dataclass

import numpy as np

from ..weight import EXPERT_PAIRS, PAIRS, TILE, Weight
from .split import CHUNK, SHARED_PER_BLOCK, SHARED_PER_SM, STATIC, TOKEN_TILES, passes_of

SCALE_ROWS, SCALE_K = 8, 128  # that share a scale
MOST_RING = 65536  # bytes of weights on their way to a multiprocessor


def pieces(whole, each):
    """How many of so many each make a whole, rounded up."""
    return -(-whole // each)


@dataclass(frozen=True)
class Ring:
    """Of a kernel of the skinny family (skinny_ring.cuh): chunks of a slot, slots of a warp, bytes of all."""

    chunks: int
    slots: int
    nbytes: int

    @property
    def defines(self):
        """-D of the kernel, which show in no bit."""
        return {"FP8": 1, "STEP_CHUNKS": self.chunks, "STEPS_AHEAD": self.slots}


def ring(cut, cols, token_tiles, is_normed, sms):
    """The Ring of a launch: as large as there is room for, or None."""
    own = pieces(pieces(cols, CHUNK), cut.slices * cut.warps)  # chunks of a warp in a tile
    chunks = next(n for n in (4, 3, 2, own) if own % n == 0 or own > n == 2)
    slot = 8 * pieces(chunks * (512 + 8), 16) * 2
    blocks = max(cut.blocks, pieces(cut.slices, sms))  # of a multiprocessor: slices may wait for each other
    most = min(SHARED_PER_BLOCK, SHARED_PER_SM // blocks - 1024) - STATIC
    room = min(most - cut.shared(cols, token_tiles, is_normed), MOST_RING)
    slots = room // (cut.warps * slot)
    return Ring(chunks, slots, 128 * pieces(cut.warps * slots * slot, 128)) if slots >= 2 else None


def passes(cut, cols, rows, is_normed, sms):
    """As Split.passes, of rows beside which there is room for a ring."""
    tiles = [n for n in TOKEN_TILES if ring(cut, cols, n, is_normed, sms)]
    return passes_of(rows, 8 * max(tiles))


def tile_bytes(cols):
    """Of a packed row tile: fp8_tile of fp8.cuh."""
    return 512 * pieces(cols, CHUNK) + 128 * pieces(8 * pieces(cols, SCALE_K), 128)


def scale_count(rows, cols):
    """Of rows x cols codes."""
    return pieces(rows, SCALE_ROWS) * pieces(cols, SCALE_K)


def pack(backend, parts, role, experts=0):
    """`Weight` of FP8 tensors stacked along rows, of `experts` or, 0, of a matrix."""
    is_paired, count = role in (PAIRS, EXPERT_PAIRS), max(experts, 1)
    rows, cols = sum(part.shape[0] for part in parts) // count, int(np.prod(parts[0].shape[1:]))
    half = rows // 2 if is_paired else min(rows, TILE // 2)
    stride = TILE // 2 if is_paired else TILE
    tiles = pieces(half if is_paired else rows, stride)
    sizes = [half if is_paired else rows, rows - half]
    stored = backend.load(parts, np.uint8)
    end = 4 * scale_count(count * rows, cols)
    scales, codes = stored[:end], stored[end:]
    data = backend.empty((count, tiles, tile_bytes(cols)), np.uint8)
    args = [codes, scales, data, *sizes, half, stride, tiles, cols, rows]
    grid = pieces(tiles * pieces(cols, CHUNK) * 32, 256)
    backend.launch("pack_fp8.cu", "pack_fp8", (grid, count), 256, 0, args)
    shape = (experts, rows, cols) if experts else (rows, cols)
    layout = "packed pairs" if is_paired else "packed"
    return Weight(shape, "fp8", layout, (data if experts else data[0],))
