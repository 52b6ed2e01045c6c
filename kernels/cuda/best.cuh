/* The largest logit of a row, its smallest id, and how far the others lie below: what the ends of the head's
 * products share (head_best.cuh, wide_head.cu). */
#pragma once
#include "common.cuh"

/* The best of what was taken and, where MARGINS, the largest of the others. */
template <bool MARGINS>
struct Top {
    Best best{-infinity(), 0x7fffffff};
    float second = -infinity();

    __device__ __forceinline__ void take(Best other, float other_second) {
        if (MARGINS) second = fmaxf(fmaxf(second, other_second), fminf(best.value, other.value));
        best = better(best, other);
    }

    /* A logit. Zero times a number adds nothing; times NaN or infinity it makes a NaN, which nothing beats.
     */
    __device__ __forceinline__ void look_at(float value, int index) {
        take(Best{value, index}, -infinity());
        best.value = fmaf(value, 0.f, best.value);
    }

    /* After the last one. */
    __device__ __forceinline__ void close() {
        if (best.value != best.value) best = Best{infinity(), -1};
    }

    /* What lane ^ step has. */
    __device__ __forceinline__ void take_lane(int step) {
        Best other{__shfl_xor_sync(FULL_WARP, best.value, step),
                   __shfl_xor_sync(FULL_WARP, best.index, step)};
        take(other, MARGINS ? __shfl_xor_sync(FULL_WARP, second, step) : 0.f);
    }
};

/* By a warp: the best of `count` closed ones of a row, to its id and margin. seconds, margin: of MARGINS. */
template <bool MARGINS>
__device__ __forceinline__ void name_best(const float2* bests, const float* seconds, int count, int* id,
                                          float* margin) {
    Top<MARGINS> top;
#pragma unroll 8
    for (int i = lane_index(); i < count; i += 32) {
        float2 bits = __ldcg(bests + i);
        float second = MARGINS ? __ldcg(seconds + i) : 0.f;
        top.take(Best{bits.x, __float_as_int(bits.y)}, second);
    }
    Best best = warp_best(top.best);
    if (lane_index() == 0) *id = best.index;
    if (!MARGINS) return;
    float second = warp_max(top.best.index == best.index ? top.second : top.best.value);
    if (lane_index() == 0) *margin = best.index < 0 ? infinity() : best.value - second;
}
