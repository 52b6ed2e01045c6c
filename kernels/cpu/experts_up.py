"""experts_up: gate and up of each row's experts, activated. Moves: the touched experts' weights."""

import numba
import numpy as np

from ..table import CLAMPED, SILU
from .experts import BLOCK, GROUP, SCRATCH, lay_pairs, multiply
from .jit import jit
from .scalar import F, exp, gelu_tanh, rounded, silu
from .vector import LANES


@jit
def _activate(gate, up, act, limit, alpha, row):
    """row = gate and up of one pair, activated and rounded. A NaN passes every limit."""
    if act == SILU:
        for i in range(len(row)):
            row[i] = rounded(silu(gate[i]) * up[i], row)
    elif act == CLAMPED:
        for i in range(len(row)):
            g = limit if gate[i] > limit else gate[i]
            v = limit if up[i] > limit else -limit if up[i] < -limit else up[i]
            row[i] = rounded((v + F(1.0)) * (g / (F(1.0) + exp(-alpha * g))), row)
    else:
        for i in range(len(row)):
            row[i] = rounded(gelu_tanh(gate[i]) * up[i], row)


@jit
def _piece(w, bias, order, first, e, tile, count, act, limit, alpha, work, at, cols, h):
    """Tiles tile..tile+count-1 of expert e, gate and up in turn, for all its pairs."""
    used, ffn = h.shape[1], h.shape[2]
    start = np.int64(first[e])
    while start < first[e + 1]:
        n = min(BLOCK, first[e + 1] - start)
        multiply(w, e * w.shape[1] + tile, count, cols, work, start, n, at)
        for i in range(n):
            r = order[start + i]
            for j in range(0, count, 2):
                f, y = (tile + j) // 2 * LANES, at + (i * GROUP + j) * LANES
                width = min(LANES, ffn - f)
                gate, up = work[y : y + width], work[y + LANES : y + LANES + width]
                if len(bias):
                    for k in range(width):
                        gate[k] += bias[e, f + k]
                        up[k] += bias[e, ffn + f + k]
                _activate(gate, up, act, limit, alpha, h[r // used, r % used, f : f + width])
        start += n


@jit(parallel=True)
def _run(u, w, bias, expert, first, order, act, limit, alpha, work, h, threads):
    used, cols = h.shape[1], u.shape[1]
    tiles, experts = w.shape[1], w.shape[0]
    pieces = (tiles + GROUP - 1) // GROUP
    lay_pairs(u, used, order, first, work, threads)
    for thread in numba.prange(threads):
        at, piece = np.int64(first[experts]) * cols + BLOCK + np.int64(thread) * SCRATCH, np.int64(thread)
        for t in range(thread, len(u), threads):
            if expert[t, 0] < 0:
                h[t] = 0
        for e in range(experts):
            if first[e] == first[e + 1]:
                continue
            while piece < pieces:
                tile = piece * GROUP
                count = min(GROUP, tiles - tile)
                _piece(w, bias, order, first, e, tile, count, act, limit, alpha, work, at, cols, h)
                piece += threads
            piece -= pieces


def experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h):
    bias, limit, alpha = backend.f2(bias), F(limit), F(alpha)
    return _run, (u, w.data, bias, expert, first, order, act, limit, alpha, work, h, backend.threads)
