"""inject: KV injection. k and v of every drafter layer from the context features, one matrix product over the
stacked weights [L][k, v][G][K], then k norm, rotation, store. Moves: the weights."""

import numba

from .heads import keep_kv
from .jit import jit
from .tiles import lay_tokens, matmul


@jit(parallel=True)
def _run(f, wkv, kv_bias, k_norm, eps, tables, address, caches, work, none_f, none_i, threads):
    (cos, sin), (slot, pos, at), (cache_k, cache_v) = tables, address, caches
    rows = lay_tokens(f, none_i, none_f, 0.0, work, threads)
    y_at, ld = rows * f.shape[1], wkv.shape[0] * 16
    matmul(wkv, rows, f.shape[1], work, y_at, ld, threads)
    layers, groups, size = cache_k.shape[0], cache_k.shape[2], cache_k.shape[4]
    for layer in numba.prange(layers):
        first = layer * 2 * groups * size
        for t in range(f.shape[0]):
            if pos[t] < 0:
                continue
            y, k, v = y_at + t * ld + first, cache_k[layer, slot[t]], cache_v[layer, slot[t]]
            keep_kv(work, y, groups, groups, size, kv_bias, first, k_norm, layer * size, none_f, eps, cos,
                    sin, pos[t], at[t], k, v)  # fmt: skip


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    b, tables, address, caches = backend, (cos, sin), (slot, pos, at), (cache_k, cache_v)
    flat = b.none_f if k_norm is None else k_norm.reshape(-1)
    none = b.none_f, b.none_i
    return _run, (f, wkv.data, b.f(kv_bias), flat, eps, tables, address, caches, work, *none, b.threads)
