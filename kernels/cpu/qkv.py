"""qkv: norm, Q K V projections, q/k norm, rotation, append to the caches. Moves: the weights."""

import numba
import numpy as np

from .heads import finish_head, keep_kv, keep_row
from .jit import jit
from .tiles import lay_tokens, share


@jit
def _row(t, kv_heads, biases, norms, eps, tables, address, caches, q, work, y_at, ld, kv_at):
    (q_bias, kv_bias), (q_norm, k_norm, v_norm), (cos, sin), (slot, pos, key) = biases, norms, tables, address
    p, heads, size = pos[t], q.shape[1], q.shape[2]
    if p < 0:
        for h in range(heads):
            for i in range(size):
                q[t, h, i] = 0
        return
    at = y_at + t * ld
    for h in range(heads):
        finish_head(work, at + h * size, size, q_bias, h * size, q_norm, np.int64(0), eps, cos, sin, p)
        keep_row(work[at + h * size : at + (h + 1) * size], q[t, h])
    cache_k, cache_v = caches[0][slot[t]], caches[1][slot[t]]
    groups = len(cache_k)
    values = kv_heads - groups
    keep_kv(work, at + kv_at, groups, values, size, kv_bias, np.int64(0), k_norm, np.int64(0), v_norm, eps,
            cos, sin, p, key[t], cache_k, cache_v)  # fmt: skip


@jit(parallel=True)
def _run(x, norm, eps, wq, wkv, kv_heads, biases, norms, tables, address, caches, work, q, none_i, threads):
    rows = lay_tokens(x, none_i, norm, eps, work, threads)
    y_at, kv_at = rows * x.shape[1], wq.shape[0] * 16
    ld = kv_at + wkv.shape[0] * 16
    for thread in numba.prange(threads):
        share(wq, rows, x.shape[1], work, y_at, ld, np.int64(thread), threads)
        share(wkv, rows, x.shape[1], work, y_at + kv_at, ld, np.int64(thread), threads)
    if x.shape[0] == 1:
        _row(np.int64(0), kv_heads, biases, norms, eps, tables, address, caches, q, work, y_at, ld, kv_at)
    else:
        for t in numba.prange(x.shape[0]):
            _row(np.int64(t), kv_heads, biases, norms, eps, tables, address, caches, q, work, y_at, ld, kv_at)


def qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at,
        cache_k, cache_v, work, q):  # fmt: skip
    b = backend
    biases, norms = (b.f(q_bias), b.f(kv_bias)), (b.f(q_norm), b.f(k_norm), b.f(v_norm))
    address, caches = (slot, pos, at), (cache_k, cache_v)
    return _run, (
        x, b.f(norm), eps, wq.data, wkv.data, wkv.rows // q.shape[2], biases, norms, (cos, sin), address,
        caches, work, q, b.none_i, b.threads,
    )  # fmt: skip
