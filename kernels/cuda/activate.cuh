/* What gate_up and an expert make of two products; the acts are table.py's. A NaN stays one: comparisons, not
 * fminf. */
#pragma once
#include "common.cuh"

constexpr int SILU = 0, CLAMPED = 1, GELU_TANH = 2;

/* silu and tanh gelu of z are z * sigmoid(s), since (1 + tanh(y)) / 2 is the sigmoid of 2 y; this is s. Where
 * the exponential of -s overflows, z / infinity is 0: no s makes a NaN. */
__device__ __forceinline__ float sigmoid_of(int act, float z) {
    return act == GELU_TANH ? 1.59576912f * fmaf(0.044715f * z * z, z, z) : z;  // 2 sqrt(2 / pi)
}

__device__ __forceinline__ float activate(int act, float gate, float up, float limit, float alpha) {
    if (act == CLAMPED) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return (up + 1.f) * (gate / (1.f + expf(-alpha * gate)));
    }
    return gate / (1.f + expf(-sigmoid_of(act, gate))) * up;
}
