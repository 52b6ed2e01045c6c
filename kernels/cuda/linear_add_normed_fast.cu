/* linear_add_normed_fast: x = scale (x + norm n(a W^T + bias)), n(y) = y / rms(y), rounded once; the new row
 *         also goes among the taps.
 * Grid:   skinny.cuh; rows end as skinny_normed.cuh says.
 * Moves:  N*K*2 bytes; bound by HBM.
 * Truth:  oracle.py linear_add. */
#include "skinny_normed.cuh"

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    linear_add_normed_fast(const u16* w, const bf16* a, const float* bias, const float* norm,
                           const float* scale, const int* tap_row, bf16* x, bf16* taps, u32* counters,
                           float* work, float eps, int rows, int outputs, int cols, int slices, int tap_at,
                           int tap_cols) {
    Task task = make_task(rows, cols, (outputs + 15) / 16, slices);
    KeepRows sink{task, Whole(work, slices, outputs), bias, counters, work};
    skinny<false>(task, Weights{cols, w}, a, nullptr, nullptr, nullptr, sink);
    EndLayer end{norm, scale, tap_row, x, taps, outputs, tap_at, tap_cols, {}, {}, 1.f, -1};
    end_rows(task, Whole(work, slices, outputs), counters, eps, end);
}
