"""route: norm, router, the likeliest experts of each row, their shares, and the pairs of each expert.

Moves: the router's weights.
"""

import math

import numba
import numpy as np

from .jit import jit
from .scalar import F, load, rounded
from .tiles import lay_tokens, matmul
from .vector import row_dot


@jit
def _norm_rows(x, norm, eps, pos, u):
    cols = x.shape[1]
    for t in range(len(x)):
        if pos[t] < 0:
            u[t] = 0
            continue
        r = F(1.0) / np.sqrt(row_dot(x, t * cols, x, t * cols, cols) / F(cols) + F(eps))
        row, out = x[t], u[t]
        for k in range(cols):
            out[k] = rounded(norm[k] * (load(row[k]) * r), u)


@jit
def _choose(logits, normalise, ids, shares):
    """The largest logits, of equal ones the smallest id first. Shares: softmax over them, or over all."""
    value, index = F(np.inf), -1
    for k in range(len(ids)):
        best, found = F(-np.inf), -1
        for e in range(len(logits)):
            z = logits[e]
            is_left = z < value or (z == value and e > index)
            if is_left and (found < 0 or z > best):
                best, found = z, e
        value, index = best, found
        ids[k], shares[k] = found, best
    top, total = np.float64(shares[0]), 0.0
    if normalise:
        for k in range(len(ids)):
            total += math.exp(np.float64(shares[k]) - top)
    else:
        for e in range(len(logits)):
            total += math.exp(np.float64(logits[e]) - top)
    for k in range(len(ids)):
        shares[k] = F(math.exp(np.float64(shares[k]) - top) / total)


@jit
def _route_row(t, bias, normalise, expert_scale, pos, work, at, count, expert, share):
    if pos[t] < 0:
        expert[t], share[t] = -1, 0
        return
    logits = work[at : at + count]
    for e in range(len(bias)):
        logits[e] += bias[e]
    for e in range(count):
        if logits[e] != logits[e]:  # a NaN is the least likely
            logits[e] = F(-np.inf)
    _choose(logits, normalise, expert[t], share[t])
    if len(expert_scale):
        for k in range(len(share[t])):
            share[t, k] *= expert_scale[expert[t, k]]


@jit
def _group(expert, touched, first, order):
    """Pairs by expert, ascending: counted, then put in their places."""
    flat, experts = expert.reshape(-1), len(first) - 1
    first[:] = 0
    order[:] = -1
    for e in flat:
        if e >= 0:
            first[e + 1] += 1
    for e in range(experts):
        touched[0] += first[e + 1] > 0
        first[e + 1] += first[e]
    for r in range(len(flat)):
        e = flat[r]
        if e >= 0:
            order[first[e]] = r
            first[e] += 1
    for e in range(experts, 0, -1):  # each start has moved to its group's end, the next one's start
        first[e] = first[e - 1]
    first[0] = 0


@jit(parallel=True)
def _run(
    x, norms, eps, w, bias, normalise, expert_scale, pos, touched, work, u, choice, groups, none, threads
):
    (norm, u_norm), (expert, share), (first, order), (none_f, none_i) = norms, choice, groups, none
    count = len(first) - 1
    _norm_rows(x, norm, eps, pos, u)
    rows = lay_tokens(u, none_i, none_f, 0.0, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    if len(x) == 1:
        _route_row(np.int64(0), bias, normalise, expert_scale, pos, work, y_at, count, expert, share)
    else:
        for t in numba.prange(len(x)):
            row = np.int64(t)
            _route_row(row, bias, normalise, expert_scale, pos, work, y_at + row * ld, count, expert, share)
    if len(u_norm):
        _norm_rows(x, u_norm, eps, pos, u)  # the router has read its own
    _group(expert, touched, first, order)


def route(backend, x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert,
          share, first, order):  # fmt: skip
    b = backend
    return _run, (
        x, (norm, b.f(u_norm)), eps, w.data, b.f(bias), normalise, b.f(expert_scale), pos, touched, work, u,
        (expert, share), (first, order), (b.none_f, b.none_i), b.threads,
    )  # fmt: skip
