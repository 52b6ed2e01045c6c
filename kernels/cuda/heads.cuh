/* What qkv and inject do to a head once its projection is summed. */
#pragma once
#include "plain.cuh"

/* One warp: out[i] = rotate(norm * (y + bias) / rms), rounded once. y: K floats. bias, norm: K floats or
 * null. cos, sin: the row's J pairs; pair j is components j and j + J, what lies behind 2J passes; J = 0 for
 * v heads. */
__device__ __forceinline__ void finish_head(const float* y, const float* bias, const float* norm, float eps,
                                            const float* cos, const float* sin, int J, ACTIVATION* out,
                                            int K) {
    float r = 1.f;
    if (norm) {
        float squares = 0.f;
        for (int i = lane_index(); i < K; i += 32) {
            float v = y[i] + (bias ? bias[i] : 0.f);
            squares = fmaf(v, v, squares);
        }
        r = rsqrtf(warp_sum(squares) / K + eps);
    }
    auto normed = [&](int i) {
        float v = y[i] + (bias ? bias[i] : 0.f);
        return norm ? norm[i] * (v * r) : v;
    };
    for (int i = lane_index(); i < K; i += 32) {
        float v = normed(i);
        if (i < J)
            v = v * cos[i] - normed(i + J) * sin[i];
        else if (i < 2 * J)
            v = v * cos[i - J] + normed(i - J) * sin[i - J];
        out[i] = from_f32<ACTIVATION>(v);
    }
}
