/* linear_add_normed_fast: x = scale (x + norm n(a W^T + bias)), n(y) = y / rms(y), rounded once; the new row
 *         also goes among the taps.
 * Grid:   skinny.cuh; rows end as skinny_normed.cuh says.
 * Moves:  N*K*2 bytes; bound by HBM.
 * Truth:  oracle.py linear_add. */
#include "skinny_normed.cuh"

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
