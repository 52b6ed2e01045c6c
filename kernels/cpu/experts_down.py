"""experts_down: the experts' products, weighted and added to the row in router order.

A thread has its outputs of all experts, so that it may add them up without waiting for another. Moves: the
touched experts' weights.
"""

import numba
import numpy as np

from .experts import BLOCK, GROUP, SCRATCH, lay_pairs, multiply
from .jit import jit
from .scalar import F, load, rounded
from .vector import LANES


@jit
def _products(w, order, first, e, tile, count, work, at, y_at, cols, width):
    """work[y_at + r * width + d] of all pairs r of expert e; outputs d of `count` tiles from `tile` on."""
    start, d = np.int64(first[e]), tile * LANES
    these = min(count * LANES, width - d)
    while start < first[e + 1]:
        n = min(BLOCK, first[e + 1] - start)
        multiply(w, e * w.shape[1] + tile, count, cols, work, start, n, at)
        for i in range(n):
            y, to = at + i * GROUP * LANES, y_at + np.int64(order[start + i]) * width + d
            for j in range(these):
                work[to + j] = work[y + j]
        start += n


@jit
def _end_row(t, bias, expert, share, adds, row, work, y_at, width, first, last):
    """Outputs first..last-1 of one row: the sum over its experts in router order, then what was there if it
    adds."""
    used = expert.shape[1]
    for d in range(first, last):
        total = F(0.0)
        for k in range(used):
            y = work[y_at + (t * used + k) * width + d]
            if len(bias):
                y += bias[expert[t, k], d]
            total += share[t, k] * y
        row[d] = rounded(load(row[d]) + total if adds else total, row)


@jit(parallel=True)
def _run(h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work, threads):
    (rows, width), cols, used = x.shape, h.shape[2], h.shape[1]
    tiles, experts = w.shape[1], w.shape[0]
    lay_pairs(h.reshape(rows * used, cols), 1, order, first, work, threads)
    y_at = np.int64(first[experts]) * cols + BLOCK
    scratch = y_at + rows * used * width
    for thread in numba.prange(threads):
        at, last = scratch + np.int64(thread) * SCRATCH, tiles * np.int64(thread + 1) // threads
        tile = tiles * np.int64(thread) // threads
        while tile < last:
            count = min(GROUP, last - tile)
            for e in range(experts):
                _products(w, order, first, e, tile, count, work, at, y_at, cols, width)
            begin, end = tile * LANES, min((tile + count) * LANES, width)
            for t in range(rows):
                if expert[t, 0] >= 0:
                    _end_row(t, bias, expert, share, adds, x[t], work, y_at, width, begin, end)
                    if len(tap_row) and tap_row[t] >= 0:
                        tap = taps[tap_row[t]]
                        for d in range(begin, end):
                            tap[tap_at + d] = x[t, d]
                elif not adds:
                    x[t, begin:end] = 0
            tile += count


def experts_down(backend, h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work):
    if taps is None:
        tap_row = None
    b = backend
    bias, tap_row, taps = b.f2(bias), b.i(tap_row), b.a2(taps)
    return _run, (
        h, w.data, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work, b.threads
    )  # fmt: skip
