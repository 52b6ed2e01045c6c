/* Logits as laws see them: cap * tanh(multiplier * z / cap) of a bare logit z; cap 0: multiplier * z.
 * Source: tanh: Cephes tanhf, the exponential by its instruction; absolute error about 2^-23.
 * Truth:  oracle.py soft_cap. */
#pragma once
#include "common.cuh"

__device__ __forceinline__ float tanh_f32(float x) {
    float a = fabsf(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = fmaf(p, z, 2.06390887954e-2f);
    p = fmaf(p, z, -5.37397155531e-2f);
    p = fmaf(p, z, 1.33314422036e-1f);
    p = fmaf(p, z, -3.33332819422e-1f);
    float large = 1.f - 2.f / (exp2_fast(a * 2.88539008f) + 1.f);  // 2 / ln 2
    return a < 0.625f ? fmaf(p * z, x, x) : copysignf(large, x);
}

/* Rounded as it is: contracted with a caller's subtraction, the best logit would lie off itself. */
__device__ __forceinline__ float soft_cap(float z, float multiplier, float cap) {
    return cap > 0.f ? __fmul_rn(cap, tanh_f32(z * multiplier / cap)) : z * multiplier;
}
