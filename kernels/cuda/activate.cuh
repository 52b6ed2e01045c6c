/* What an expert makes of its two products; the acts are table.py's. A NaN stays one: comparisons, not fminf.
 */
#pragma once
#include "common.cuh"

constexpr int SILU = 0, CLAMPED = 1, GELU_TANH = 2;

__device__ __forceinline__ float activate(int act, float gate, float up, float limit, float alpha) {
    if (act == SILU) return gate / (1.f + expf(-gate)) * up;
    if (act == CLAMPED) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return (up + 1.f) * (gate / (1.f + expf(-alpha * gate)));
    }
    // sqrt(2 / pi)
    float inner = 0.797884561f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.f + tanhf(inner)) * up;
}
