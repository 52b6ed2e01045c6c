"""attend: softmax(scale q k^T) v over the keys a row sees, in chunks of 128 keys cut at absolute positions.

Key n lies in row n % S of its cache: where S is less than the keys (a ring), it is a multiple of 128. A row
only visits keys it sees, so nothing is masked and no -inf exists; the running maximum rescales what earlier
chunks gave. A sink joins once, behind the last chunk. Work of a row and head depends on that row alone.
Moves: the cached K and V once a query head.
"""

import numba
import numpy as np

from .dot import ONE, make_tile_dot
from .jit import jit
from .scalar import F, exp, load, rounded
from .vector import eight_dots, row_dot, row_max

CHUNK = 128
_1xN, _1x1 = make_tile_dot(1, ONE), make_tile_dot(1, 1)


@jit
def _scores(q, q_at, cache_k, k_at, size, count, scale, work, p_at):
    """work[p_at + k] = scale * q k for count keys."""
    k = 0
    while k + 8 <= count and size % 16 == 0:
        eight_dots(q, q_at, cache_k, k_at + k * size, size, work, p_at + k)
        k += 8
    while k < count:
        work[p_at + k] = row_dot(q, q_at, cache_k, k_at + k * size, size)
        k += 1
    scores = work[p_at : p_at + count]
    for k in range(count):
        scores[k] *= scale


@jit
def _weighted_values(cache_v, v_at, size, count, work, p_at, out_at):
    """work[out_at + i] = sum over count keys of p * v[i]: keys are the k of a tile_dot,
    16 components its lanes."""
    i = 0
    while i + 16 * ONE <= size:
        _1xN(cache_v, v_at + i, 16, size, work, p_at, 1, count, work, out_at + i, 0)
        i += 16 * ONE
    while i + 16 <= size:
        _1x1(cache_v, v_at + i, 16, size, work, p_at, 1, count, work, out_at + i, 0)
        i += 16
    flat = cache_v.reshape(-1)
    while i < size:
        total = F(0.0)
        for k in range(count):
            total += work[p_at + k] * load(flat[v_at + k * size + i])
        work[out_at + i] = total
        i += 1


@jit
def _with_sink(total, top, sink):
    """One over a row's sum of e^(score - top) with its sink in it, times what brings all of it to the new
    maximum."""
    best = sink if sink > top else top
    # exp ends at 1e-38, and a sum of values times that is not the zero that is meant
    keep = F(0.0) if top - best < F(-87.3) else exp(top - best)
    return keep / (total * keep + exp(sink - best))


@jit
def _attend_head(t, h, q, caches, place, mask, scale, sinks, ones, work, at, o):
    """place: slot, pos, begin and end of row t."""
    (cache_k, cache_v), (s, p, begin, end), (window, causal) = caches, place, mask
    heads, groups, rows, size = q.shape[1], cache_k.shape[1], cache_k.shape[2], q.shape[2]
    base = (s * groups + h // (heads // groups)) * rows * size
    first = min(begin, max(0, p - window + 1)) if window else 0
    last = p + 1 if causal else (min(end, p + window) if window else end)
    q_at, p_at, sum_at, new_at = (t * heads + h) * size, at, at + CHUNK, at + CHUNK + size
    top, total = F(-3.4e38), F(0.0)
    sums, new = work[sum_at : sum_at + size], work[new_at : new_at + size]
    sums[:] = F(0.0)
    key = first
    while key < last:
        count, row_at = min(last, (key // CHUNK + 1) * CHUNK) - key, base + key % rows * size
        _scores(q, q_at, cache_k, row_at, size, count, F(scale), work, p_at)
        best = row_max(work, p_at, count)
        best = top if top > best else best
        p_row = work[p_at : p_at + count]
        for k in range(count):
            p_row[k] = exp(p_row[k] - best)
        keep = exp(top - best)
        total = total * keep + row_dot(work, p_at, ones, 0, count)
        _weighted_values(cache_v, row_at, size, count, work, p_at, new_at)
        for i in range(size):
            sums[i] = sums[i] * keep + new[i]
        top = best
        key += count
    inverse = F(1.0) / total if last > first else F(0.0)
    if len(sinks) and last > first:
        inverse = _with_sink(total, top, sinks[h])
    out = o[t, h]
    for i in range(size):
        out[i] = rounded(sums[i] * inverse, o)


@jit(parallel=True)
def _run(q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, work, o, ones, threads):
    heads, size = q.shape[1], q.shape[2]
    caches, mask = (cache_k, cache_v), (window, causal)
    items, room = q.shape[0] * heads, CHUNK + 2 * size
    for thread in numba.prange(threads):
        for item in range(thread, items, threads):
            t, h = np.int64(item) // heads, np.int64(item) % heads
            if pos[t] < 0:
                for i in range(size):
                    o[t, h, i] = 0
            else:
                at = np.int64(thread) * room
                place = np.int64(slot[t]), np.int64(pos[t]), np.int64(begin[t]), np.int64(end[t])
                _attend_head(t, h, q, caches, place, mask, scale, sinks, ones, work, at, o)


def attend(backend, q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, work, o):
    return _run, (
        q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, backend.f(sinks), work, o,
        backend.ones, backend.threads,
    )  # fmt: skip
