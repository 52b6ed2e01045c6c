/* inject, once linear has summed: bias, k norm and rotation; k and v of every drafter layer into its caches.
 * Grid:   blocks of 4 warps, a warp a row and head: T*L*2G of them.
 * Moves:  T*L*2G*K floats in, as many activations out; bound by latency.
 * Source: models.md 7.3.
 * Truth:  oracle.py inject. */
#include "heads.cuh"

/* y: (T, L 2 G K): layer by layer the k heads, then the v heads. k_norm: (L, K) or null. Caches: (L, slots,
 * G, S, K). */
extern "C" __global__ void inject(const float* y, const float* kv_bias, const float* k_norm, float eps,
                                  const float* cos, const float* sin, const int* slot, const int* pos,
                                  const int* at, ACTIVATION* cache_k, ACTIVATION* cache_v, int T, int L,
                                  int slots, int G, int S, int K, int J) {
    int rows = L * 2 * G, t = warp_in_grid() / rows, row = warp_in_grid() % rows;
    if (t >= T || pos[t] < 0) return;
    int layer = row / (2 * G), g = row % G, p = pos[t];
    bool is_k = row % (2 * G) < G;
    size_t to = ((((size_t)layer * slots + slot[t]) * G + g) * S + row_of_key(at[t], S)) * K;
    finish_head(y + ((size_t)t * rows + row) * K, kv_bias ? kv_bias + row * K : nullptr,
                is_k && k_norm ? k_norm + layer * K : nullptr, eps, cos + (size_t)p * J, sin + (size_t)p * J,
                is_k ? J : 0, (is_k ? cache_k : cache_v) + to, K);
}
