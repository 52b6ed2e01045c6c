"""FP8 weights on a GPU: packed as kernels/cuda/fp8.cuh says, whatever the activations, for plain and fast
kernels."""

from dataclasses import replace
from math import prod

import numpy as np

from ..fp8 import BLOCK, SCALE_ROWS, scale_shape
from ..weight import EXPERT_PAIRS, PAIRS, Weight
from . import split
from .split import CHUNK, tiling

SPAN = BLOCK // CHUNK  # chunks that share a scale are one warp's
MOST_CHUNKS = 16  # of a step: a lane has each scale


def pieces(whole, each):
    """How many of so many each make a whole, rounded up."""
    return -(-whole // each)


MEASURED = split.read(split.CUTS, "fp8", SPAN)


def recut(cut, cols):
    """The Split of a product in FP8 that is cut so in bf16 and was not measured itself: where 16 warps share
    a tile evenly and the cut's warps do not, 16. Measured: 12 to 16 warps, gate and up of Qwen3-8B, 3.7 us a
    layer (H200, 16 rows)."""
    cut, chunks = replace(cut, span=SPAN), pieces(pieces(cols, CHUNK), cut.slices)
    if chunks % cut.warps and not chunks % 16 and cut.warps < 16 and cut.blocks == 1:
        return replace(cut, warps=16, chunks=4, ahead=1)
    return cut


def every_cut(outputs, cols, sms, whole=False):
    """The Splits of a product of bf16 and of FP8. whole: as split.choose's."""
    cut = split.choose(outputs, cols, sms, whole)
    return cut, MEASURED.get((outputs, cols, sms)) or recut(cut, cols)


def cut_of(backend, *weights, whole=False):
    """The Split by which the skinny family sums a product of one matrix or two that are alike."""
    cuts = every_cut(sum(w.rows for w in weights), weights[0].cols, backend.sms, whole)
    return cuts[weights[0].dtype == "fp8"]


def defines(cut, chunks, ahead, cols):
    """-D of a kernel of the skinny family: a chunk has half of the bytes, so twice as many are on their way,
    of a tile or, where it has no more for a warp, of the next ones too."""
    own = SPAN * pieces(pieces(cols, SPAN * CHUNK), cut.slices * cut.warps)
    step = min(max(2 * chunks // SPAN, 1) * SPAN, own, MOST_CHUNKS)
    return {
        "FP8": 1, "STEP_CHUNKS": step, "STEPS_AHEAD": max(1, 2 * chunks * ahead // step),
        "ASKED_CHUNKS": 0,  # measured: more in L2 stands in the way
    }  # fmt: skip


def tile_bytes(cols):
    """Of a packed row tile: fp8_tile of fp8.cuh."""
    return 1024 * pieces(cols, 2 * CHUNK) + 128 * pieces(8 * pieces(cols, BLOCK), 128)


def scale_count(rows, cols):
    """Of rows x cols codes."""
    return prod(scale_shape(rows, cols, SCALE_ROWS))


def pack(backend, parts, role, experts=0):
    """`Weight` of FP8 tensors stacked along rows, of `experts` or, 0, of a matrix."""
    is_paired, count = role in (PAIRS, EXPERT_PAIRS), max(experts, 1)
    rows, cols = sum(part.shape[0] for part in parts) // count, int(np.prod(parts[0].shape[1:]))
    tiles, half, stride, sizes = tiling(rows, is_paired)
    stored = backend.load(parts, np.uint8)
    end = 4 * scale_count(count * rows, cols)
    scales, codes = stored[:end], stored[end:]
    data = backend.empty((count, tiles, tile_bytes(cols)), np.uint8)
    args = [codes, scales, data, *sizes, half, stride, tiles, cols, rows]
    grid = pieces(tiles * pieces(cols, 2 * CHUNK) * 64, 256)
    backend.launch("pack_fp8.cu", "pack_fp8", (grid, count), 256, 0, args)
    shape = (experts, rows, cols) if experts else (rows, cols)
    layout = "packed pairs" if is_paired else "packed"
    return Weight(shape, "fp8", layout, (data if experts else data[0],))
