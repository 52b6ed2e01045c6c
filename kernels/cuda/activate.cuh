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

/* x / y, rounded as `/` does and by its own operations, without its branch: neither is 0, infinite or near to
 * either (activate_all). */
__device__ __forceinline__ float divided_plainly(float x, float y) {
    const float start = rcp_fast(y), inverse = fmaf(start, fmaf(-y, start, 1.f), start);
    const float quotient = x * inverse;
    return fmaf(inverse, fmaf(-y, quotient, x), quotient);
}

__device__ __forceinline__ float activate(int act, float gate, float up, float limit, float alpha) {
    if (act == CLAMPED) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return (up + 1.f) * (gate / (1.f + expf(-alpha * gate)));
    }
    return gate / (1.f + expf(-sigmoid_of(act, gate))) * up;
}

/* gate = activate(act, gate, up, 0, 0) of several, not CLAMPED: a division's branch would keep each waiting
 * for the one before. The same bits. */
template <int Count>
__device__ __forceinline__ void activate_all(int act, float (&gate)[Count], const float (&up)[Count]) {
    constexpr float LARGE = 0x1p60f;
    float out[Count], below[Count], most = 0.f, least = LARGE, most_below = 0.f;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        below[i] = 1.f + expf(-sigmoid_of(act, gate[i]));
        most = fmaxf(most, fabsf(gate[i])), least = fminf(least, fabsf(gate[i]));  // a NaN: it stays one
        most_below = fmaxf(most_below, below[i]);
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) out[i] = divided_plainly(gate[i], below[i]) * up[i];
    // Nothing on the way to a quotient is subnormal or infinite; else all once more.
    const bool are_plain = most < LARGE && least > 1.f / LARGE && most_below < LARGE;
    if (!are_plain)
#pragma unroll
        for (int i = 0; i < Count; ++i) out[i] = activate(act, gate[i], up[i], 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < Count; ++i) gate[i] = out[i];
}
