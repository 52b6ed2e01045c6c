/* The smallest argmax of the head's logits, which never reach memory: what head_fast.cu and
 * head_margin_fast.cu share. Each block keeps the best of its tiles, the last block compares the blocks. */
#pragma once
#include "best.cuh"
#include "skinny.cuh"

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

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        int n = 16 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            float r = scale.of[token_of(q)];
            if (n < limit) top[q].look_at(v[q].x * r, n);
            if (n + 8 < limit) top[q].look_at(v[q].y * r, n + 8);
        }
    }

    /* The best of this warp's tiles to [rows][finishing warps of all blocks]. Here, so that the streaming
     * warps need not carry them. */
    __device__ __forceinline__ void end() {
        int me = blockIdx.x * FINISHERS + warp_index() - WARPS, count = gridDim.x * FINISHERS;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            top[q].close();
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top[q].take_lane(step);  // the 8 lanes of this token
            if (row_of() || token_of(q) >= task.rows) continue;
            size_t at = (size_t)token_of(q) * count + me;
            ((Best*)(work + SQUARES))[at] = top[q].best;
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
    for (int row = warp_index(); row < rows; row += THREADS / 32)
        name_best<MARGINS>(bests + (size_t)row * count, seconds + (size_t)row * count, count, ids + pick[row],
                           margin + (MARGINS ? pick[row] : 0));
}
