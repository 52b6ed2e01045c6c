"""join: x = scale * (x + n(n(a) a_norm + n(b) b_norm) norm), and a copy of the new row among the taps. Moves:
rows only."""

import numba
import numpy as np

from .jit import jit
from .scalar import F, load, rounded
from .vector import row_dot


@jit
def _root(x, at, count, eps):
    return F(1.0) / np.sqrt(row_dot(x, at, x, at, count) / F(count) + F(eps))


@jit
def _join_row(t, a, b, norms, eps, scale, tap_row, tap_at, x, taps):
    (a_norm, b_norm, norm), width, row = norms, x.shape[1], x[t]
    both, r_a, r_b = np.empty(width, F), _root(a, t * width, width, eps), _root(b, t * width, width, eps)
    for d in range(width):
        both[d] = a_norm[d] * (load(a[t, d]) * r_a) + b_norm[d] * (load(b[t, d]) * r_b)
    r, times = _root(both, 0, width, eps), scale[0] if len(scale) else F(1.0)
    for d in range(width):
        row[d] = rounded(times * (load(row[d]) + norm[d] * (both[d] * r)), x)
    if len(tap_row) and tap_row[t] >= 0:
        tap = taps[tap_row[t]]
        for d in range(width):
            tap[tap_at + d] = row[d]


@jit(parallel=True)
def _run(a, b, norms, eps, scale, tap_row, tap_at, x, taps):
    for t in numba.prange(len(a)):
        _join_row(t, a, b, norms, eps, scale, tap_row, tap_at, x, taps)


def join(backend, a, b, a_norm, b_norm, norm, eps, scale, tap_row, tap_at, x, taps):
    if taps is None:
        tap_row = None
    rows, taps = backend.i(tap_row), backend.a2(taps)
    return _run, (a, b, (a_norm, b_norm, norm), eps, backend.f(scale), rows, tap_at, x, taps)
