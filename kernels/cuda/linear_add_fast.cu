/* linear_add_fast: x += a W^T + bias, rounded once; the new row also goes among the taps.
 * Grid:   skinny.cuh; tiles end as skinny_rows.cuh says.
 * Moves:  N*K*2 bytes; bound by HBM.
 * Truth:  oracle.py linear_add. */
#include "skinny_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    linear_add_fast(const u16* w, const bf16* a, const float* bias, const int* tap_row, bf16* x, bf16* taps,
                    u32* counters, float* work, int rows, int outputs, int cols, int slices, int tap_at,
                    int tap_cols) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, slices);
    EndRows<true> sink{task, bias, tap_row, x, taps, counters, work, outputs, tap_at, tap_cols, 0.f, 0.f, {}};
    skinny<false>(task, Weights{cols, w}, a, nullptr, nullptr, nullptr, sink);
}
