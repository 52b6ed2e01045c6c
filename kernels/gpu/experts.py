"""Fast variants of the rows of layers with experts, decoding or prompts: route, experts_up, experts_down.

Weights are bf16 in fragment order or MXFP4 (kernels/cuda/mxfp4.cuh), a matrix behind the other. How a tile's
K is dealt out over warps is a function of K and the type alone (`choose`), never of rows or of who else is
there.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from ..weight import EXPERT_PAIRS, EXPERTS, TILE, Weight
from . import COUNTERS, plain
from .split import CHUNK, SHARED_PER_BLOCK, STATIC, tiling

TOKEN_TILES = 1, 2, 4  # groups of 8 rows that kernels are compiled for
# k, bytes, and registers a lane of experts_units.cuh's unit
UNIT = {"bf16": (32, 1024, 8), "mxfp4": (64, 544, 5), "fp8": (64, 1024, 10)}
MOST_WARPS, MOST_AHEAD = 16, 3  # that stream; tiles on their way to registers
RINGED, MOST_RING = ("mxfp4",), 4  # types whose weights come to a ring in shared memory; its tiles
MOST_HELD = 8  # chunks of tokens that a warp keeps in registers, 4 a lane each
OTHERS = 64  # registers of a lane that do not hold weights under way
IN_FLIGHT = 50000  # bytes of weights a multiprocessor that should be under way at once
LARGE_SCALE = 129  # of MXFP4: 4; the multiplication of experts_units.cuh then takes two steps
ORDER_ROOM = 512  # as in experts.cuh
MOST_EXPERTS, MOST_LISTED = 1024, 256  # of a layer; runs of a block
STRETCHED_ROWS = 32  # up to which a block takes one stretch of all pieces
SUM_THREADS = 128  # of a block of experts_sum, as in experts_down_fast.cu
MERGED_ROWS = 4  # above, another kernel adds up the rows: fences beside the stream cost more
NARROW_ROWS = {"mxfp4": 16}  # up to which runs have 8 rows, since hardly any expert has more
STRIP = 20  # tiles, about, that the runs of an expert go over side by side in a prompt
ROUTE_WARPS, ROUTE_ROWS, ROUTE_BLOCKS = 16, 32, 8  # of a block; of a cluster, and its blocks at most


@dataclass(frozen=True)
class Cut:
    """warps: that stream a tile, which alone shows in the bits. units: of a warp in a tile. ahead: tiles on
    their way to registers, where shared memory has no room. finishers: warps that end tiles. asked: tiles
    asked for in L2 before the wait."""

    warps: int
    units: int
    ahead: int
    finishers: int = 4
    asked: int = 0

    def threads(self, frame):
        """Of a block: a ring has a warp that fills it."""
        return 32 * (self.warps + self.finishers + (frame.ring > 0))

    def shared(self, cols, kind, experts, frame):
        """Dynamic shared bytes: sums, plan, order, token rows, weights."""
        width, _, _ = UNIT[kind]
        chunks = -(-cols // width) * width // CHUNK
        each = 512 * frame.token_tiles
        sums, tokens = frame.sets * self.warps * each, frame.buffers * chunks * each
        plan = 16 * (experts + MOST_LISTED) + 4 * ORDER_ROOM + 128 * (experts // 32 + 1)
        return sums + plan + tokens + frame.ring * tile_bytes(cols, kind)


def tile_bytes(cols, kind):
    """Of packed weights, of which a ring holds tiles."""
    width, size, _ = UNIT[kind]
    return -(-cols // width) * size


@dataclass(frozen=True)
class Frame:
    """What a launch of a cut is compiled for: groups of 8 rows; runs whose tokens, tiles whose sums and tiles
    whose weights shared memory holds (ring 0: registers hold them). holds: warps keep a run's tokens in
    registers."""

    token_tiles: int
    buffers: int
    sets: int
    ring: int = 0
    holds: bool = False


MEASURED = {}  # (K, type, row) -> Cut


@cache
def choose(cols, kind, row):
    """The Cut of experts with so many inputs, or None: K is too long. row: of the table."""
    if (cols, kind, row) in MEASURED:
        return MEASURED[cols, kind, row]
    width, size, registers = UNIT[kind]
    units, best = -(-cols // width), None
    for warps, finishers in product(range(min(MOST_WARPS, units), 0, -1), (4, 2)):
        own = -(-units // warps)
        ahead = min((registers_of(warps + finishers) - OTHERS) // (own * registers), MOST_AHEAD)
        if ahead < 1:
            continue
        flight = min(1, ahead * warps * own * size / IN_FLIGHT)
        # of the warps' time that has a unit; fewer of them hide less
        score = units / (own * warps) * min(1, warps / 10) * max(flight, 0.5)
        if best is None or score > best[0] + 0.02:
            best = score, Cut(warps, own, ahead, finishers, 2 if row == "experts_down" else 0)
    return best and best[1]


def registers_of(warps):
    """That a lane of such a block can have."""
    return min(255, 65536 // (-(-warps // 4) * 4 * 32) // 8 * 8)


@cache
def frame(cut, cols, kind, experts, rows):
    """The Frame for so many token rows: of those that shared memory holds the first that covers them, or the
    widest."""
    found, rows = None, 8 if rows <= NARROW_ROWS.get(kind, 0) else rows
    for tiles in TOKEN_TILES:
        fitting = frames(cut, cols, kind, experts, tiles)
        suiting = [shape for shape in fitting if suits(shape, cols, kind)]
        found = suiting[0] if suiting else found
        if found and 8 * found.token_tiles >= rows:
            break
    return found


def frames(cut, cols, kind, experts, token_tiles):
    """Frames that shared memory holds, best first: those with a ring, as large as there is room for."""
    found, most = [], min(MOST_RING, max(cut.finishers, 2))
    if token_tiles == 1 and cut.units * UNIT[kind][0] // CHUNK <= MOST_HELD:
        holding = [Frame(1, 1, ring, ring, True) for ring in range(most, 1, -1)]
        found = [one for one in holding if cut.shared(cols, kind, experts, one) + STATIC <= SHARED_PER_BLOCK][
            :1
        ]
    for buffers, sets in (2, 2), (1, 2), (1, 1):
        shape = Frame(token_tiles, buffers, sets)
        room = SHARED_PER_BLOCK - STATIC - cut.shared(cols, kind, experts, shape)
        ring = min(room // tile_bytes(cols, kind), most)
        if ring > 0:
            found.append(replace(shape, ring=ring))
        if room >= 0:
            found.append(shape)
    return sorted(found, key=lambda shape: not shape.ring)


def suits(shape, cols, kind):
    """Whether memory is kept busy by all but the tile that is multiplied. bf16 does better in registers."""
    under_way = (shape.ring - 1) * tile_bytes(cols, kind)
    return not shape.ring or (kind in RINGED and (shape.ring == MOST_RING or under_way >= 0.8 * IN_FLIGHT))


def defines_of(cut, cols, kind, frame, act=0, has_large_scales=False):
    """-D of a kernel. Of the cut's and the frame's only STREAM_WARPS shows in the bits."""
    return {
        "TOKEN_TILES": frame.token_tiles, "TOKEN_BUFFERS": frame.buffers, "SUM_SETS": frame.sets,
        "STREAM_WARPS": cut.warps, "STEP_CHUNKS": cut.units, "STEPS_AHEAD": cut.ahead,
        "FINISH_WARPS": cut.finishers, "ASKED_TILES": cut.asked, "RING_TILES": frame.ring,
        "HOLDS_TOKENS": int(frame.holds),
        "EVEN_UNITS": int(-(-cols // UNIT[kind][0]) == cut.warps * cut.units),
        "MXFP4": int(kind == "mxfp4"), "LARGE_SCALES": int(has_large_scales), "ACT": act,
    } | ({"FP8": 1} if kind == "fp8" else {})  # fmt: skip


def dealt(sms, tiles, experts, rows, used, most_rows):
    """(tiles of a strip, of a stretch, runs that a block's list can have): range, span, room of experts.cuh.

    Decoding: a stretch a block, span 0. A prompt: strips of about STRIP tiles, a divisor of all; each is a
    stretch.
    """
    runs = min(experts, rows * used) + rows * used // most_rows
    if rows <= STRETCHED_ROWS:
        choices = [(tiles, 0, -(-runs // sms) + 2)]
    else:
        sizes = [size for size in range(1, tiles + 1) if tiles % size == 0]
        sizes.sort(key=lambda size: abs(size - STRIP))
        choices = [(size, size, -(-runs * (tiles // size) // sms)) for size in sizes]
    for choice in choices:
        if choice[-1] <= MOST_LISTED:
            return choice
    raise ValueError(f"{runs} runs on {sms} multiprocessors: a block's list holds {MOST_LISTED}")


def work_size(rows, outputs):
    """f32 behind the counters for the products of so many pairs."""
    return rows * -(-outputs // TILE) * TILE


def pack(backend, parts, role, experts):
    """`Weight` of stacked experts in the order of the kernels here, or None."""
    if role not in (EXPERTS, EXPERT_PAIRS) or not experts:
        return None
    is_paired = role == EXPERT_PAIRS
    rows, cols = sum(part.shape[0] for part in parts) // experts, int(np.prod(parts[0].shape[1:]))
    tiles, half, stride, sizes = tiling(rows, is_paired)
    layout = "packed pairs" if is_paired else "packed"
    if all(part.dtype == "BF16" for part in parts):
        raw, chunks = backend.raw(parts), -(-cols // CHUNK)
        data = backend.empty((experts, tiles, chunks, 2, 32, 8), np.uint16)
        args = [raw, raw[half:], data, *sizes, stride, tiles, cols, rows]
        backend.launch("pack.cu", "pack", (-(-tiles * chunks * 32 // 256), experts), 256, 0, args)
        return Weight((experts, rows, cols), "bf16", layout, (data,))
    width, size, _ = UNIT["mxfp4"]
    stored, units = backend.load(parts, np.uint8), -(-cols // width)
    data = backend.empty((experts, tiles, units, size), np.uint8)
    scales = stored[experts * rows * cols // 2 :]
    largest = backend.empty((1,), np.uint32)
    backend.upload(largest, np.zeros(1, np.uint32))
    args = [stored, scales, data, largest, *sizes, half, stride, tiles, cols, rows]
    backend.launch("pack_mxfp4.cu", "pack_mxfp4", (-(-tiles * units * 32 // 256), experts), 256, 0, args)
    is_large = bool(backend.download(largest)[0] >= LARGE_SCALE)
    return Weight((experts, rows, cols), "mxfp4", layout, (data,), is_large)


def _launch(backend, row, w, rows, used, tiles, args, cut=None, act=0, more=None):
    """One product. args: function of what `dealt` gives -> the kernel's. more: -D of the
    kernel's own. Returns the defines that it was compiled with, None where K does not suit."""
    experts, _, cols = w.shape
    cut = cut or choose(cols, w.dtype, row)
    if cut is None or experts > MOST_EXPERTS or cols % 8:
        return None
    shape = frame(cut, cols, w.dtype, experts, rows)
    if shape is None:
        return None
    shared = cut.shared(cols, w.dtype, experts, shape)
    how = dealt(backend.sms, tiles, experts, rows, used, 8 * shape.token_tiles)
    defines = defines_of(cut, cols, w.dtype, shape, act, w.has_large_scales) | (more or {})
    backend.launch(
        f"{row}_fast.cu", f"{row}_fast", backend.sms, cut.threads(shape), shared, args(how), defines,
        dependent=backend.dependent,
    )  # fmt: skip
    return defines


def _route_shared(experts, cols, token_tiles, norms):
    """Dynamic shared bytes: sums, logits, bias and groups, norms, token rows."""
    padded, chunks = -(-experts // TILE) * TILE, -(-cols // CHUNK)
    groups = 4 * (3 * padded + 16 + 32 * ROUTE_ROWS)
    sums, logits = ROUTE_WARPS * 512 * token_tiles, 4 * ROUTE_ROWS * padded
    return sums + logits + groups + chunks * (128 * norms + 512 * token_tiles + 64)


def route(backend, x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert,
          share, first, order):  # fmt: skip
    (rows, cols), used, tiles = x.shape, expert.shape[1], -(-w.rows // TILE)
    norms = 1 if u_norm is None else 2
    fitting = [n for n in (1, 2) if _route_shared(w.rows, cols, n, norms) + STATIC <= SHARED_PER_BLOCK]
    if w.layout != "packed" or cols % 8 or used > plain.MOST_USED or not fitting:
        return None
    token_tiles = next((n for n in fitting if 8 * n >= rows), fitting[-1])
    # Two at least: a card refuses the first block's st.async to itself where there is no cluster.
    blocks, is_whole = max(2, min(ROUTE_BLOCKS, tiles)), rows <= ROUTE_ROWS
    kept = min(6, -(-cols // CHUNK // ROUTE_WARPS))
    defines = {"TOKEN_TILES": token_tiles, "STREAM_WARPS": ROUTE_WARPS, "KEPT_CHUNKS": kept}
    defines |= route_defines(u_norm, expert_scale)
    groups = first if is_whole else None
    args = [w.data, x, norm, u_norm, bias, expert_scale, pos, u, expert, share, groups, order, touched]
    args += [eps, normalise, rows, w.rows, used, cols, ROUTE_ROWS]
    backend.launch(
        "route_fast.cu", "route_fast", blocks * -(-rows // ROUTE_ROWS), 32 * ROUTE_WARPS,
        _route_shared(w.rows, cols, token_tiles, norms), args, defines, cluster=blocks,
        dependent=backend.dependent,
    )  # fmt: skip
    if not is_whole:
        plain.group(backend, w.rows, touched, expert, first, order, backend.dependent)
    return True


def route_defines(u_norm, expert_scale):
    """-D of route.cuh."""
    given = {"U_NORM": u_norm, "EXPERT_SCALE": expert_scale}
    return {name: 1 for name, value in given.items() if value is not None}


def adds_define(adds):
    """-D of the kernels of experts_down."""
    return {} if adds else {"ADDS": 0}


def experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h, cut=None):
    if w.layout != "packed pairs":
        return None
    rows, used, ffn = h.shape

    def args(how):
        return [
            w.data, u, bias, expert, first, order, h, limit, alpha, rows * used, used, w.shape[0], ffn,
            w.cols, *how,
        ]  # fmt: skip

    tiles = -(-ffn // (TILE // 2))
    return True if _launch(backend, "experts_up", w, rows, used, tiles, args, cut, act) else None


def experts_down(backend, h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work,
                 cut=None):  # fmt: skip
    if w.layout != "packed":
        return None
    (rows, used, _), tap_cols = h.shape, 0 if taps is None else taps.shape[1]
    tap_row, products, is_merged = None if taps is None else tap_row, work[COUNTERS:], rows <= MERGED_ROWS
    tiles = -(-w.rows // TILE)

    def args(how):
        return [
            w.data, h, bias, expert, share, first, order, tap_row, x, taps, work if is_merged else None,
            products, rows, used, w.shape[0], w.rows, w.cols, *how, tap_at, tap_cols,
        ]  # fmt: skip

    defines = _launch(backend, "experts_down", w, rows, used, tiles, args, cut, more=adds_define(adds))
    if defines is None:
        return None
    if not is_merged:
        sums = [expert, tap_row, x, taps, products, rows, used, w.rows, tap_at, tap_cols]
        blocks = min(-(-tiles * -(-rows // 8) // 4), 16 * backend.sms)
        backend.launch(
            "experts_down_fast.cu",
            "experts_sum",
            blocks,
            SUM_THREADS,
            0,
            sums,
            defines,
            dependent=backend.dependent,
        )
    return True
