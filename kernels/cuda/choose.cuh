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

struct Choice {
    int id;
    float share;
};

/* Lane k < U gets the k-th: larger logits first, of equal ones the smaller id. Its share is a softmax over
 * the chosen ones (normalise), or its part of one over all E. logits: (E,). U <= 32, U <= E. */
__device__ __forceinline__ Choice choose(const float* logits, int E, int U, bool normalise) {
    constexpr int LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;
    const int lane = lane_index();
    int taken = MOST, taken_id = -1, key, id;
    int kept[KEPT_KEYS];  // this lane's first ones
#pragma unroll
    for (int i = 0; i < KEPT_KEYS; ++i) kept[i] = lane + 32 * i < E ? key_of(logits[lane + 32 * i]) : LEAST;
    auto look = [&] {  // this lane's next one, of experts lane, lane + 32, ...
        key = LEAST, id = MOST;
        auto meet = [&](int other, int e) {
            const bool is_left = other < taken || (other == taken && e > taken_id);
            if (is_left && other > key) key = other, id = e;
        };
#pragma unroll
        for (int i = 0; i < KEPT_KEYS; ++i) meet(kept[i], lane + 32 * i);
        for (int e = lane + 32 * KEPT_KEYS; e < E; e += 32) meet(key_of(logits[e]), e);
    };
    look();
    Choice mine{-1, 0.f};
    float value = 0.f, largest = 0.f;
    for (int k = 0; k < U; ++k) {
        const int top = __reduce_max_sync(FULL_WARP, key);
        const int who = __reduce_min_sync(FULL_WARP, key == top ? id : MOST);
        if (k == 0) largest = value_of(top);
        if (lane == k) mine.id = who, value = value_of(top);
        if (id == who) {
            taken = key, taken_id = id;
            look();
        }
    }
    const float own = lane < U ? expf(value - largest) : 0.f;
    float total = own;
    if (!normalise) {
        total = 0.f;
        for (int e = lane; e < E; e += 32) total += expf(value_of(key_of(logits[e])) - largest);
    }
    mine.share = own / warp_sum(total);
    return mine;
}
