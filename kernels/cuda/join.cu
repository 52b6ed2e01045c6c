/* join: x = scale (x + n(n(a) a_norm + n(b) b_norm) norm), n(y) = y / rms(y): the end of an mlp and experts
 *         side by side; the new row also goes among the taps.
 * Grid:   a block a row, 128 threads; shared: a row of floats.
 * Moves:  rows alone; bound by latency.
 * Source: models.md 5.
 * Truth:  oracle.py join. */
#include "plain.cuh"

/* a, b: (T, D). scale, tap_row, taps: may be null. taps: rows of C, the copy begins at column tap_at. */
extern "C" __global__ void join(const ACTIVATION* a, const ACTIVATION* b, const float* a_norm,
                                const float* b_norm, const float* norm, float eps, const float* scale,
                                const int* tap_row, int tap_at, ACTIVATION* x, ACTIVATION* taps, int D,
                                int C) {
    extern __shared__ float both[];
    const int t = blockIdx.x;
    const size_t row = (size_t)t * D;
    float of_a = 0.f, of_b = 0.f, squares = 0.f;
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        const float v = to_f32(a[row + d]), w = to_f32(b[row + d]);
        of_a = fmaf(v, v, of_a), of_b = fmaf(w, w, of_b);
    }
    const float r_a = rsqrtf(block_sum(of_a) / D + eps), r_b = rsqrtf(block_sum(of_b) / D + eps);
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        both[d] = a_norm[d] * (to_f32(a[row + d]) * r_a) + b_norm[d] * (to_f32(b[row + d]) * r_b);
        squares = fmaf(both[d], both[d], squares);
    }
    const float r = rsqrtf(block_sum(squares) / D + eps);
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        const float next = to_f32(x[row + d]) + norm[d] * (both[d] * r);
        const ACTIVATION kept = from_f32<ACTIVATION>(scale ? scale[0] * next : next);
        x[row + d] = kept;
        if (taps && tap_row[t] >= 0) taps[(size_t)tap_row[t] * C + tap_at + d] = kept;
    }
}
