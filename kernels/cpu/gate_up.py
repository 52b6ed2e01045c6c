"""gate_up: h = act(Wg n(x)) * (Wu n(x)), one matrix product over the stacked weights. Moves: the weights."""

import numba
import numpy as np

from ..table import GELU_TANH
from .jit import jit
from .scalar import gelu_tanh, rounded, silu
from .tiles import lay_tokens, matmul


@jit
def _gate_row(t, act, h, work, y_at, ld):
    ffn = h.shape[1]
    at = y_at + t * ld
    gate, up, row = work[at : at + ffn], work[at + ffn : at + 2 * ffn], h[t]
    if act == GELU_TANH:
        for f in range(ffn):
            row[f] = rounded(gelu_tanh(gate[f]) * up[f], h)
    else:
        for f in range(ffn):
            row[f] = rounded(silu(gate[f]) * up[f], h)


@jit(parallel=True)
def _run(x, norm, eps, act, w, work, h, none_i, threads):
    rows = lay_tokens(x, none_i, norm, eps, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    if x.shape[0] == 1:
        _gate_row(np.int64(0), act, h, work, y_at, ld)
    else:
        for t in numba.prange(x.shape[0]):
            _gate_row(np.int64(t), act, h, work, y_at, ld)


def gate_up(backend, x, norm, eps, act, w, work, h):
    return _run, (x, backend.f(norm), eps, act, w.data, work, h, backend.none_i, backend.threads)
