/* How the warps that multiply an expert's tile hand their sums to the warp that ends it. */
#pragma once
#include "experts_units.cuh"

/* This lane's place in a set: made where it is used, not kept through a stream. */
__device__ __forceinline__ float2* own_sums(float2* sums, int set) {
    const int thread = opaque(threadIdx.x);
    return sums + (set * WARPS + thread / 32) * UNITS * 32 + thread % 32;
}

/* A tile's sums of this warp to the finishing warp whose tile it is. place(set): this lane's in a set.
 * HAS_ODD: there are rows 1, 3, ... of the tokens. IS_FREE: the set is known to be read. */
template <bool HAS_ODD = true, bool IS_FREE = false, class Place>
__device__ __forceinline__ void give_sums(float (&acc)[TOKEN_TILES][4], int ordinal, int count,
                                          const Place& place, Barriers& barriers) {
    const int set = ordinal % SUM_SETS;
    if (!IS_FREE) mbarrier_wait(&barriers.empty[set], (ordinal / SUM_SETS & 1) ^ 1);
    float2* const to = place(set);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        to[64 * n] = make_float2(acc[n][0], acc[n][2]);
        if (HAS_ODD) to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    }
    __syncwarp();  // lanes may have parted in the wait
    mbarrier_arrive(&barriers.full[ordinal % FULL_BARRIERS]);
}
