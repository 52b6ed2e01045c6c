"""linear_add: x += a W^T (+ bias), and a copy of the new row into the tap buffer. Moves: the weights."""

import numba

from .jit import jit
from .scalar import load, rounded
from .tiles import lay_tokens, matmul


@jit
def _add_row(t, bias, tap_row, tap_at, x, taps, work, y_at, ld):
    width = x.shape[1]
    y, row = work[y_at + t * ld : y_at + t * ld + width], x[t]
    if len(bias):
        for d in range(width):
            y[d] += bias[d]
    for d in range(width):
        row[d] = rounded(load(row[d]) + y[d], x)
    if len(tap_row) and tap_row[t] >= 0:
        taps[tap_row[t], tap_at : tap_at + width] = row


@jit(parallel=True)
def _run(a, w, bias, tap_row, tap_at, x, taps, work, none_f, none_i, threads):
    rows = lay_tokens(a, none_i, none_f, 0.0, work, threads)
    y_at, ld = rows * a.shape[1], w.shape[0] * 16
    matmul(w, rows, work, y_at, ld, threads)
    if a.shape[0] == 1:
        for t in range(a.shape[0]):
            _add_row(t, bias, tap_row, tap_at, x, taps, work, y_at, ld)
    else:
        for t in numba.prange(a.shape[0]):
            _add_row(t, bias, tap_row, tap_at, x, taps, work, y_at, ld)


def linear_add(backend, a, w, bias, tap_row, tap_at, x, taps, work):
    if taps is None:
        tap_row = None
    b = backend
    _run(a, w.data, b.f(bias), b.i(tap_row), tap_at, x, b.a2(taps), work, b.none_f, b.none_i, b.threads)
