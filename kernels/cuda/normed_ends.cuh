/* The ends of rows that are normed as wholes, PER outputs of a row by a lane: prepare(row, n, there) asks for
 * what outputs n .. n + there - 1 meet in memory, (row, n, there, y, r) ends them: y are their sums, r is 1 /
 * rms of the row. What skinny_normed.cuh and wide_whole.cu share. */
#pragma once
#include "sm90.cuh"

constexpr int PER = 4;

struct Fused {
    const float* norm;
    bf16* f;
    int outputs;
    float scale[PER];

    __device__ __forceinline__ void prepare(int, int n, int there) {
#pragma unroll
        for (int i = 0; i < PER; ++i) scale[i] = i < there ? norm[n + i] : 0.f;
    }

    __device__ __forceinline__ void operator()(int row, int n, int there, const float (&y)[PER],
                                               float r) const {
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (i < there) f[(size_t)row * outputs + n + i] = to_bf16(scale[i] * (y[i] * r));
    }
};

/* norm, scale, tap_row, taps: may be null. */
struct EndLayer {
    const float *norm, *scale;
    const int* tap_row;
    bf16 *x, *taps;
    int outputs, tap_at, tap_cols;
    float times[PER], old[PER], all;
    int tap;

    /* Nobody else reads or writes these numbers of x. */
    __device__ __forceinline__ void prepare(int row, int n, int there) {
        const bf16* from = x + (size_t)row * outputs + n;
        all = scale ? scale[0] : 1.f, tap = taps ? tap_row[row] : -1;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            times[i] = norm && i < there ? norm[n + i] : 1.f;
            old[i] = i < there ? to_f32(from[i]) : 0.f;
        }
    }

    __device__ __forceinline__ void operator()(int row, int n, int there, const float (&y)[PER],
                                               float r) const {
        if (!norm) r = 1.f;
        bf16 *to = x + (size_t)row * outputs + n, *copy = taps + (size_t)max(tap, 0) * tap_cols + tap_at + n;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            if (i >= there) break;
            const bf16 next = to_bf16(all * (old[i] + times[i] * (y[i] * r)));
            to[i] = next;
            if (tap >= 0) copy[i] = next;
        }
    }
};
