/* How the warps that multiply an expert's tile hand their sums to the warp that ends it. */
#pragma once
#include "experts_units.cuh"

#ifndef SUM_SETS
#define SUM_SETS 2  // tiles whose sums are in shared memory
#endif

/* A tile's sums of this warp to the finishing warp whose tile it is. */
__device__ __forceinline__ void give_sums(float (&acc)[TOKEN_TILES][4], int ordinal, int count, float2* sums,
                                          Barriers& barriers) {
    const int set = ordinal % SUM_SETS, thread = opaque(threadIdx.x);
    mbarrier_wait(&barriers.empty[set], (ordinal / SUM_SETS & 1) ^ 1);
    float2* to = sums + (set * WARPS + thread / 32) * UNITS * 32 + thread % 32;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        to[64 * n] = make_float2(acc[n][0], acc[n][2]);
        to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    }
    __syncwarp();  // lanes may have parted in the wait
    mbarrier_arrive(&barriers.full[ordinal % FULL_BARRIERS]);
}
