/* The end of linear_fast and linear_add_fast: y = sums + bias, or x += sums + bias with a copy among the
 * taps, rounded once. The slice that comes last to a tile of 16 outputs adds the slices up and finishes it.
 */
#pragma once
#include "skinny.cuh"

/* out: y, or x where ADDS. tap_row, taps: null where there are none. */
template <bool ADDS>
struct EndRows {
    const Task& task;
    const float* bias;
    const int* tap_row;
    bf16 *out, *taps;
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
        if (!ADDS) return;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            const bf16* from = out + (size_t)token_of(q) * outputs + n;
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
            float2 sum = make_float2(v[q].x + bias_low, v[q].y + bias_high);
            bf16 low = to_bf16(ADDS ? old[q].x + sum.x : sum.x),
                 high = to_bf16(ADDS ? old[q].y + sum.y : sum.y);
            bf16* to = out + (size_t)token * outputs + n;
            if (has_low) to[0] = low;
            if (has_high) to[8] = high;
            int row = ADDS && taps ? tap_row[token] : -1;
            if (row < 0) continue;
            to = taps + (size_t)row * tap_cols + tap_at + n;
            if (has_low) to[0] = low;
            if (has_high) to[8] = high;
        }
    }
};
