/* experts_up: h[r] = act(gate, up) of pair r's expert on its token; a weight holds the gate rows, then the up
 *         rows.
 * Grid:   any number of blocks of 4 warps; a warp walks the outputs of all experts, with all pairs of one.
 * Moves:  the weights of experts that have pairs, once for 8 of them.
 * Source: models.md 3, 4.
 * Truth:  oracle_moe.py experts_up. */
#include "activate.cuh"
#include "plain_experts.cuh"

/* u: (T, D). w: (E, 2F, D), scales: of MXFP4 blocks. bias: (E, 2F) or null. h: (pairs, F), pair r of token r
 * / U. */
extern "C" __global__ void experts_up(const ACTIVATION* u, const WEIGHT* w, const u8* scales,
                                      const float* bias, const int* expert, const int* first,
                                      const int* order, int act, float limit, float alpha, ACTIVATION* h,
                                      int pairs, int U, int E, int D, int F) {
    for (size_t i = warp_in_grid(); i < (size_t)E * F; i += warps_in_grid()) {
        const int e = i / F, f = i % F, end = first[e + 1];
        for (int at = first[e]; at < end; at += GROUP) {
            const int count = min(GROUP, end - at);
            auto token = [=](int j) { return u + (size_t)(order[at + j] / U) * D; };
            float gate = dot_each(ExpertRow(w, scales, e, f, 2 * F, D), token, D, count);
            float up = dot_each(ExpertRow(w, scales, e, F + f, 2 * F, D), token, D, count);
            if (lane_index() >= count) continue;
            if (bias) gate += bias[(size_t)e * 2 * F + f], up += bias[(size_t)e * 2 * F + F + f];
            h[(size_t)order[at + lane_index()] * F + f] =
                from_f32<ACTIVATION>(activate(act, gate, up, limit, alpha));
        }
    }
    for (size_t i = warp_in_grid() * 32 + lane_index(); i < (size_t)pairs * F; i += warps_in_grid() * 32)
        if (expert[i / F] < 0) h[i] = from_f32<ACTIVATION>(0.f);
}
