"""What experts_up and experts_down share: token rows gathered by expert, and an expert's tiles times them.

Weights are [E][tile][K][16], of MXFP4 and FP8 records [E][tile][block] (lanes.py). Pair i of the
groups is token i here: an expert's tokens are cut into blocks of 16, each laid out [K][n] for its n tokens,
so that a tile is read once for a block, with the sums of tiles.py. Nothing else decides a row's bits.
"""

import numba
import numpy as np

from .jit import jit
from .scalar import load
from .tiles import padded, tile_group, tiles_per_group
from .vector import LANES

BLOCK, GROUP = 16, 4  # tokens, tiles
SCRATCH = BLOCK * GROUP * LANES  # f32 of a thread


@jit(parallel=True)
def pack(weight, at, rows, is_paired, out):
    """Rows (n, K), stacked rows of all experts from `at` on, to out[expert][tile][..., k][lane].

    out: (E, tiles, blocks, few, 16), K or more inputs in blocks of few, zeroed before. rows: of an expert.
    is_paired: its second half goes with its first, tile by tile: gate, up, gate, up...
    """
    half = rows // 2 if is_paired else rows
    for n in numba.prange(len(weight)):
        row = at + np.int64(n)
        expert, row = row // rows, row % rows
        tile, lane = row % half // LANES, row % half % LANES
        if is_paired:
            tile = 2 * tile + row // half
        few = out.shape[3]
        for block in range(out.shape[2]):
            first = block * few
            for k in range(min(few, weight.shape[1] - first)):
                out[expert, tile, block, k, lane] = weight[n, first + k]


@jit
def _lay_share(rows, divide, order, groups, work, first, last):
    """Inputs first..last-1 of all pairs to their place."""
    cols = rows.shape[1]
    for e in range(len(groups) - 1):
        start = np.int64(groups[e])
        while start < groups[e + 1]:
            n = min(BLOCK, groups[e + 1] - start)
            for i in range(n):
                row, at = rows[order[start + i] // divide, first:last], start * cols + first * n + i
                out = work[at : at + (last - first - 1) * n + 1 : n]
                for k in range(last - first):
                    out[k] = load(row[k])
            start += n


@jit(parallel=True)
def lay_pairs(rows, divide, order, groups, work, threads):
    """The token row of every pair at the start of work, by expert: pair r has row r // divide.

    groups: `first` of the table.
    """
    cols = rows.shape[1]
    if len(rows) == 1:
        _lay_share(rows, divide, order, groups, work, np.int64(0), cols)
    else:
        for thread in numba.prange(threads):
            own = np.int64(thread)
            first, last = cols * own // threads, cols * (own + 1) // threads
            if first < last:
                _lay_share(rows, divide, order, groups, work, first, last)


@jit
def multiply(w, tile, count, cols, work, start, n, y_at):
    """Tiles tile..tile+count-1 times the block of n pairs from `start` on, to work[y_at:]: [16][GROUP * 16].

    count: at most GROUP. tile: counted through all experts.
    """
    m, done, ld = padded(n), 0, GROUP * LANES
    most = tiles_per_group(m)
    while done < count:
        these = most if done + most <= count else 1
        tile_group(w, tile + done, these, cols, work, start * cols, n, m, y_at + done * LANES, ld)
        done += these
