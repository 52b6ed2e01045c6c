/* What a warp takes of a tile of an expert's weights at a time: 32 k of bf16, or 64 k of MXFP4, which becomes
 * bf16 in registers, exactly (mxfp4.cuh). */
#pragma once
#include "mxfp4.cuh"
#include "skinny_finish.cuh"

#ifndef MXFP4
#define MXFP4 0
#endif

constexpr int UNIT_K = MXFP4 ? 64 : 32, UNIT_CHUNKS = UNIT_K / 32;
constexpr int UNIT_SIZE = MXFP4 ? UNIT_BYTES : CHUNK_BYTES;

__device__ __forceinline__ int units_of(int cols) { return (cols + UNIT_K - 1) / UNIT_K; }

/* Units of this warp in a tile, at most CHUNKS: they are dealt out in turn. */
__device__ __forceinline__ int own_units(int cols) {
    return (units_of(cols) - warp_index() + WARPS - 1) / WARPS;
}

/* A warp's part of a tile, in registers. `at` of load: of its first unit, for this lane. */
#if MXFP4
struct Units {
    uint4 words[CHUNKS];
    u32 scales[CHUNKS];

    __device__ __forceinline__ void load(int u, const char* at) {
        const char* unit = at + u * WARPS * UNIT_SIZE;
        const int lane = lane_index();
        words[u] = load_stream(unit);
        scales[u] = load_stream_4(unit + UNIT_SCALES - 16 * lane + lane / 4 * 4);
    }
};

/* A scale of four as a factor of two bf16 that are 2^-126 too small: 2^(s - 1), for s <= 128. */
template <int Which>
__device__ __forceinline__ u32 factor(u32 scales) {
    constexpr u32 BOTH = Which == 0 ? 0x4040u : Which == 1 ? 0x4141u : Which == 2 ? 0x4242u : 0x4343u;
    return permute_bytes(scales, 0, BOTH) * 128 + 0x3f003f00u;  // 0 above the byte
}

template <int Which>
__device__ __forceinline__ uint4 widened(u32 top, u32 bottom, u32 factor_top, u32 factor_bottom) {
    return make_uint4(mul_bf16(e2m1_pair<2 * Which>(top), factor_top),
                      mul_bf16(e2m1_pair<2 * Which>(bottom), factor_bottom),
                      mul_bf16(e2m1_pair<2 * Which + 1>(top), factor_top),
                      mul_bf16(e2m1_pair<2 * Which + 1>(bottom), factor_bottom));
}

/* 2^(s - 127) twice, of byte `which`. */
__device__ __forceinline__ u32 power_pair(u32 scales, int which) {
    const u32 scale = scales >> 8 * which & 0xff;
    return (scale ? scale << 7 : 0x40u) * 0x10001u;
}

__device__ __forceinline__ uint4 times(const uint4& a, u32 top, u32 bottom) {
    return make_uint4(mul_bf16(a.x, top), mul_bf16(a.y, bottom), mul_bf16(a.z, top), mul_bf16(a.w, bottom));
}
#else
struct Units {
    uint4 words[2 * CHUNKS];

    __device__ __forceinline__ void load(int u, const char* at) {
        words[2 * u] = load_stream(at + u * WARPS * UNIT_SIZE);
        words[2 * u + 1] = load_stream(at + u * WARPS * UNIT_SIZE + UNIT_SIZE / 2);
    }
};
#endif

/* 16 rows x 32 k times the tokens of up to `count` rows. */
__device__ __forceinline__ void multiply_chunk(float (&acc)[TOKEN_TILES][4], const uint4& low,
                                               const uint4& high, const unsigned char* tokens, int count) {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        const uint4 b = *(const uint4*)(tokens + 512 * n);
        mma_bf16(acc[n], low, b.x, b.y);
        mma_bf16(acc[n], high, b.z, b.w);
    }
}

/* Unit u times its tokens. */
__device__ __forceinline__ void multiply(float (&acc)[TOKEN_TILES][4], const Units& a, int u,
                                         const unsigned char* tokens, int count) {
#if MXFP4
    const uint4 v = a.words[u];
    const u32 scales = a.scales[u];
    uint4 low, high;
    // One factor cannot be more than 2^127: larger scales take two steps.
    const bool is_large = __any_sync(FULL_WARP, (scales & 0x80808080u) != 0);
    if (!is_large) {
        const u32 top = factor<0>(scales), bottom = factor<1>(scales);
        low = widened<0>(v.x, v.y, top, bottom), high = widened<1>(v.x, v.y, top, bottom);
    } else {
        const u32 top = power_pair(scales, 0), bottom = power_pair(scales, 1);
        low = times(widened<0>(v.x, v.y, 0x7e807e80u, 0x7e807e80u), top, bottom);
        high = times(widened<1>(v.x, v.y, 0x7e807e80u, 0x7e807e80u), top, bottom);
    }
    multiply_chunk(acc, low, high, tokens, count);
    if (!is_large) {
        const u32 top = factor<2>(scales), bottom = factor<3>(scales);
        low = widened<0>(v.z, v.w, top, bottom), high = widened<1>(v.z, v.w, top, bottom);
    } else {
        const u32 top = power_pair(scales, 2), bottom = power_pair(scales, 3);
        low = times(widened<0>(v.z, v.w, 0x7e807e80u, 0x7e807e80u), top, bottom);
        high = times(widened<1>(v.z, v.w, 0x7e807e80u, 0x7e807e80u), top, bottom);
    }
    multiply_chunk(acc, low, high, tokens + TOKEN_CHUNK, count);
#else
    multiply_chunk(acc, a.words[2 * u], a.words[2 * u + 1], tokens, count);
#endif
}
