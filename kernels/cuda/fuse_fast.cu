/* fuse_fast: f = hidden_norm(fc taps).
 * Grid:   skinny.cuh; rows end as skinny_normed.cuh says.
 * Moves:  D*C*2 bytes; bound by HBM.
 * Truth:  oracle.py fuse. */
#include "skinny_normed.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    fuse_fast(const u16* w, const bf16* taps, const float* norm, bf16* f, u32* counters, float* work,
              float eps, int rows, int outputs, int cols, int slices) {
    Task task = make_task(rows, cols, (outputs + 15) / 16, slices);
    KeepRows sink{task, Whole(work, slices, outputs), nullptr, counters, work};
    if (blockIdx.x == 0)  // for the end
        for (int n = 8 * threadIdx.x; n < outputs; n += 8 * THREADS) prefetch_l2(norm + n);
    skinny<false>(task, Weights{cols, w}, taps, nullptr, nullptr, nullptr, sink);
    Fused end{norm, f, outputs, {}};
    end_rows(task, Whole(work, slices, outputs), counters, eps, end);
}
