"""Fast variants of the rows: bf16 activations, bf16 weights packed in fragment order. The hook of the plain backend.

What a fast file offers is entered here; the backend (kernels/gpu/__init__.py) asks in this order:

* `pack(backend, parts, role)` when a weight is made. `pack` returns
  Weight(layout="packed") or None: then the weight stays plain, (rows, cols). It is only asked when activations are
  bf16 and all parts are BF16. Inside, `backend.raw(parts)` is a device array u16 (rows, cols) with the parts stacked,
  in a temporary that the next `raw` may reuse: the stream's order is enough, nothing waits. The packed array comes
  from `backend.empty(shape, np.uint16)`; its first axis counts groups of 16 rows, so that Weight.slice works.
* `FAST[row](backend, *args)` when a row is called, args in table order. It launches through `backend.launch` and
  returns True, or returns None before any launch to decline; the plain variant then runs. It must decline weights
  whose layout is plain. What it decides may depend on shapes, never on T alone: row r has the same bits for every T.
* `work_size(backend, rows, cols, outputs)`: f32 that fast variants need in `work` behind the counters, for a product
  of `rows` token rows with `cols` inputs and `outputs` outputs.

`work` begins with COUNTERS f32 slots that are u32 counters: zero when allocated, left at zero by every kernel. What
follows holds anything. backend.variants[row] says which variant ran last, "fast" or "plain".

backend.launch(file, kernel, grid, block, shared, args, defines=None, cluster=1, cooperative=False, dependent=False)
takes arrays for pointers (a slice of an array is a shifted pointer) and numbers for scalars. While a graph is being
prepared it only compiles and loads, so a row function must not depend on what kernels computed. backend.sms is the
number of multiprocessors.
"""

import numpy as np

from ..weight import TILE, Weight
from . import split

COUNTERS = 4096  # as in kernels/gpu/__init__.py, which imports this file
PAIRED = "packed pairs"  # a tile holds 8 gate rows and the 8 up rows that go with them
ROLES = {"embed", "head", "q", "kv", "o", "gate_up", "down", "fc"}


def run(backend, row, args):
    """True if a fast variant of `row` took the call."""
    function = FAST.get(row)
    return function is not None and bool(function(backend, *args))


def pack(backend, parts, role):
    """`Weight` in fragment order from checkpoint tensors stacked along rows, or None: keep it plain."""
    if role not in ROLES:
        return None
    raw = backend.raw(parts)
    rows, cols = raw.shape
    is_paired = role == "gate_up"
    tiles, chunks = tiles_of(rows, is_paired), -(-cols // split.CHUNK)
    data = backend.empty((tiles, chunks, 2, 32, 8), np.uint16)
    half = rows // 2 if is_paired else min(rows, TILE // 2)
    sizes = [half, half, TILE // 2] if is_paired else [rows, rows - half, TILE]
    grid = -(-tiles * chunks * 32 // 256)
    backend.launch("pack.cu", "pack", grid, 256, 0, [raw, raw[half:], data, *sizes, tiles, cols])
    return Weight(rows, cols, "bf16", PAIRED if is_paired else "packed", data)


def tiles_of(rows, is_paired=False):
    """16-row tiles of a packed weight."""
    return -(-rows // 2 // (TILE // 2)) if is_paired else -(-rows // TILE)


def work_size(backend, rows, cols, outputs):
    """f32 elements of workspace, counters not counted."""
    return 0


def passes(rows, most=split.ROWS):
    """(first, count) of passes of at most 32 token rows: a row's bits are the same in each."""
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


def defines_of(cut, token_tiles):
    """-D of a kernel of the skinny family."""
    return {
        "TOKEN_TILES": token_tiles, "STREAM_WARPS": cut.warps, "STEP_CHUNKS": cut.chunks,
        "STEPS_AHEAD": cut.ahead, "BLOCKS_PER_SM": cut.blocks,
    }  # fmt: skip


def launch(backend, name, tiles, cut, cols, rows, args):
    """One pass of a kernel of the skinny family. args: the kernel's, in order."""
    token_tiles = cut.token_tiles(cols, rows)
    backend.launch(
        f"{name}.cu", name, cut.grid(tiles, backend.sms), cut.threads, cut.shared(cols, token_tiles), args,
        defines_of(cut, token_tiles), dependent=getattr(backend, "dependent", False),
    )  # fmt: skip


def linear_add(backend, a, w, bias, tap_row, tap_at, x, taps, work):
    if w.layout != "packed":
        return None
    cut, tiles = split.choose(w.rows, w.cols, backend.sms), tiles_of(w.rows)
    for first, count in passes(len(a)):
        here = slice(first, first + count)
        args = [
            w.data, a[here], bias, None if taps is None else tap_row[here], x[here], taps, work,
            work[COUNTERS:], count, w.rows, w.cols, cut.slices, tap_at, 0 if taps is None else taps.shape[1],
        ]  # fmt: skip
        launch(backend, "linear_add_fast", tiles, cut, w.cols, count, args)
    return True


FAST = {"linear_add": linear_add}  # row of the table -> function(backend, *args) -> True, or None to decline
