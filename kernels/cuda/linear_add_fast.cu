/* linear_add_fast: x += a W^T + bias, rounded once; the new row also goes among the taps.
 * Grid:   skinny.cuh; the slice that comes last to a tile of 16 outputs adds the slices up and finishes it.
 * Moves:  N*K*2 bytes; bound by HBM.
 * Truth:  oracle.py linear_add. */
#include "skinny.cuh"

struct AddResidual {
    const Task& task;
    const float* bias;
    const int* tap_row;
    bf16 *x, *taps;
    u32* counters;
    float* work;
    int outputs, tap_at, tap_cols;
    float bias_low, bias_high;
    float2 old[UNITS];  // nobody else writes this tile's rows of x: they are read while its sums are made

    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ void prepare(int tile) {
        int n = 16 * tile + row_of();
        bool has_low = n < outputs, has_high = n + 8 < outputs;
        bias_low = bias && has_low ? bias[n] : 0.f, bias_high = bias && has_high ? bias[n + 8] : 0.f;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            const bf16* from = x + (size_t)token_of(q) * outputs + n;
            bool is_row = token_of(q) < task.rows;
            old[q].x = is_row && has_low ? to_f32(from[0]) : 0.f;
            old[q].y = is_row && has_high ? to_f32(from[8]) : 0.f;
        }
    }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) const {
        if (!merge(task, work, counters, tile, v)) return;
        int n = 16 * tile + row_of();
        bool has_low = n < outputs, has_high = n + 8 < outputs;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            int token = token_of(q);
            if (token >= task.rows) continue;
            bf16 low = to_bf16(old[q].x + (v[q].x + bias_low)),
                 high = to_bf16(old[q].y + (v[q].y + bias_high));
            bf16* to = x + (size_t)token * outputs + n;
            if (has_low) to[0] = low;
            if (has_high) to[8] = high;
            int row = taps ? tap_row[token] : -1;
            if (row < 0) continue;
            to = taps + (size_t)row * tap_cols + tap_at + n;
            if (has_low) to[0] = low;
            if (has_high) to[8] = high;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    linear_add_fast(const u16* w, const bf16* a, const float* bias, const int* tap_row, bf16* x, bf16* taps,
                    u32* counters, float* work, int rows, int outputs, int cols, int slices, int tap_at,
                    int tap_cols) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, slices);
    AddResidual sink{task, bias, tap_row, x, taps, counters, work, outputs, tap_at, tap_cols, 0.f, 0.f, {}};
    skinny<false>(task, Weights{cols, w}, a, nullptr, nullptr, nullptr, sink);
}
