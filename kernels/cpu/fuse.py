"""fuse: f = hidden_norm(fc taps), the context feature of each row. Moves: the weights."""

import numpy as np

from .jit import jit
from .scalar import F, rounded
from .tiles import lay_tokens, matmul
from .vector import row_dot


@jit
def _run(taps, w, norm, eps, work, f, none_f, none_i, threads):
    rows = lay_tokens(taps, none_i, none_f, 0.0, work, threads)
    y_at, ld, width = rows * taps.shape[1], w.shape[0] * 16, f.shape[1]
    matmul(w, rows, taps.shape[1], work, y_at, ld, threads)
    for t in range(f.shape[0]):
        at = y_at + t * ld
        r = F(1.0) / np.sqrt(row_dot(work, at, work, at, width) / F(width) + F(eps))
        y, row = work[at : at + width], f[t]
        for d in range(width):
            row[d] = rounded(norm[d] * (y[d] * r), f)


def fuse(backend, taps, w, norm, eps, work, f):
    return _run, (taps, w.data, norm, eps, work, f, backend.none_f, backend.none_i, backend.threads)
