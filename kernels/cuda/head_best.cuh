/* The smallest argmax of the head's logits, which never reach memory: what head_fast.cu and
 * head_margin_fast.cu share. Each block keeps the best of its tiles, the last block compares the blocks. */
#pragma once
#include "skinny.cuh"

/* The best of what was taken and, where MARGINS, the largest of the others. */
template <bool MARGINS>
struct Top {
    Best best{-infinity(), 0x7fffffff};
    float second = -infinity();

    __device__ __forceinline__ void take(Best other, float other_second) {
        if (MARGINS) second = fmaxf(fmaxf(second, other_second), fminf(best.value, other.value));
        best = better(best, other);
    }
};

template <bool MARGINS>
struct KeepBest {
    const Task& task;
    RowScale& scale;
    float* work;
    float eps;
    int limit;
    Top<MARGINS> top[UNITS];

    __device__ __forceinline__ void prepare(int) const {}

    __device__ __forceinline__ void use_squares(float sum) { scale.make(task, sum, eps); }

    /* Zero times a number adds nothing; times NaN or infinity it makes a NaN, which nothing beats. */
    __device__ __forceinline__ void look_at(int q, float value, int index) {
        top[q].take(Best{value, index}, -infinity());
        top[q].best.value = fmaf(value, 0.f, top[q].best.value);
    }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        int n = 16 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            float r = scale.of[token_of(q)];
            if (n < limit) look_at(q, v[q].x * r, n);
            if (n + 8 < limit) look_at(q, v[q].y * r, n + 8);
        }
    }

    /* The best of this warp's tiles to [rows][finishing warps of all blocks]. Here, so that the streaming
     * warps need not carry them. */
    __device__ __forceinline__ void end() {
        int me = blockIdx.x * FINISHERS + warp_index() - WARPS, count = gridDim.x * FINISHERS;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            Best& best = top[q].best;
            if (best.value != best.value) best = Best{infinity(), -1};
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {  // the 8 lanes that hold this token
                Best other{__shfl_xor_sync(FULL_WARP, best.value, step),
                           __shfl_xor_sync(FULL_WARP, best.index, step)};
                top[q].take(other, MARGINS ? __shfl_xor_sync(FULL_WARP, top[q].second, step) : 0.f);
            }
            if (row_of() || token_of(q) >= task.rows) continue;
            size_t at = (size_t)token_of(q) * count + me;
            ((Best*)(work + SQUARES))[at] = best;
            if (MARGINS) seconds_of(work, task.rows, count)[at] = top[q].second;
        }
    }

    /* Behind the bests. */
    __device__ __forceinline__ static float* seconds_of(float* work, int rows, int count) {
        return work + SQUARES + 2 * (size_t)rows * count;
    }
};

/* margin: of MARGINS alone. */
template <bool MARGINS>
__device__ __forceinline__ void choose(RowScale& scale, const u16* w, const bf16* x, const int* pick,
                                       const float* norm, int* ids, float* margin, u32* counters, float* work,
                                       float eps, int rows, int outputs, int cols, int limit) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, 1);
    KeepBest<MARGINS> sink{task, scale, work, eps, min(limit, outputs), {}};
    skinny<true>(task, Weights{cols, w}, x, pick, norm, work, sink);
    if (!last_to_arrive(counters, gridDim.x)) return;
    const float2* bests = (const float2*)(work + SQUARES);
    int count = gridDim.x * FINISHERS;
    const float* seconds = sink.seconds_of(work, rows, count);
    for (int row = warp_index(); row < rows; row += THREADS / 32) {
        Top<MARGINS> top;
#pragma unroll 8
        for (int i = lane_index(); i < count; i += 32) {
            float2 bits = __ldcg(bests + (size_t)row * count + i);
            float second = MARGINS ? __ldcg(seconds + (size_t)row * count + i) : 0.f;
            top.take(Best{bits.x, __float_as_int(bits.y)}, second);
        }
        Best best = warp_best(top.best);
        if (lane_index() == 0) ids[pick[row]] = best.index;
        if (!MARGINS) continue;
        float second = warp_max(top.best.index == best.index ? top.second : top.best.value);
        if (lane_index() == 0) margin[pick[row]] = best.index < 0 ? infinity() : best.value - second;
    }
}
