"""linear_add: x = scale * (x + n(a W^T + bias) * norm), and a copy of the new row among the taps. Moves: the
weights."""

import numba
import numpy as np

from .jit import jit
from .scalar import F, load, rounded
from .tiles import lay_tokens, matmul
from .vector import row_dot


@jit
def _end_row(t, bias, norm, eps, scale, tap_row, tap_at, x, taps, work, y_at, ld):
    width, at = x.shape[1], y_at + t * ld
    y, row = work[at : at + width], x[t]
    if len(bias):
        for d in range(width):
            y[d] += bias[d]
    if len(norm):
        r = F(1.0) / np.sqrt(row_dot(work, at, work, at, width) / F(width) + F(eps))
        for d in range(width):
            y[d] = norm[d] * (y[d] * r)
    if len(scale):
        for d in range(width):
            row[d] = rounded(scale[0] * (load(row[d]) + y[d]), x)
    else:
        for d in range(width):
            row[d] = rounded(load(row[d]) + y[d], x)
    if len(tap_row) and tap_row[t] >= 0:
        tap = taps[tap_row[t]]
        for d in range(width):
            tap[tap_at + d] = row[d]


@jit(parallel=True)
def _run(a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work, none_f, none_i, threads):
    rows = lay_tokens(a, none_i, none_f, 0.0, work, threads)
    y_at, ld = rows * a.shape[1], w.shape[0] * 16
    matmul(w, rows, a.shape[1], work, y_at, ld, threads)
    if a.shape[0] == 1:
        for t in range(a.shape[0]):
            _end_row(t, bias, norm, eps, scale, tap_row, tap_at, x, taps, work, y_at, ld)
    else:
        for t in numba.prange(a.shape[0]):
            _end_row(np.int64(t), bias, norm, eps, scale, tap_row, tap_at, x, taps, work, y_at, ld)


def linear_add(backend, a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work):
    if taps is None:
        tap_row = None
    b = backend
    end = b.f(bias), b.f(norm), eps, b.f(scale), b.i(tap_row), tap_at
    return _run, (a, w.data, *end, x, b.a2(taps), work, b.none_f, b.none_i, b.threads)
