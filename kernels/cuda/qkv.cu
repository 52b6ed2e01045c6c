/* qkv, once linear has summed: bias, head norms and rotation; q goes out, k and v into the caches as key
 *         at[t] of the slot.
 * Grid:   blocks of 4 warps, a warp a row and head: T*(H + 2G) of them.
 * Moves:  T*(H + 2G)*K floats in, as many activations out; bound by latency.
 * Source: models.md 1, 2.
 * Truth:  oracle.py qkv. */
#include "heads.cuh"

/* y: (T, (H + 2G) K): the q heads, the k heads, the v heads. Caches: (slots, G, S, K). */
extern "C" __global__ void qkv(const float* y, float eps, const float* q_bias, const float* kv_bias,
                               const float* q_norm, const float* k_norm, const float* v_norm,
                               const float* cos, const float* sin, const int* slot, const int* pos,
                               const int* at, ACTIVATION* cache_k, ACTIVATION* cache_v, ACTIVATION* q, int T,
                               int H, int G, int values, int S, int K, int J) {
    int t = warp_in_grid() / (H + 2 * G), head = warp_in_grid() % (H + 2 * G);
    if (t >= T) return;
    int p = pos[t];
    const float* token = y + (size_t)t * (H + G + values) * K;
    if (head < H) {
        ACTIVATION* out = q + ((size_t)t * H + head) * K;
        if (p >= 0)
            finish_head(token + head * K, q_bias ? q_bias + head * K : nullptr, q_norm, eps,
                        cos + (size_t)p * J, sin + (size_t)p * J, J, out, K);
        else
            for (int i = lane_index(); i < K; i += 32) out[i] = from_f32<ACTIVATION>(0.f);
        return;
    }
    if (p < 0) return;
    int g = (head - H) % G, row = head - H < G ? g : values + g;
    bool is_k = head - H < G;
    size_t to = (((size_t)slot[t] * G + g) * S + row_of_key(at[t], S)) * K;
    finish_head(token + (H + row) * K, kv_bias ? kv_bias + row * K : nullptr, is_k ? k_norm : v_norm, eps,
                cos + (size_t)p * J, sin + (size_t)p * J, is_k ? J : 0, (is_k ? cache_k : cache_v) + to, K);
}
