/* The style guide's rmsnorm: block_sum, bf16 in and out. Grid: one block a row. */
#include "common.cuh"

#ifndef ACTIVATION
#define ACTIVATION bf16
#endif

extern "C" __global__ void rmsnorm(const bf16* x, const bf16* w, float eps, bf16* y, int D) {
    size_t row = (size_t)blockIdx.x * D;
    float ss = 0.f;
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float v = to_f32(x[row + d]);
        ss += v * v;
    }
    float r = rsqrtf(block_sum(ss) / D + eps);
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        y[row + d] = to_bf16(to_f32(w[d]) * (to_f32(x[row + d]) * r));
}

/* Row maximum with its first place, and the plain maximum. */
extern "C" __global__ void row_best(const ACTIVATION* x, float* value, int* index, float* largest, int D) {
    Best best{-infinity(), 0};
    float most = -infinity();
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float v = to_f32(x[(size_t)blockIdx.x * D + d]);
        best = better(best, Best{v, d});
        most = fmaxf(most, v);
    }
    best = block_best(best);
    most = block_max(most);
    if (threadIdx.x == 0)
        value[blockIdx.x] = best.value, index[blockIdx.x] = best.index, largest[blockIdx.x] = most;
}
