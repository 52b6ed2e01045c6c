/* normalise: y = norm * x / sqrt(mean(x^2) + eps), row by row, or x itself where norm is null: the prologue
 *         of qkv, gate_up and head (activations to f32 workspace) and the end of fuse (f32 workspace to
 *         activations).
 * Grid:   one block a row, 128 threads; row i reads x[pick[i]] where there is a pick.
 * Moves:  rows*D elements in and out; bound by latency.
 * Source: Zhang & Sennrich 2019, eq. 4.
 * Truth:  oracle.py normed. */
#include "plain.cuh"

#ifndef FROM
#define FROM bf16
#endif
#ifndef TO
#define TO float
#endif

extern "C" __global__ void normalise(const FROM* x, const int* pick, const float* norm, float eps, TO* y,
                                     int D) {
    const FROM* row = x + (size_t)(pick ? pick[blockIdx.x] : blockIdx.x) * D;
    TO* out = y + (size_t)blockIdx.x * D;
    if (!norm) {
        for (int d = threadIdx.x; d < D; d += blockDim.x) out[d] = from_f32<TO>(to_f32(row[d]));
        return;
    }
    float squares = 0.f;
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float v = to_f32(row[d]);
        squares = fmaf(v, v, squares);
    }
    float r = rsqrtf(block_sum(squares) / D + eps);
    for (int d = threadIdx.x; d < D; d += blockDim.x) out[d] = from_f32<TO>(norm[d] * (to_f32(row[d]) * r));
}
