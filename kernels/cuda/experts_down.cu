/* experts_down: x[t] += sum over k of share[t, k] * (W h[t, k] + bias) of its expert, in router order,
 *         rounded once; the new row also goes among the taps. Where it does not add: x[t] is the sum.
 * Grid:   any number of blocks of 4 warps; a warp walks outputs of tokens, one at a time.
 * Moves:  a weight row for each output; bound by that.
 * Source: models.md 3, 4.
 * Truth:  oracle_moe.py experts_down. */
#include "plain_experts.cuh"

/* h: (T, U, F). w: (E, D, F), scales: of MXFP4 blocks. bias: (E, D). bias, tap_row, taps: may be null. taps:
 * rows of C, the copy begins at column tap_at. */
extern "C" __global__ void experts_down(const ACTIVATION* h, const WEIGHT* w, const u8* scales,
                                        const float* bias, const int* expert, const float* share, int adds,
                                        const int* tap_row, int tap_at, ACTIVATION* x, ACTIVATION* taps,
                                        int T, int U, int D, int F, int C) {
    for (size_t i = warp_in_grid(); i < (size_t)T * D; i += warps_in_grid()) {
        const int t = i / D, d = i % D;
        if (expert[(size_t)t * U] < 0) {
            if (!adds && lane_index() == 0) x[i] = from_f32<ACTIVATION>(0.f);
            continue;
        }
        float total = 0.f;
        for (int k = 0; k < U; ++k) {
            const size_t r = (size_t)t * U + k;
            const int e = expert[r];
            float sum = dot_each(ExpertRow(w, scales, e, d, D, F), [=](int) { return h + r * F; }, F, 1);
            if (bias) sum += bias[(size_t)e * D + d];
            total = fmaf(share[r], sum, total);
        }
        if (lane_index() > 0) continue;
        ACTIVATION y = from_f32<ACTIVATION>(adds ? to_f32(x[i]) + total : total);
        x[i] = y;
        if (taps && tap_row[t] >= 0) taps[(size_t)tap_row[t] * C + tap_at + d] = y;
    }
}
