/* product: y (64, COLUMNS) f32 = w (64, K) bf16 * x (COLUMNS, K)^T bf16 by one warpgroup; w packed
 * [N/16][K/16][lane][8], K a multiple of 64. MISTAKE: what a test plants. */
#include "wgmma.cuh"

#ifndef COLUMNS
#define COLUMNS 64
#endif
#ifndef MISTAKE
#define MISTAKE 0
#endif

constexpr bool READS_EARLY = MISTAKE == 1, REFILLS_EARLY = MISTAKE == 2, HAS_NO_SWIZZLE = MISTAKE == 3;
constexpr bool HAS_NO_FENCE = MISTAKE == 4, LEAVES_A_WARP_OUT = MISTAKE == 5, IS_MISALIGNED = MISTAKE == 6;
constexpr bool WARPS_DIFFER = MISTAKE == 7, ENDS_EARLY = MISTAKE == 8;

extern "C" __global__ void __launch_bounds__(128) product(const uint4* w, const bf16* x, float* y, int K) {
    extern __shared__ __align__(1024) char columns[];  // COLUMNS of 64 k
    const int lane = lane_index(), warp = warp_index();
    float d[COLUMNS / 2] = {};
    for (int k = 0; k < K; k += 64) {
        for (int i = threadIdx.x; i < COLUMNS * 8; i += 128) {
            int column = i / 8, unit = i % 8, place = HAS_NO_SWIZZLE ? unit : unit ^ column % 8;
            *(uint4*)(columns + 128 * column + 16 * place) = *(const uint4*)(x + column * K + k + 8 * unit);
        }
        fence_async_shared();
        __syncthreads();
        if (LEAVES_A_WARP_OUT && warp == 3) continue;
        uint4 a[4];
        for (int i = 0; i < 4; ++i) a[i] = w[(warp * (K / 16) + k / 16 + i) * 32 + lane];
        if (!HAS_NO_FENCE) wgmma_fence();
        for (int i = 0; i < 4; ++i)
            wgmma(d, a[i],
                  wgmma_columns(columns + 32 * (WARPS_DIFFER ? (i + warp) % 4 : i) + 16 * IS_MISALIGNED * i));
        wgmma_commit();
        if (REFILLS_EARLY && warp == 0) *(uint4*)(columns + 16 * lane) = make_uint4(0, 0, 0, 0);
        if (READS_EARLY) y[threadIdx.x] = d[0];
        if (ENDS_EARLY) return;
        wgmma_wait<0>();
        __syncthreads();
    }
    if (READS_EARLY) return;
    for (int i = 0; i < COLUMNS / 2; ++i)
        y[(16 * warp + lane / 4 + i % 4 / 2 * 8) * COLUMNS + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
}
