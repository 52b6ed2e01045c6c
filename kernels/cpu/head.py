"""head and head_logits: final norm, LM head, and the smallest argmax of the first `limit` ids.
Moves: the weights."""

import numba
import numpy as np

from .jit import jit
from .scalar import F, all_finite, soft_cap
from .tiles import lay_tokens, matmul
from .vector import row_max


@jit
def _argmax(work, at, count):
    """Smallest index of the largest of work[at : at + count]; -1 where one of them is not finite."""
    if not all_finite(work[at : at + count]):
        return -1
    best, index = F(-np.inf), 0
    for n in range(count):
        if work[at + n] > best:
            best, index = work[at + n], n
    return index


@jit
def _margin(work, at, count, index):
    """How far the logit of that index lies above the largest other one; infinite where there is none."""
    if index < 0 or count == 1:
        return F(np.inf)
    others = max(row_max(work, at, index), row_max(work, at + index + 1, count - index - 1))
    return work[at + index] - others


@jit(parallel=True)
def _run_head(x, pick, norm, eps, w, limit, ids, margin, work, threads):
    rows = lay_tokens(x, pick, norm, eps, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    for i in numba.prange(len(pick)):
        at, r = y_at + np.int64(i) * ld, pick[i]
        ids[r] = _argmax(work, at, limit)
        if len(margin):
            margin[r] = _margin(work, at, limit, np.int64(ids[r]))


def head(backend, x, pick, norm, eps, w, limit, ids, margin, work):
    b = backend
    return len(pick) and (_run_head, (x, pick, norm, eps, w.data, limit, ids, b.f(margin), work, b.threads))


@jit(parallel=True)
def _run_logits(x, norm, eps, w, multiplier, cap, work, logits, none_i, threads):
    rows = lay_tokens(x, none_i, norm, eps, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    for t in numba.prange(x.shape[0]):
        for n in range(logits.shape[1]):
            logits[t, n] = soft_cap(work[y_at + np.int64(t) * ld + n], multiplier, cap)


def head_logits(backend, x, norm, eps, w, multiplier, cap, work, logits):
    curve = F(multiplier), F(cap)
    return _run_logits, (x, norm, eps, w.data, *curve, work, logits, backend.none_i, backend.threads)
