/* inject_fast: k and v of every drafter layer from the context features, into the caches as key at[t] of
 *         each row's slot: one product over the stacked weights [L][k, v][G][K].
 * Grid:   skinny.cuh; heads end as skinny_heads.cuh says.
 * Moves:  L*2*G*K*D*2 bytes; bound by HBM.
 * Truth:  oracle.py inject. */
#include "skinny_heads.cuh"

struct InjectRule {
    const float *kv_bias, *k_norm;
    const int *slot, *pos, *at;
    bf16 *cache_k, *cache_v;
    int slots, groups, size, cached;

    __device__ __forceinline__ Finish operator()(int head, int token) const {
        if (pos[token] < 0) return Finish{nullptr, nullptr, nullptr, false, false};
        int layer = head / (2 * groups), group = head % groups;
        bool is_key = head / groups % 2 == 0;
        size_t row =
            (((size_t)layer * slots + slot[token]) * groups + group) * cached + row_of_key(at[token], cached);
        const float* norm = is_key && k_norm ? k_norm + layer * size : nullptr;
        return Finish{kv_bias ? kv_bias + head * size : nullptr, norm,
                      (is_key ? cache_k : cache_v) + row * size, is_key, false};
    }
};

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
