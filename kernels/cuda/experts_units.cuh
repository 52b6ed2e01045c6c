/* What a warp takes of a tile of an expert's weights at a time: 32 k of bf16, or 64 k of MXFP4, which becomes
 * bf16 in registers, exactly (mxfp4.cuh). */
#pragma once
#include "mxfp4.cuh"
#include "skinny_finish.cuh"

#ifndef MXFP4
#define MXFP4 0
#endif
#ifndef LARGE_SCALES
#define LARGE_SCALES 0  // 1: MXFP4 whose scales may be 4 or more
#endif

constexpr int UNIT_K = MXFP4 ? 64 : 32, UNIT_CHUNKS = UNIT_K / 32;
constexpr int UNIT_SIZE = MXFP4 ? UNIT_BYTES : CHUNK_BYTES;

__device__ __forceinline__ int units_of(int cols) { return (cols + UNIT_K - 1) / UNIT_K; }

/* Units of this warp in a tile, at most CHUNKS: they are dealt out in turn. */
__device__ __forceinline__ int own_units(int cols) {
    return (units_of(cols) - warp_index() + WARPS - 1) / WARPS;
}

/* A lane's part of a unit. `from` is where its first 16 bytes are: in memory, or in the copy of the unit. */
struct Unit {
#if MXFP4
    uint4 words[1];
    u32 scales;
#else
    uint4 words[2];
#endif

    __device__ __forceinline__ void load(const char* from) {
        words[0] = load_stream(from);
#if MXFP4
        scales = load_stream_4(from + scales_at());
#else
        words[1] = load_stream(from + UNIT_SIZE / 2);
#endif
    }

    __device__ __forceinline__ void read(const unsigned char* from) {
        words[0] = *(const uint4*)from;
#if MXFP4
        scales = *(const u32*)(from + scales_at());
#else
        words[1] = *(const uint4*)(from + UNIT_SIZE / 2);
#endif
    }

    static __device__ __forceinline__ int scales_at() {
        const int lane = lane_index();
        return UNIT_SCALES - 16 * lane + lane / 4 * 4;
    }
};

#if MXFP4
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

/* A unit times its tokens. */
__device__ __forceinline__ void multiply(float (&acc)[TOKEN_TILES][4], const Unit& a,
                                         const unsigned char* tokens, int count) {
#if MXFP4
    const uint4 v = a.words[0];
#if LARGE_SCALES
    // One factor cannot be more than 2^127: larger scales take two steps.
    const u32 first[] = {power_pair(a.scales, 0), power_pair(a.scales, 1)},
              second[] = {power_pair(a.scales, 2), power_pair(a.scales, 3)};
    constexpr u32 UP = 0x7e807e80u;  // 2^126 twice
    multiply_chunk(acc, times(widened<0>(v.x, v.y, UP, UP), first[0], first[1]),
                   times(widened<1>(v.x, v.y, UP, UP), first[0], first[1]), tokens, count);
    multiply_chunk(acc, times(widened<0>(v.z, v.w, UP, UP), second[0], second[1]),
                   times(widened<1>(v.z, v.w, UP, UP), second[0], second[1]), tokens + TOKEN_CHUNK, count);
#else
    const u32 first[] = {factor<0>(a.scales), factor<1>(a.scales)},
              second[] = {factor<2>(a.scales), factor<3>(a.scales)};
    multiply_chunk(acc, widened<0>(v.x, v.y, first[0], first[1]), widened<1>(v.x, v.y, first[0], first[1]),
                   tokens, count);
    multiply_chunk(acc, widened<0>(v.z, v.w, second[0], second[1]),
                   widened<1>(v.z, v.w, second[0], second[1]), tokens + TOKEN_CHUNK, count);
#endif
#else
    multiply_chunk(acc, a.words[0], a.words[1], tokens, count);
#endif
}
