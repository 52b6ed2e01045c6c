/* end_rows: x = scale (x + norm n(y + bias)), n(y) = y / rms(y), rounded once, of sums y in f32: the end of
 *         linear_add in a prompt, where a layer has a norm or a scale; the new row also goes among the taps.
 * Grid:   a block a row, 256 threads.
 * Moves:  T*D*8 bytes; bound by HBM.
 * Source: models.md 5.
 * Truth:  oracle.py linear_add. */
#include "whole_rows.cuh"

/* y: (T, D). bias, norm, scale, tap_row, taps: may be null. D: a multiple of 4, up to 8,192. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
    end_rows(const float* y, const float* bias, const float* norm, float eps, const float* scale,
             const int* tap_row, bf16* x, bf16* taps, int D, int tap_at, int tap_cols) {
    griddep_launch();
    griddep_wait();
    const float* from = y + (size_t)blockIdx.x * D;
    Piece v[MOST_PIECES];
    float squares = 0.f;
    each_piece(D, [&](int k, int n) {
        load_piece(v[k], from + n);
#pragma unroll
        for (int i = 0; i < PER; ++i) v[k][i] += bias ? bias[n + i] : 0.f;
        squares += squares_of(v[k]);
    });
    const float r = norm ? rsqrtf(block_sum(squares) / D + eps) : 1.f;
    const NewRow row(x, scale, tap_row, taps, tap_at, tap_cols, blockIdx.x, D);
    each_piece(D, [&](int k, int n) {
#pragma unroll
        for (int i = 0; i < PER; ++i) v[k][i] = (norm ? norm[n + i] : 1.f) * (v[k][i] * r);
        row.add(n, v[k]);
    });
}
