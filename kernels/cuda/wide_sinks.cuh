/* What the sinks of the wide_* kernels get: a warp's sums by token columns, and the scales of those. */
#pragma once
#include "wide.cuh"

/* f(k, column, low, high) for each token column of a lane's sums, of output rows lane / 4 and 8 on. The k-th
 * is offset(k) columns behind the first. */
__device__ __forceinline__ constexpr int offset(int k) { return 8 * (k / 2) + k % 2; }
__device__ __forceinline__ constexpr int low_of(int k) { return 2 * k - k % 2; }  // its sums; high: 2 on

template <class F>
__device__ __forceinline__ void each_column(const float (&sums)[SUMS], const F& f) {
#pragma unroll
    for (int k = 0; k < SUMS / 2; ++k)
        f(k, 2 * (lane_index() % 4) + offset(k), sums[low_of(k)], sums[low_of(k) + 2]);
}

/* The scale of each column; 1 without scales, and where there is no token. */
struct Scales {
    float of[SUMS / 2];

    __device__ __forceinline__ Scales(const Unit& unit, int rows, const float* scale) {
        const int first = unit.first_token + 2 * (lane_index() % 4);
#pragma unroll
        for (int k = 0; k < SUMS / 2; ++k)  // all loads are under way together
            of[k] = scale && first + offset(k) < rows ? __ldg(scale + first + offset(k)) : 1.f;
    }
};

/* f(at, low, high) for each token that there is, at = its row * stride, times its scale. */
template <class F>
__device__ __forceinline__ void each_token(const Unit& unit, int rows, const float* scale, int stride,
                                           const float (&sums)[SUMS], const F& f) {
    const Scales scales(unit, rows, scale);
    const int first = unit.first_token + 2 * (lane_index() % 4), there = rows - first;
    const size_t at = (size_t)first * stride;
    each_column(sums, [&](int k, int, float low, float high) {
        if (offset(k) < there) f(at + (size_t)offset(k) * stride, low * scales.of[k], high * scales.of[k]);
    });
}
