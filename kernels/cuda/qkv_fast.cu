/* qkv_fast: q = rope(qnorm(Wq n(x))); k and v likewise (v plain) into the caches as key at[t] of each
 *         row's slot. SHARED_KV: Wkv has no rows for v, which is k as it is before its norm.
 * Grid:   skinny.cuh over the tiles of Wq, then of Wkv; heads end as skinny_heads.cuh says.
 * Moves:  (H + 2G)*K*D*2 bytes, or (H + G)*K*D*2; bound by HBM.
 * Truth:  oracle.py qkv; here x times the norm's scale, if there is one, is rounded to bf16 before the
 *         product. */
#include "skinny_heads.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    qkv_fast(const u16* wq, const u16* wkv, const bf16* x, const float* norm, const float* q_bias,
             const float* kv_bias, const float* q_norm, const float* k_norm, const float* v_norm,
             const float* cos, const float* sin, const int* slot, const int* pos, const int* at,
             bf16* cache_k, bf16* cache_v, bf16* q, u32* counters, float* work, float eps, int rows, int cols,
             int slices, int heads, int groups, int size, int pairs, int cached) {
    Heads all{size, heads + (SHARED_KV ? 1 : 2) * groups, heads};
    Task task = make_task(rows, cols, all.tiles(), slices);
    KeepTile sink{task, all, work, counters};
    skinny<NORMED>(task, HeadWeights{cols, heads * size, wq, wkv}, x, nullptr, norm, work, sink);
    all = Heads{opaque(size), heads + (SHARED_KV ? 1 : 2) * groups, heads};
    task = again(rows, cols, all.tiles(), slices);
    QkvRule rule{q_bias,  kv_bias, q_norm, k_norm, v_norm, slot, pos,   at,
                 cache_k, cache_v, q,      heads,  groups, size, cached};
    finish_heads(task, all, work, counters, NORMED, eps, cos, sin, pairs, pos, rule);
}
