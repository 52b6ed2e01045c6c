/* fuse_fast: f = hidden_norm(fc taps). Tiles go to the workspace as f32 when their last slice has come; once
 *         all have, the rows are normed, in parts that all warps take in turn.
 * Grid:   skinny.cuh; all blocks are on the card together, for they wait for each other.
 * Moves:  D*C*2 bytes; bound by HBM, with a tail of D*4 bytes through a warp.
 * Truth:  oracle.py fuse. */
#include "skinny.cuh"

struct KeepRows {
    const Task& task;
    float* y;
    u32* counters;
    float* work;
    int outputs;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) const {
        if (!merge(task, work, counters, tile, v)) return;
        int n = 16 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (token_of(q) >= task.rows) continue;
            float* to = y + (size_t)token_of(q) * outputs + n;
            if (n < outputs) __stcg(to, v[q].x);
            if (n + 8 < outputs) __stcg(to + 8, v[q].y);
        }
    }
};

constexpr int PARTS = 8;  // of a row; a warp that norms one adds up the squares of the whole row itself

/* Part `part` of a row of `outputs` sums, by one warp. */
__device__ __forceinline__ void norm_part(const float* from, const float* norm, bf16* to, int outputs,
                                          int part, float eps) {
    float sum = 0.f;
    const int fours = outputs % 4 ? 0 : outputs;  // what lies aligned for 16 bytes at once
#pragma unroll 8
    for (int n = 4 * lane_index(); n < fours; n += 128) {
        float4 v = __ldcg((const float4*)(from + n));
        sum += v.x * v.x, sum += v.y * v.y, sum += v.z * v.z, sum += v.w * v.w;
    }
    for (int n = fours + lane_index(); n < outputs; n += 32) {
        float v = __ldcg(from + n);
        sum += v * v;
    }
    float r = rsqrtf(warp_sum(sum) / outputs + eps);
    const int end = outputs * (part + 1) / PARTS;
#pragma unroll 8
    for (int n = outputs * part / PARTS + lane_index(); n < end; n += 32)
        to[n] = to_bf16(norm[n] * (__ldcg(from + n) * r));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fuse_fast(const u16* w, const bf16* taps, const float* norm, bf16* f, u32* counters, float* work,
              float eps, int rows, int outputs, int cols, int slices) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, slices);
    float* y = work + SQUARES * slices + (size_t)tiles * slices * UNITS * 64;  // behind the slices' sums
    KeepRows sink{task, y, counters, work, outputs};
    if (blockIdx.x == 0)  // for the end
        for (int n = 8 * threadIdx.x; n < outputs; n += 8 * THREADS) prefetch_l2(norm + n);
    skinny<false>(task, Weights{cols, w}, taps, nullptr, nullptr, nullptr, sink);
    __syncthreads();
    if (threadIdx.x == 0) red_add_release(counters + tiles, 1);
    int step = gridDim.x * (THREADS / 32);
    for (int item = blockIdx.x + warp_index() * gridDim.x; item < rows * PARTS; item += step) {
        warp_wait_for(counters + tiles, gridDim.x);
        size_t at = (size_t)(item / PARTS) * outputs;
        norm_part(y + at, norm, f + at, outputs, item % PARTS, eps);
    }
    __syncthreads();
    // Nobody waits any more once all blocks have come here; who waited has seen all arrivals.
    if (threadIdx.x == 0 && atomicAdd(counters + tiles + 1, 1u) == gridDim.x - 1)
        counters[tiles] = counters[tiles + 1] = 0;
}
