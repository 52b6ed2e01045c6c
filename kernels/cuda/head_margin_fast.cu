/* head_margin_fast: what head_fast gives, bit for bit, and margin[pick[r]] = how far the largest other logit
 *         lies below. A kernel of its own, so that head_fast pays nothing for it.
 * Grid:   skinny.cuh with one slice; ids as head_best.cuh says.
 * Moves:  V*D*2 bytes; bound by HBM.
 * Truth:  oracle.py head. */
#include "head_best.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    head_margin_fast(const u16* w, const bf16* x, const int* pick, const float* norm, int* ids, float* margin,
                     u32* counters, float* work, float eps, int rows, int outputs, int cols, int limit) {
    __shared__ RowScale scales[FINISHERS];
    choose<true>(own_scale(scales), w, x, pick, norm, ids, margin, counters, work, eps, rows, outputs, cols,
                 limit);
}
