"""Matrix times a few rows on the CPU: the one loop that reads the weights.

A packed weight is [N/16][K][16]: 16 output rows are the 16 lanes of a vector. Token rows are laid out
[block][K][m], m in (1, 4, 8, 16) and without AVX-512 at most 4, so that one k needs one widened load of
weights and m broadcasts. Every output is the sum over k ascending, one fused multiply-add a term, whatever m
is: so a row's bits do not depend on how many rows there are. Measured on 2 cores with AVX-512:
37 GB/s of bf16 weights at one row, 260 GFLOP/s at 16 rows.
"""

import numba
import numpy as np
from numba import types
from numba.extending import overload

from .dot import IS_WIDE, ONE, SHAPES, make_tile_dot
from .jit import jit
from .scalar import F, load
from .vector import row_dot

_DOTS = {shape: make_tile_dot(*shape) for shape in SHAPES}
_1xN, _1x1, _4x1 = _DOTS[1, ONE], _DOTS[1, 1], _DOTS[4, 1]


def tile_length(w):
    """Elements of a packed weight from one tile to the next."""
    raise NotImplementedError("only inside compiled code")


@overload(tile_length, inline="always")
def _tile_length(w):
    if isinstance(w.dtype, types.Record):
        return lambda w: w.shape[-1]
    return lambda w: w.shape[-2] * 16


@jit
def tokens_per_block(rows):
    """How many token rows one pass over a weight tile serves, and lie side by side."""
    if IS_WIDE:
        return 1 if rows == 1 else 4 if rows <= 4 else 8 if rows <= 8 else 16
    return 1 if rows == 1 else 4


@jit
def tiles_per_group(m):
    """How many tiles a block of m tokens takes at once: their sums fill the registers."""
    if IS_WIDE:
        return 4 if m <= 4 else 2 if m == 8 else 1
    return ONE if m == 1 else 1


@jit
def padded(rows):
    """rows rounded up to whole blocks of tokens."""
    m = tokens_per_block(rows)
    return (rows + m - 1) // m * m


@jit
def _source(pick, t):
    return np.int64(pick[t]) if len(pick) else np.int64(t)  # prange counts in uint64, which mixes to float


@jit
def _lay_share(x, pick, norm, work, rows, total, m, scale_at, first, last):
    """Inputs first..last-1 of all token rows to their place: whole cache lines,
    so that threads share none."""
    cols = x.shape[1]
    for block in range(total // m):
        for i in range(m):
            t = block * m + i
            at = block * cols * m + i
            out = work[at + first * m : at + (last - 1) * m + 1 : m]
            if t >= rows:
                out[:] = F(0.0)
                continue
            row = x[_source(pick, t), first:last]
            if len(norm) == 0:
                for k in range(last - first):
                    out[k] = load(row[k])
            else:
                r, weight = work[scale_at + t], norm[first:last]
                for k in range(last - first):
                    out[k] = weight[k] * (load(row[k]) * r)


@jit(parallel=True)
def lay_tokens(x, pick, norm, eps, work, threads):
    """Token blocks of x (of its rows `pick` when given) at the start of work; rows of padding are zero.

    x: (T, K) activations. norm: (K,) or empty: rows are normed on the way. Returns the number of token rows,
    padding included. The rows' 1 / rms lie for a moment where the outputs will.
    """
    rows = len(pick) if len(pick) else x.shape[0]
    m, total, cols = tokens_per_block(rows), padded(rows), x.shape[1]
    scale_at = total * cols
    if len(norm):
        for t in range(rows):
            at = _source(pick, t) * cols
            work[scale_at + t] = F(1.0) / np.sqrt(row_dot(x, at, x, at, cols) / F(cols) + F(eps))
    if rows == 1:
        _lay_share(x, pick, norm, work, rows, total, m, scale_at, np.int64(0), cols)
    else:
        for thread in numba.prange(threads):
            own = np.int64(thread)
            first, last = cols * own // threads, cols * (own + 1) // threads
            _lay_share(x, pick, norm, work, rows, total, m, scale_at, first, last)
    return total


if IS_WIDE:
    _4x4, _8x2, _8x1, _16x1 = (_DOTS[shape] for shape in ((4, 4), (8, 2), (8, 1), (16, 1)))

    @jit
    def _some_rows(w, at, stride, count, cols, work, x_at, x_step, m, y_at, ld):
        if m == 4:
            if count == 4:
                _4x4(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
            else:
                _4x1(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
        elif m == 8:
            if count == 2:
                _8x2(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
            else:
                _8x1(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
        else:
            _16x1(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
else:

    @jit
    def _some_rows(w, at, stride, count, cols, work, x_at, x_step, m, y_at, ld):
        for first in range(0, m, 4):
            _4x1(w, at, stride, 16, work, x_at + first, x_step, cols, work, y_at + first * ld, ld)


@jit
def tile_group(w, tile, count, cols, work, x_at, x_step, m, y_at, ld):
    """One block of m tokens times `count` tiles from `tile` on: 1, or tiles_per_group.

    x_step: f32 from one k of the tokens to the next.
    """
    stride = tile_length(w)
    at = tile * stride
    if m > 1:
        _some_rows(w, at, stride, count, cols, work, x_at, x_step, m, y_at, ld)
    elif count == ONE:
        _1xN(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)
    else:
        _1x1(w, at, stride, 16, work, x_at, x_step, cols, work, y_at, ld)


@jit
def share(w, rows, cols, work, y_at, ld, thread, threads):
    """A thread's share of what matmul describes."""
    tiles = w.shape[0]
    m = tokens_per_block(rows)
    group = tiles_per_group(m)
    tile, last = tiles * thread // threads, tiles * (thread + 1) // threads
    while tile < last:
        count = group if tile + group <= last else 1
        for block in range(rows // m):
            y = y_at + block * m * ld + tile * 16
            tile_group(w, tile, count, cols, work, block * cols * m, m, m, y, ld)
        tile += count


@jit(parallel=True)
def matmul(w, rows, cols, work, y_at, ld, threads):
    """work[y_at + t * ld + n] = sum_k w[n, k] * token t, for the `rows` token rows that lay_tokens put into
    work.

    w: packed. cols: K. ld: f32 from one token's outputs to the next, at least N rounded up to 16.
    threads: shares of the tiles, an argument because Numba does not cache what asks for it.
    """
    for thread in numba.prange(threads):
        share(w, rows, cols, work, y_at, ld, np.int64(thread), threads)
