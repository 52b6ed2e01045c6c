/* fuse_fast: f = hidden_norm(fc taps). Tiles go to the workspace as f32 when their last slice has come; the
 *         block that ends last norms the rows.
 * Grid:   skinny.cuh.
 * Moves:  D*C*2 bytes; bound by HBM, with a tail of rows*D*4 bytes through one block.
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
    skinny<false>(task, Weights{cols, w}, taps, nullptr, nullptr, nullptr, sink);
    if (!last_to_arrive(counters + tiles, gridDim.x)) return;
    for (int row = warp_index(); row < rows; row += THREADS / 32) {  // one warp a row: its bits are its own
        const float* from = y + (size_t)row * outputs;
        float sum = 0.f;
#pragma unroll 16
        for (int n = lane_index(); n < outputs; n += 32) {
            float value = __ldcg(from + n);
            sum += value * value;
        }
        float r = rsqrtf(warp_sum(sum) / outputs + eps);
#pragma unroll 16
        for (int n = lane_index(); n < outputs; n += 32)
            f[(size_t)row * outputs + n] = to_bf16(norm[n] * (__ldcg(from + n) * r));
    }
}
