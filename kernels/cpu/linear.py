"""linear: y = a W^T (+ bias), rounded once. Moves: the weights."""

import numba
import numpy as np

from .jit import jit
from .scalar import rounded
from .tiles import lay_tokens, matmul


@jit
def _row(t, bias, work, y_at, ld, y):
    width = y.shape[1]
    sums, row = work[y_at + t * ld : y_at + t * ld + width], y[t]
    if len(bias):
        for d in range(width):
            sums[d] += bias[d]
    for d in range(width):
        row[d] = rounded(sums[d], y)


@jit(parallel=True)
def _run(a, w, bias, work, y, none_f, none_i, threads):
    rows = lay_tokens(a, none_i, none_f, 0.0, work, threads)
    y_at, ld = rows * a.shape[1], w.shape[0] * 16
    matmul(w, rows, a.shape[1], work, y_at, ld, threads)
    if a.shape[0] == 1:
        _row(np.int64(0), bias, work, y_at, ld, y)
    else:
        for t in numba.prange(a.shape[0]):
            _row(np.int64(t), bias, work, y_at, ld, y)


def linear(backend, a, w, bias, work, y):
    b = backend
    return _run, (a, w.data, b.f(bias), work, y, b.none_f, b.none_i, b.threads)
