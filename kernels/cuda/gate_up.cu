/* gate_up: h = act(Wg x) * (Wu x) on normed rows; w holds the gate rows, then the up rows.
 * Grid:   any number of blocks of 4 warps; a warp walks pairs of a gate row and its up row.
 * Moves:  the weights once, the tokens twice a pair (from cache); bound by the latter beyond one group.
 * Source: models.md 1.
 * Truth:  oracle.py gate_up. */
#include "activate.cuh"
#include "plain.cuh"

/* x: (T, D), normed. w: (2F, D). h: (T, F). */
extern "C" __global__ void gate_up(const float* x, const WEIGHT* w, ACTIVATION* h, int act, int T, int D,
                                   int F) {
    for (int f = warp_in_grid(); f < F; f += warps_in_grid())
        for (int first = 0; first < T; first += GROUP) {
            int count = min(GROUP, T - first), t = first + lane_index();
            const float* tokens = x + (size_t)first * D;
            float gate = dot_group(WeightRow(w, f, 2 * F, D), tokens, D, count);
            float up = dot_group(WeightRow(w, F + f, 2 * F, D), tokens, D, count);
            if (lane_index() < count)
                h[(size_t)t * F + f] = from_f32<ACTIVATION>(activate(act, gate, up, 0.f, 0.f));
        }
}
