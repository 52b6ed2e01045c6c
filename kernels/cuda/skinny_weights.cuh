/* Weights in a lane's registers, and their products: bf16 as they lie in memory, FP8 widened to bf16, whose
 * sums over 32 k meet their scale in f32 (fp8.cuh). */
#pragma once
#include "skinny_tokens.cuh"

static_assert(!FP8 || 2 * CHUNKS <= 32, "a lane for each scale of a step");

/* Of a step. */
struct Fragments {
    uint4 words[LOADS * CHUNKS];
    float scale;  // FP8: lane 2u + h has that of chunk u, rows 8h..8h+7

    __device__ __forceinline__ void load(int u, const char* at) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            words[LOADS * u + i] = load_stream<LEAVES_FIRST>(at + u * WARPS * CHUNK_BYTES + 512 * i);
    }

    /* scales: of the tile. chunk: the step's first of this warp, of the tile's. count: of the step. */
    __device__ __forceinline__ void load_scales(const char* scales, int chunk, int count) {
        const int lane = opaque(threadIdx.x) % 32, own = chunk + lane / 2 * WARPS;
        if (lane / 2 < count) scale = __ldg((const float*)scales + own / (SCALE_K / 32) * 2 + lane % 2);
    }
};

/* Chunk u of a step times the tokens: this lane's 16 bytes of 8 rows, 512 bytes further those of the next 8.
 */
__device__ __forceinline__ void multiply(float (&acc)[TOKEN_TILES][4], const Fragments& a, float scale, int u,
                                         const unsigned char* tokens) {
    if constexpr (!FP8) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            uint4 b = *(const uint4*)(tokens + 512 * n);
            mma_bf16(acc[n], a.words[2 * u], b.x, b.y);
            mma_bf16(acc[n], a.words[2 * u + 1], b.z, b.w);
        }
    } else {
        const float low = __shfl_sync(FULL_WARP, scale, 2 * u),
                    high = __shfl_sync(FULL_WARP, scale, 2 * u + 1);
        uint4 wide[2];
        widen_chunk(wide, a.words[u]);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 b = *(const uint4*)(tokens + 512 * n);
            float part[4] = {};
            mma_bf16(part, wide[0], b.x, b.y);
            mma_bf16(part, wide[1], b.z, b.w);
            acc[n][0] = fmaf(low, part[0], acc[n][0]), acc[n][1] = fmaf(low, part[1], acc[n][1]);
            acc[n][2] = fmaf(high, part[2], acc[n][2]), acc[n][3] = fmaf(high, part[3], acc[n][3]);
        }
    }
}
