/* A 16-row tile GEMM three ways: packed A fragments straight from memory, a cp.async ring, a bulk-copy ring.
 * y (M, N) f32 = x (M, K) bf16 * w (N, K)^T bf16; M <= 8; w packed [N/16][K/16][lane][8]. One warp a row
 * tile. */
#include "sm90.cuh"

#ifndef SKEW
#define SKEW 0
#endif

constexpr int STAGES = 3;
constexpr int TILE = 512;  // bytes of one packed 16 x 16 tile

/* B fragment of k16 tile `tile`: row-major tokens, so two plain words a lane. */
__device__ __forceinline__ void tokens(const bf16* x, int M, int K, int tile, u32& b0, u32& b1) {
    int token = lane_index() / 4, k = 16 * tile + 2 * (lane_index() % 4);
    b0 = token < M ? *(const u32*)(x + token * K + k) : 0;
    b1 = token < M ? *(const u32*)(x + token * K + k + 8) : 0;
}

__device__ __forceinline__ void store_tile(float* y, const float (&d)[4], int M, int N) {
    int n = 16 * blockIdx.x + lane_index() / 4, m = 2 * (lane_index() % 4);
    for (int i = 0; i < 4; ++i)
        if (m + i % 2 < M) y[(m + i % 2) * N + n + 8 * (i / 2)] = d[i];
}

extern "C" __global__ void __launch_bounds__(32)
    gemm_direct(const bf16* w, const bf16* x, float* y, int M, int N, int K) {
    const char* tile = (const char*)w + (size_t)blockIdx.x * (K / 16) * TILE + 16 * lane_index();
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 0; k < K / 16; ++k) {
        uint4 a = load_stream(tile + k * TILE);
        u32 b0, b1;
        tokens(x, M, K, k, b0, b1);
        mma_bf16(d, a, b0, b1);
    }
    store_tile(y, d, M, N);
}

extern "C" __global__ void __launch_bounds__(32)
    gemm_cp_async(const bf16* w, const bf16* x, float* y, int M, int N, int K) {
    __shared__ __align__(16) char ring[STAGES][TILE];
    const char* tile = (const char*)w + (size_t)blockIdx.x * (K / 16) * TILE + 16 * lane_index();
    int tiles = K / 16;
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < tiles) cp_async_16(ring[s] + 16 * lane_index(), tile + s * TILE);
        cp_async_commit();
    }
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 0; k < tiles; ++k) {
        cp_async_wait<STAGES - 2 + SKEW>();  // SKEW 1 is the planted mistake: one group too few
        __syncwarp();
        uint4 a = *(const uint4*)(ring[k % STAGES] + 16 * lane_index());
        u32 b0, b1;
        tokens(x, M, K, k, b0, b1);
        mma_bf16(d, a, b0, b1);
        int next = k + STAGES - 1;
        cp_async_16_or_zero(ring[next % STAGES] + 16 * lane_index(), tile + min(next, tiles - 1) * TILE,
                            next < tiles);
        cp_async_commit();
    }
    store_tile(y, d, M, N);
}

/* Warp 1 copies, warp 0 computes. */
extern "C" __global__ void __launch_bounds__(64)
    gemm_bulk(const bf16* w, const bf16* x, float* y, int M, int N, int K) {
    extern __shared__ __align__(128) unsigned char ring[];  // STAGES * TILE
    __shared__ u64 full[STAGES], empty[STAGES];
    const char* tile = (const char*)w + (size_t)blockIdx.x * (K / 16) * TILE;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 32);
        mbarrier_fence_init();
    }
    __syncthreads();
    if (warp_index() == 1) {
        if (lane_index() == 0)
            for (int k = 0; k < K / 16; ++k) {
                int s = k % STAGES;
                if (k >= STAGES) mbarrier_wait(&empty[s], (k / STAGES - 1) & 1);
                mbarrier_arrive_expect(&full[s], TILE);
                bulk_load(ring + s * TILE, tile + k * TILE, TILE, &full[s]);
            }
        return;
    }
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 0; k < K / 16; ++k) {
        int s = k % STAGES;
        mbarrier_wait(&full[s], k / STAGES & 1);
        uint4 a = *(const uint4*)(ring + s * TILE + 16 * lane_index());
        mbarrier_arrive(&empty[s]);
        u32 b0, b1;
        tokens(x, M, K, k, b0, b1);
        mma_bf16(d, a, b0, b1);
    }
    store_tile(y, d, M, N);
}

/* out[matrix][lane] for each form of ldmatrix; in is four 8 x 8 matrices, one after the other. */
extern "C" __global__ void matrices(const u16* in, u32* out) {
    __shared__ __align__(16) u16 held[4 * 64];
    for (int i = threadIdx.x; i < 256; i += 32) held[i] = in[i];
    __syncwarp();
    uint4 a = ldmatrix_x4(held + 8 * lane_index()), b = ldmatrix_x4_trans(held + 8 * lane_index());
    uint2 c = ldmatrix_x2(held + 8 * (lane_index() % 16)),
          d = ldmatrix_x2_trans(held + 8 * (lane_index() % 16));
    u32 all[12] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, d.x, d.y};
#pragma unroll
    for (int i = 0; i < 12; ++i) out[32 * i + lane_index()] = all[i];
}
