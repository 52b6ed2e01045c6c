/* fuse_fast: f = hidden_norm(fc taps).
 * Grid:   skinny.cuh; rows end as skinny_normed.cuh says.
 * Moves:  D*C*2 bytes; bound by HBM.
 * Truth:  oracle.py fuse. */
#include "skinny_normed.cuh"

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
