/* linear: y[t][n] = w[n] . x[t] + bias[n], rounded once. In f32: the projections of qkv, inject, fuse, head
 *         and head_logits.
 * Grid:   any number of blocks of 4 warps; a warp walks weight rows, one at a time.
 * Moves:  the weights once, the tokens once a weight row (from cache); bound by the latter beyond one group.
 * Source: models.md 1.
 * Truth:  oracle.py linear, product. */
#include "plain.cuh"

#ifndef TOKEN
#define TOKEN float
#endif
#ifndef OUT
#define OUT float
#endif

/* w: (rows, cols). x: (T, cols). bias: may be null. y: T rows that begin `stride` elements apart. */
extern "C" __global__ void linear(const WEIGHT* w, const TOKEN* x, const float* bias, OUT* y, int T, int rows,
                                  int cols, int stride) {
    for (int n = warp_in_grid(); n < rows; n += warps_in_grid())
        for (int first = 0; first < T; first += GROUP) {
            int count = min(GROUP, T - first), t = first + lane_index();
            float sum = dot_group(WeightRow(w, n, rows, cols), x + (size_t)first * cols, cols, count);
            if (lane_index() >= count) continue;
            if (bias) sum += bias[n];
            y[(size_t)t * stride + n] = from_f32<OUT>(sum);
        }
}
