/* linear_add: x += a W^T + bias; the new row also goes among the taps.
 * Grid:   any number of blocks of 4 warps; a warp walks weight rows, one at a time.
 * Moves:  the weights once, the tokens once a weight row (from cache); bound by the latter beyond one group.
 * Source: models.md 1.
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
