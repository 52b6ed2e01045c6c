/* join_fast: x = scale (x + n(n(a) a_norm + n(b) b_norm) norm), n(y) = y / rms(y), rounded once; the new row
 *         also goes among the taps.
 * Grid:   a block a row, 256 threads.
 * Moves:  T*D*8 bytes; bound by latency.
 * Source: models.md 5.
 * Truth:  oracle.py join. */
#include "whole_rows.cuh"

/* a, b: (T, D). scale, tap_row, taps: may be null. D: a multiple of 4, up to 8,192. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
    join_fast(const bf16* a, const bf16* b, const float* a_norm, const float* b_norm, const float* norm,
              float eps, const float* scale, const int* tap_row, bf16* x, bf16* taps, int D, int tap_at,
              int tap_cols) {
    griddep_launch();
    griddep_wait();
    const size_t at = (size_t)blockIdx.x * D;
    Piece v[MOST_PIECES], w[MOST_PIECES];
    float of_a = 0.f, of_b = 0.f, squares = 0.f;
    each_piece(D, [&](int k, int n) {
        load_piece(v[k], a + at + n);
        load_piece(w[k], b + at + n);
        of_a += squares_of(v[k]), of_b += squares_of(w[k]);
    });
    const float r_a = rsqrtf(block_sum(of_a) / D + eps), r_b = rsqrtf(block_sum(of_b) / D + eps);
    each_piece(D, [&](int k, int n) {
#pragma unroll
        for (int i = 0; i < PER; ++i)
            v[k][i] = a_norm[n + i] * (v[k][i] * r_a) + b_norm[n + i] * (w[k][i] * r_b);
        squares += squares_of(v[k]);
    });
    const float r = rsqrtf(block_sum(squares) / D + eps);
    const NewRow row(x, scale, tap_row, taps, tap_at, tap_cols, blockIdx.x, D);
    each_piece(D, [&](int k, int n) {
#pragma unroll
        for (int i = 0; i < PER; ++i) v[k][i] = norm[n + i] * (v[k][i] * r);
        row.add(n, v[k]);
    });
}
