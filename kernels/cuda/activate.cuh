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

/* x / y, rounded as `/` does and by its own operations, without its branch: y from 1 on, is_plain() of both.
 */
__device__ __forceinline__ float divided_plainly(float x, float y) {
    const float start = rcp_fast(y), inverse = fmaf(start, fmaf(-y, start, 1.f), start);
    const float quotient = x * inverse;
    return fmaf(inverse, fmaf(-y, quotient, x), quotient);
}

/* Whether nothing on the way to x / y is subnormal, infinite or NaN. */
__device__ __forceinline__ bool is_plain(float x, float y) {
    constexpr float LARGE = 0x1p60f;
    return fabsf(x) > 1.f / LARGE && fabsf(x) < LARGE && y < LARGE;
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
    float out[Count];
    bool are_plain = true;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        const float below = 1.f + expf(-sigmoid_of(act, gate[i]));
        are_plain = are_plain && is_plain(gate[i], below);
        out[i] = divided_plainly(gate[i], below) * up[i];
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) gate[i] = are_plain ? out[i] : activate(act, gate[i], up[i], 0.f, 0.f);
}
