/* inject_fast: k and v of every drafter layer from the context features, into the caches as key at[t] of
 *         each row's slot: one product over the stacked weights [L][k, v][G][K].
 * Grid:   skinny.cuh; heads end as skinny_heads.cuh says.
 * Moves:  L*2*G*K*D*2 bytes; bound by HBM.
 * Truth:  oracle.py inject. */
#include "skinny_heads.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    inject_fast(const u16* wkv, const bf16* f, const float* kv_bias, const float* k_norm, const float* cos,
                const float* sin, const int* slot, const int* pos, const int* at, bf16* cache_k,
                bf16* cache_v, u32* counters, float* work, float eps, int rows, int cols, int slices,
                int layers, int slots, int groups, int size, int pairs, int cached) {
    int count = layers * 2 * groups;
    Heads all{size, count, count};
    Task task = make_task(rows, cols, all.tiles(), slices);
    KeepTile sink{task, all, work, counters};
    skinny<false>(task, Weights{cols, wkv}, f, nullptr, nullptr, nullptr, sink);
    count = opaque(layers) * 2 * groups;
    all = Heads{size, count, count};
    task = again(rows, cols, all.tiles(), slices);
    InjectRule rule{kv_bias, k_norm, slot, pos, at, cache_k, cache_v, slots, groups, size, cached};
    finish_heads(task, all, work, counters, false, eps, cos, sin, pairs, pos, rule);
}
