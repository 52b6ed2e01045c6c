/* fuse_fast: f = hidden_norm(fc taps). Tiles go to the workspace as f32 when their last slice has come; once
 *         all have, a block norms a row.
 * Grid:   skinny.cuh; all blocks are on the card together, so the first `rows` of them can wait for the rest.
 * Moves:  D*C*2 bytes; bound by HBM, with a tail of D*4 bytes through a block.
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fuse_fast(const u16* w, const bf16* taps, const float* norm, bf16* f, u32* counters, float* work,
              float eps, int rows, int outputs, int cols, int slices) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, slices);
    float* y = work + SQUARES * slices + (size_t)tiles * slices * UNITS * 64;  // behind the slices' sums
    KeepRows sink{task, y, counters, work, outputs};
    if ((int)blockIdx.x < rows)  // for the end
        for (int n = 8 * threadIdx.x; n < outputs; n += 8 * THREADS) prefetch_l2(norm + n);
    skinny<false>(task, Weights{cols, w}, taps, nullptr, nullptr, nullptr, sink);
    int normers = min(rows, (int)gridDim.x);
    __syncthreads();
    if (threadIdx.x == 0) red_add_release(counters + tiles, 1);
    if ((int)blockIdx.x >= normers) return;
    if (warp_index() ==
        0) {  // all its lanes: one that waits alone would come to the barriers apart from them
        while (load_acquire(counters + tiles) != gridDim.x) {
        }
        __syncwarp();
    }
    __syncthreads();
    for (int row = blockIdx.x; row < rows; row += normers) {
        const float* from = y + (size_t)row * outputs;
        float sum = 0.f;
#pragma unroll 4
        for (int n = threadIdx.x; n < outputs; n += THREADS) {
            float value = __ldcg(from + n);
            sum += value * value;
        }
        float r = rsqrtf(block_sum(sum) / outputs + eps);
#pragma unroll 4
        for (int n = threadIdx.x; n < outputs; n += THREADS)
            f[(size_t)row * outputs + n] = to_bf16(norm[n] * (__ldcg(from + n) * r));
    }
    if (last_to_arrive(counters + tiles + 1, normers) && threadIdx.x == 0)
        store_release(counters + tiles, 0);  // all who waited for it have gone on
}
