"""Variants of route, experts_up and experts_down for up to 8 pairs, as plain rounds have them: the bits of
kernels/gpu/experts.py, and less between one kernel's weights and the next one's.

A block of experts_up and one of experts_down share a multiprocessor (kernels/cuda/experts_few.cuh).
"""

from dataclasses import dataclass

from . import experts
from .split import CHUNK, SHARED_PER_BLOCK, SHARED_PER_SM

MOST_ROUTED = 16  # rows, as in route_few.cu
MOST_PAIRS, MOST_TURNS = 8, 16  # as in experts_few.cuh; row tiles of a cluster of experts_down_few
STATIC = 1024  # shared bytes that the kernels declare themselves, at most, with what a block costs beside
# Dynamic shared bytes of a block. Two of experts_up_few do not fit a multiprocessor: the scheduler would put
# them there while another is busy. One of experts_down_few fits beside one of those: its weights are on their
# way meanwhile.
LEAST_UP, MOST_UP = SHARED_PER_SM // 2, SHARED_PER_SM // 2 + 6 * 1024
MOST_DOWN = SHARED_PER_SM - MOST_UP - 2 * (1024 + STATIC)
MOST_SLOT, MOST_SLOTS = 16384, 16  # bytes of a slot; of a ring


@dataclass(frozen=True)
class Few:
    """How a product is launched. cut: experts.Cut, for its bits. rows: of tokens. slots: of the ring. units:
    of a warp in a slot. shared: dynamic bytes."""

    cut: experts.Cut
    rows: int
    slots: int
    units: int
    shared: int

    @property
    def threads(self):
        return 32 * (self.cut.warps + self.cut.finishers + 1)


def choose(cols, kind, row, token_rows, own=0):
    """The Few of experts with so many inputs, or None: shared memory has no room.
    own: bytes that the kernel needs itself."""
    cut = experts.choose(cols, kind, row)
    if cut is None or cols % 8 or kind == "fp8":  # no kernel of few pairs for it
        return None
    width, size, _ = experts.UNIT[kind]
    chunks = -(-cols // width) * width // CHUNK
    fixed = 2 * 512 * cut.warps + 64 * chunks * token_rows + own
    least, most = (LEAST_UP, MOST_UP) if row == "experts_up" else (0, MOST_DOWN)
    for units in range(cut.units, 0, -1):  # the fewer slots, the less there is to wait for
        slot = units * cut.warps * size
        slots = min((most - fixed) // slot, MOST_SLOTS)
        if slots > 1 and (slot <= MOST_SLOT or units == 1):
            return Few(cut, token_rows, slots, units, max(least, fixed + slots * slot))
    return None


def defines_of(few, cols, kind, act=0, has_large_scales=False):
    """-D of a kernel. Only STREAM_WARPS shows in the bits."""
    width, _, _ = experts.UNIT[kind]
    return {
        "TOKEN_TILES": 1, "STREAM_WARPS": few.cut.warps, "STEP_CHUNKS": few.cut.units,
        "FINISH_WARPS": few.cut.finishers, "RING_SLOTS": few.slots, "SLOT_UNITS": few.units,
        "TOKEN_ROWS": few.rows, "EVEN_UNITS": int(-(-cols // width) == few.cut.warps * few.cut.units),
        "MXFP4": int(kind == "mxfp4"), "LARGE_SCALES": int(has_large_scales), "ACT": act,
    }  # fmt: skip


def route(backend, x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert,
          share, first, order):  # fmt: skip
    (rows, cols), used, tiles = x.shape, expert.shape[1], -(-w.rows // experts.TILE)
    is_few = rows <= MOST_ROUTED and 1 < tiles <= experts.ROUTE_BLOCKS
    chunks, padded = -(-cols // CHUNK), experts.TILE * tiles
    pairs = 4 * 32 * rows
    meeting = experts.ROUTE_WARPS * max(512 * -(-rows // 8), 128 * rows)  # sums, squares before
    shared = chunks * (1024 + 64 * rows) + meeting + 64 + 4 * rows * padded + pairs
    is_few = is_few and shared + experts.STATIC <= SHARED_PER_BLOCK
    if w.layout != "packed" or not is_few or cols % 8 or cols > 8 * 32 * experts.ROUTE_WARPS:
        return experts.route(
            backend, x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert,
            share, first, order,
        )  # fmt: skip
    defines = {"STREAM_WARPS": experts.ROUTE_WARPS, "TOKEN_TILES": 1, "TOKEN_ROWS": rows}
    defines |= experts.route_defines(u_norm, expert_scale)
    args = [w.data, x, norm, u_norm, bias, expert_scale, pos, u, expert, share, first, order, touched]
    args += [eps, normalise, w.rows, used, cols]
    backend.launch(
        "route_few.cu", "route_few", tiles, 32 * experts.ROUTE_WARPS, shared, args, defines, cluster=tiles,
        dependent=backend.dependent,
    )  # fmt: skip
    return True


def experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h):
    rows, used, ffn = h.shape
    few = None
    if w.layout == "packed pairs" and rows * used <= MOST_PAIRS:
        few = choose(w.cols, w.dtype, "experts_up", rows)
    if few is None:
        return experts.experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h)
    args = [w.data, u, bias, expert, h, limit, alpha, used, ffn, w.cols]
    return _launch(backend, "experts_up_few", w, few, args, backend.sms, act)


def own_bytes(outputs, clusters):
    """Shared memory in which the products of a cluster's row tiles meet, or None: they are too many."""
    turns = -(-outputs // (experts.TILE * max(clusters, 1)))
    return 4 * experts.TILE * MOST_PAIRS * turns if turns <= MOST_TURNS else None


def experts_down(backend, h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work):
    (rows, used, _), tap_cols = h.shape, 0 if taps is None else taps.shape[1]
    clusters, few = backend.sms // 2, None
    own = own_bytes(w.rows, clusters)
    if w.layout == "packed" and rows * used <= MOST_PAIRS and own:
        few = choose(w.cols, w.dtype, "experts_down", rows * used, own)
    if few is None:
        return experts.experts_down(
            backend, h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work
        )
    tap_row = None if taps is None else tap_row
    args = [w.data, h, bias, expert, share, tap_row, x, taps, rows, used, w.rows, w.cols, tap_at, tap_cols]
    more = experts.adds_define(adds)
    return _launch(backend, "experts_down_few", w, few, args, 2 * clusters, cluster=2, more=more)


def _launch(backend, kernel, w, few, args, blocks, act=0, cluster=1, more=None):
    defines = defines_of(few, w.cols, w.dtype, act, w.has_large_scales) | (more or {})
    backend.launch(
        f"{kernel}.cu", kernel, blocks, few.threads, few.shared, args, defines, cluster=cluster,
        dependent=backend.dependent,
    )  # fmt: skip
    return True
