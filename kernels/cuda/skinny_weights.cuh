/* Weights in a lane's registers, and their products: bf16 as they lie in memory, FP8 widened to bf16, whose
 * sums over 128 k meet their scale in f32 (fp8.cuh). */
#pragma once
#include "skinny_tokens.cuh"

static_assert(CHUNKS % SPAN == 0 && 2 * (CHUNKS / SPAN) <= 32, "a lane for each scale of a step");

/* Of a step. */
struct Fragments {
    uint4 words[LOADS * CHUNKS];
    float scale;  // FP8: lane 2i + h has that of span i, rows 8h..8h+7

    __device__ __forceinline__ void load(int u, const char* at) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            words[LOADS * u + i] = load_stream<LEAVES_FIRST>(at + chunk_at(u) * CHUNK_BYTES + 512 * i);
    }

    /* scales: of the tile. span: the step's first of this warp, of the tile's. count: chunks of the step. */
    __device__ __forceinline__ void load_scales(const char* scales, int span, int count) {
        const int lane = opaque(threadIdx.x) % 32, own = span + lane / 2 * WARPS;
        if (lane / 2 * SPAN < count) scale = __ldg((const float*)scales + own * 2 + lane % 2);
    }
};

/* Chunk u of a step times the tokens: this lane's 16 bytes of 8 rows, 512 bytes further those of the next 8.
 * sums: FP8, of the chunk's span. */
__device__ __forceinline__ void multiply(float (&sums)[TOKEN_TILES][4], const Fragments& a, int u,
                                         const unsigned char* tokens) {
    uint4 wide[2];
    if constexpr (FP8)
        widen_chunk(wide, a.words[u]);
    else
        wide[0] = a.words[2 * u], wide[1] = a.words[2 * u + 1];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        const uint4 b = *(const uint4*)(tokens + 512 * n);
        mma_bf16(sums[n], wide[0], b.x, b.y);
        mma_bf16(sums[n], wide[1], b.z, b.w);
    }
}

/* FP8: a span's sums meet the scales of its rows, and are zero again. */
__device__ __forceinline__ void meet_scales(float (&acc)[TOKEN_TILES][4], float (&sums)[TOKEN_TILES][4],
                                            float scale, int span) {
    const float low = __shfl_sync(FULL_WARP, scale, 2 * span),
                high = __shfl_sync(FULL_WARP, scale, 2 * span + 1);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            acc[n][i] = fmaf(i < 2 ? low : high, sums[n][i], acc[n][i]), sums[n][i] = 0.f;
}
