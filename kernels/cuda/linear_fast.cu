/* linear_fast: y = a W^T + bias, rounded once.
 * Grid:   skinny.cuh; tiles end as skinny_rows.cuh says.
 * Moves:  N*K*2 bytes; bound by HBM.
 * Truth:  oracle.py linear. */
#include "skinny_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    linear_fast(const u16* w, const bf16* a, const float* bias, bf16* y, u32* counters, float* work, int rows,
                int outputs, int cols, int slices) {
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, slices);
    EndRows<false> sink{task, bias, nullptr, y, nullptr, counters, work, outputs, 0, 0, 0.f, 0.f, {}};
    skinny<false>(task, Weights{cols, w}, a, nullptr, nullptr, nullptr, sink);
}
