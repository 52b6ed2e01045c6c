/* qkv_prefill: qkv.cu for heads of 64 to 512 (HEAD) that rotate as a whole, and bf16.
 * Grid:   blocks of 4 warps, a warp HEADS neighbouring heads of a row, whose loads are under way together.
 * Moves:  T*(H + 2G)*HEAD floats in, as many bf16 out.
 * Source: models.md 1, 2.
 * Truth:  oracle.py qkv. */
#include "neighbours.cuh"
#include "sm90.cuh"

#ifndef HEAD
#define HEAD 128
#endif
#ifndef HEADS
#define HEADS 8
#endif

constexpr int HALF_HEAD = HEAD / 2, LANE = HALF_HEAD / 32;  // of each half of a head, a lane's

using Floats = Neighbours<float, LANE>;

/* y: (T, (H + G + values) HEAD): the q heads, the k heads, the v heads. values: G; 0: a v head is what its k
 * head is here. Caches: (slots, G, S, HEAD). */
extern "C" __global__ void __launch_bounds__(128)
    qkv_prefill(const float* y, float eps, const float* q_bias, const float* kv_bias, const float* q_norm,
                const float* k_norm, const float* v_norm, const float* cos, const float* sin, const int* slot,
                const int* pos, const int* key, bf16* cache_k, bf16* cache_v, bf16* q, int T, int H, int G,
                int values, int S) {
    griddep_launch();
    griddep_wait();
    const int all = H + 2 * G, parts = (all + HEADS - 1) / HEADS, warp = blockIdx.x * 4 + warp_index();
    const int t = warp / parts, first = warp % parts * HEADS, at = LANE * lane_index();
    if (t >= T) return;
    const int p = pos[t], own_slot = slot[t], own_row = row_of_key(key[t], S);
    const size_t angle = (size_t)max(p, 0) * HALF_HEAD + at;
    const Floats c = *(const Floats*)(cos + angle), s = *(const Floats*)(sin + angle);
    auto source = [=](int head) { return head < H + G ? head : head - G + values; };  // in y
    Floats v[HEADS][2];
#pragma unroll
    for (int i = 0; i < HEADS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            v[i][half] =
                *(const Floats*)(y + ((size_t)t * (H + G + values) + source(min(first + i, all - 1))) * HEAD +
                                 half * HALF_HEAD + at);
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const int head = first + i, row = head - H;
        if (head >= all || (p < 0 && row >= 0)) break;
        const float* bias = row < 0 ? q_bias : kv_bias;
        const float* norm = row < 0 ? q_norm : row < G ? k_norm : v_norm;
        if (bias) bias += (row < 0 ? head : source(head) - H) * HEAD + at;
        float r = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < LANE; ++j) {
                float& x = v[i][half].v[j];
                if (bias) x += bias[half * HALF_HEAD + j];
                r = fmaf(x, x, r);
            }
        if (norm) {
            r = rsqrtf(warp_sum(r) / HEAD + eps);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < LANE; ++j)
                    v[i][half].v[j] = norm[half * HALF_HEAD + at + j] * (v[i][half].v[j] * r);
        }
        Neighbours<bf16, LANE> low, high;
#pragma unroll
        for (int j = 0; j < LANE; ++j) {
            const float a = v[i][0].v[j], b = v[i][1].v[j];
            const bool turns = row < G;  // not v
            low.v[j] = to_bf16(p < 0 ? 0.f : turns ? a * c.v[j] - b * s.v[j] : a);
            high.v[j] = to_bf16(p < 0 ? 0.f : turns ? b * c.v[j] + a * s.v[j] : b);
        }
        bf16* to =
            row < 0 ? q + ((size_t)t * H + head) * HEAD
                    : (row < G ? cache_k : cache_v) + (((size_t)own_slot * G + row % G) * S + own_row) * HEAD;
        low.template store<true>(to + at, LANE);
        high.template store<true>(to + HALF_HEAD + at, LANE);
    }
}
