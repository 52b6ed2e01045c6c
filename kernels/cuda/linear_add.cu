/* linear_add: x += a W^T + bias; the new row also goes among the taps. end_layer is the end of a row that has
 * a norm or a scale, once linear has summed: x = scale (x + norm y / rms(y)).
 * Grid:   any number of blocks of 4 warps; a warp walks weight rows, one at a time. end_layer: a block a row,
 *         128 threads.
 * Moves:  the weights once, the tokens once a weight row (from cache); bound by the latter beyond one group.
 * Source: models.md 1, 5.
 * Truth:  oracle.py linear_add. */
#include "plain.cuh"

/* a: (T, F). w: (D, F). bias, tap_row, taps: may be null. taps: rows of C, the copy begins at column tap_at.
 */
extern "C" __global__ void linear_add(const ACTIVATION* a, const WEIGHT* w, const float* bias,
                                      const int* tap_row, int tap_at, ACTIVATION* x, ACTIVATION* taps, int T,
                                      int D, int F, int C) {
    for (int d = warp_in_grid(); d < D; d += warps_in_grid())
        for (int first = 0; first < T; first += GROUP) {
            int count = min(GROUP, T - first), t = first + lane_index();
            float sum = dot_group(WeightRow(w, d, D, F), a + (size_t)first * F, F, count);
            if (lane_index() >= count) continue;
            if (bias) sum += bias[d];
            ACTIVATION y = from_f32<ACTIVATION>(to_f32(x[(size_t)t * D + d]) + sum);
            x[(size_t)t * D + d] = y;
            if (taps && tap_row[t] >= 0) taps[(size_t)tap_row[t] * C + tap_at + d] = y;
        }
}

/* y: (T, D). norm, scale: may be null. The rest as above. */
extern "C" __global__ void end_layer(const float* y, const float* norm, float eps, const float* scale,
                                     const int* tap_row, int tap_at, ACTIVATION* x, ACTIVATION* taps, int D,
                                     int C) {
    const int t = blockIdx.x;
    const float* sums = y + (size_t)t * D;
    float r = 1.f;
    if (norm) {
        float squares = 0.f;
        for (int d = threadIdx.x; d < D; d += blockDim.x) squares = fmaf(sums[d], sums[d], squares);
        r = rsqrtf(block_sum(squares) / D + eps);
    }
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float next = to_f32(x[(size_t)t * D + d]) + (norm ? norm[d] * (sums[d] * r) : sums[d]);
        ACTIVATION kept = from_f32<ACTIVATION>(scale ? scale[0] * next : next);
        x[(size_t)t * D + d] = kept;
        if (taps && tap_row[t] >= 0) taps[(size_t)tap_row[t] * C + tap_at + d] = kept;
    }
}
