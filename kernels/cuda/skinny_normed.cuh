/* The end of products whose rows are normed as wholes: fuse_fast, linear_add_normed_fast. A tile goes to the
 * workspace as f32 when its last slice has come, and with it each row's sum of squares over its 16 outputs;
 * once all tiles are there, all warps of the grid take pieces of rows in turn. The blocks must be on the card
 * together, for they wait for each other. A row's bits are its own: its squares are added up tile by tile in
 * one order. */
#pragma once
#include "neighbours.cuh"
#include "normed_ends.cuh"
#include "skinny.cuh"

constexpr int PIECE = 32 * PER;  // outputs of a warp at a time

/* Where whole rows meet: y (rows, outputs), then squares (rows, tiles). */
struct Whole {
    float *y, *squares;
    int outputs, tiles;

    __device__ __forceinline__ Whole(float* work, int slices, int outputs_) {
        outputs = outputs_, tiles = (outputs_ + 15) / 16;
        y = work + SQUARES * slices + (size_t)tiles * slices * UNITS * 64;  // behind the slices' sums
        squares = y + (size_t)MOST_ROWS * outputs_;
    }
};

struct KeepRows {
    const Task& task;
    const Whole whole;
    const float* bias;  // or null
    u32* counters;
    float* work;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) const {
        if (!merge(task, work, counters, tile, v)) return;
        const int n = 16 * tile + row_of();
        const bool has_low = n < whole.outputs, has_high = n + 8 < whole.outputs;
        const float low = bias && has_low ? bias[n] : 0.f, high = bias && has_high ? bias[n + 8] : 0.f;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            const float2 sum = make_float2(has_low ? v[q].x + low : 0.f, has_high ? v[q].y + high : 0.f);
            float squares = fmaf(sum.x, sum.x, sum.y * sum.y);
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                squares += __shfl_xor_sync(FULL_WARP, squares, other);  // the lanes of this token
            if (token_of(q) >= task.rows) continue;
            float* to = whole.y + (size_t)token_of(q) * whole.outputs + n;
            if (has_low) __stcg(to, sum.x);
            if (has_high) __stcg(to + 8, sum.y);
            if (row_of() == 0) __stcg(whole.squares + token_of(q) * whole.tiles + tile, squares);
        }
    }
};

/* By all threads, after skinny() with KeepRows. end: of normed_ends.cuh. */
template <class End>
__device__ __forceinline__ void end_rows(const Task& task, const Whole& whole, u32* counters, float eps,
                                         End& end) {
    u32* const counter = counters + whole.tiles;
    __syncthreads();
    if (threadIdx.x == 0) red_add_release(counter, 1);
    const int pieces = (whole.outputs + PIECE - 1) / PIECE, step = gridDim.x * (THREADS / 32);
    const bool is_whole = whole.outputs % PER == 0;
    for (int item = blockIdx.x + warp_index() * gridDim.x; item < task.rows * pieces; item += step) {
        const int row = item / pieces, n = item % pieces * PIECE + PER * lane_index();
        const int there = min(PER, whole.outputs - n);
        end.prepare(row, n, there);
        warp_wait_for(counter, gridDim.x);
        const float* from = whole.y + (size_t)row * whole.outputs + n;
        Neighbours<float, PER> y;
        if (is_whole && there > 0)
            y.load_l2(from);
        else
#pragma unroll
            for (int i = 0; i < PER; ++i) y.v[i] = i < there ? __ldcg(from + i) : 0.f;
        float sum = 0.f;
#pragma unroll 4
        for (int tile = lane_index(); tile < whole.tiles; tile += 32)
            sum += __ldcg(whole.squares + row * whole.tiles + tile);
        end(row, n, there, y.v, rsqrtf(warp_sum(sum) / whole.outputs + eps));
    }
    __syncthreads();
    // Nobody waits any more once all blocks have come here; who waited has seen all arrivals.
    if (threadIdx.x == 0 && atomicAdd(counter + 1, 1u) == gridDim.x - 1) counter[0] = counter[1] = 0;
}
