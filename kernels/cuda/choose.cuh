/* Of a row's logits the U largest and their shares, by one warp. */
#pragma once
#include "common.cuh"

/* Integers in the order of floats; -0 is 0 and NaN is -infinity. Far from both ends of int. */
__device__ __forceinline__ int key_of(float x) {
    int bits = __float_as_int(x == x ? x + 0.f : -infinity());
    return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ float value_of(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }

constexpr int KEPT_KEYS = 4;  // that a lane has in registers

/* What lane k < U gets of a row: its k-th expert and that one's logit; the first one's. */
struct Choice {
    int id;
    float logit, largest;
};

/* Larger logits first, of equal ones the smaller id. logits: (E,). U <= 32, U <= E. */
__device__ __forceinline__ Choice choose(const float* logits, int E, int U) {
    constexpr int LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;
    const int lane = lane_index();
    int taken = MOST, taken_id = -1;      // of this lane's others, the last one
    int kept[KEPT_KEYS], ids[KEPT_KEYS];  // this lane's first ones, the largest left in front
#pragma unroll
    for (int i = 0; i < KEPT_KEYS; ++i)
        ids[i] = lane + 32 * i, kept[i] = ids[i] < E ? key_of(logits[ids[i]]) : LEAST;
#pragma unroll
    for (int end = KEPT_KEYS - 1; end > 0; --end)
#pragma unroll
        for (int i = 0; i < end; ++i) {
            if (kept[i] >= kept[i + 1]) continue;
            const int key = kept[i], id = ids[i];
            kept[i] = kept[i + 1], ids[i] = ids[i + 1], kept[i + 1] = key, ids[i + 1] = id;
        }
    Choice mine{-1, 0.f, 0.f};
    for (int k = 0; k < U; ++k) {
        int key = kept[0], id = ids[0];
        for (int e = lane + 32 * KEPT_KEYS; e < E; e += 32) {
            const int other = key_of(logits[e]);
            const bool is_left = other < taken || (other == taken && e > taken_id);
            if (is_left && other > key) key = other, id = e;
        }
        const int top = __reduce_max_sync(FULL_WARP, key);
        u32 having = __ballot_sync(FULL_WARP, key == top);
        if (having & (having - 1)) {
            const int least = __reduce_min_sync(FULL_WARP, key == top ? id : MOST);
            having = __ballot_sync(FULL_WARP, key == top && id == least);
        }
        const int from = __ffs(having) - 1, who = __shfl_sync(FULL_WARP, id, from);
        if (k == 0) mine.largest = value_of(top);
        if (lane == k) mine.id = who, mine.logit = value_of(top);
        if (lane != from) continue;
        if (id == ids[0]) {
#pragma unroll
            for (int i = 0; i + 1 < KEPT_KEYS; ++i) kept[i] = kept[i + 1], ids[i] = ids[i + 1];
            kept[KEPT_KEYS - 1] = LEAST;
        } else {
            taken = key, taken_id = id;
        }
    }
    return mine;
}

/* Of lane k < U the share of its expert: a softmax over the chosen ones (normalise), or its part of one over
 * all E. */
__device__ __forceinline__ float share_of(const Choice& mine, const float* logits, int E, int U,
                                          bool normalise) {
    const float own = lane_index() < U ? expf(mine.logit - mine.largest) : 0.f;
    float total = own;
    if (!normalise) {
        total = 0.f;
        for (int e = lane_index(); e < E; e += 32) total += expf(value_of(key_of(logits[e])) - mine.largest);
    }
    return own / warp_sum(total);
}
