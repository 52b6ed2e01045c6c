/* What a warp takes of a tile of an expert's weights at a time: 32 k of bf16, or 64 k of MXFP4 or FP8, which
 * become bf16 in registers, exactly (mxfp4.cuh, fp8.cuh). */
#pragma once
#include "mxfp4.cuh"
#include "skinny_finish.cuh"

#ifndef MXFP4
#define MXFP4 0
#endif
#ifndef LARGE_SCALES
#define LARGE_SCALES 0  // 1: MXFP4 whose scales may be 4 or more
#endif
#ifndef EVEN_UNITS
#define EVEN_UNITS 0  // 1: every warp has CHUNKS
#endif

constexpr int UNIT_K = MXFP4 || FP8 ? 64 : 32, UNIT_CHUNKS = UNIT_K / 32;
constexpr int UNIT_SIZE = MXFP4 ? MXFP4_WORDS : UNIT_CHUNKS * CHUNK_BYTES;  // bytes, without scales
constexpr int UNIT_SCALES = MXFP4 ? MXFP4_SCALES : 0;                       // that come with it

__device__ __forceinline__ int units_of(int cols) { return (cols + UNIT_K - 1) / UNIT_K; }

/* From a row tile to the next, without scales that lie elsewhere. */
__device__ __forceinline__ size_t unit_tile(int cols) {
    return FP8 ? fp8_tile(cols) : (size_t)units_of(cols) * UNIT_SIZE;
}

/* A row tile of an expert's weights: its first byte, and its scales, if it has some. */
struct TileOf {
    const char *at, *scales;

    __device__ __forceinline__ TileOf(const u8* w, int expert, int tile, int tiles, int cols) {
#if MXFP4
        const Mxfp4Tile place(expert, tile, tiles, units_of(cols));
        at = (const char*)w + place.words, scales = (const char*)w + place.scales;
#else
        at = (const char*)w + ((size_t)expert * tiles + tile) * unit_tile(cols);
        scales = FP8 ? at + fp8_codes(cols) : nullptr;
#endif
    }
};

/* Whether a warp has unit u of its CHUNKS at most, which are dealt out in turn. */
__device__ __forceinline__ bool has_unit(int u, int cols) {
    return EVEN_UNITS || u * WARPS + warp_index() < units_of(cols);
}

/* How many it has. */
__device__ __forceinline__ int own_units(int cols) {
    return (units_of(cols) - warp_index() + WARPS - 1) / WARPS;
}

/* A lane's part of a unit. `from` is where its first 16 bytes are: in memory, or in the copy of the unit;
 * from_scales, of MXFP4, where its unit's scales are. */
struct Unit {
#if MXFP4
    uint4 words[1];
    u32 scales;
#else
    uint4 words[2];
#endif
#if FP8
    float2 scale;  // of rows 0..7, of rows 8..15

    /* scales: of the tile. unit: of its units. */
    __device__ __forceinline__ void load_scale(const char* scales, int unit) {
        scale = __ldg((const float2*)scales + unit / (SCALE_K / UNIT_K));
    }
#endif

    __device__ __forceinline__ void load(const char* from, const char* from_scales) {
        words[0] = load_stream<LEAVES_FIRST>(from);
#if MXFP4
        scales = load_stream_4(from_scales + lane_index() / 4 * 4);
#else
        words[1] = load_stream<LEAVES_FIRST>(from + UNIT_SIZE / 2);
#endif
    }

    __device__ __forceinline__ void read(const unsigned char* from, const unsigned char* from_scales) {
        words[0] = *(const uint4*)from;
#if MXFP4
        scales = *(const u32*)(from_scales + lane_index() / 4 * 4);
#else
        words[1] = *(const uint4*)(from + UNIT_SIZE / 2);
#endif
    }
};

#if MXFP4
/* The scales of a chunk as factors of bf16 that are 2^-126 too small, of rows g below and g + 8 above:
 * 2^(s - 1), for s <= 128. */
template <int Chunk>
__device__ __forceinline__ u32 factors(u32 scales) {
    return permute_bytes(scales, 0, Chunk ? 0x4342 : 0x4140) * 128 + 0x3f003f00u;  // 0 above a byte
}

/* The same as 2^(s - 127), for all s. */
__device__ __forceinline__ u32 powers(u32 scales, int chunk) {
    const u32 top = scales >> 16 * chunk & 0xff, bottom = scales >> 16 * chunk >> 8 & 0xff;
    return (top ? top << 7 : 0x40u) | (bottom ? bottom << 7 : 0x40u) << 16;
}

template <int Which>
__device__ __forceinline__ uint4 widened(u32 top, u32 bottom, u32 factors) {
    return make_uint4(mul_bf16_by<0>(e2m1_pair<2 * Which>(top), factors),
                      mul_bf16_by<1>(e2m1_pair<2 * Which>(bottom), factors),
                      mul_bf16_by<0>(e2m1_pair<2 * Which + 1>(top), factors),
                      mul_bf16_by<1>(e2m1_pair<2 * Which + 1>(bottom), factors));
}

/* A chunk of a unit. Of large scales one factor would be more than 2^127: they take two steps. */
template <int Chunk, int Which>
__device__ __forceinline__ uint4 numbers(const uint4& words, u32 scales) {
    const u32 top = Chunk ? words.z : words.x, bottom = Chunk ? words.w : words.y;
#if LARGE_SCALES
    const uint4 up = widened<Which>(top, bottom, 0x7e807e80u);  // 2^126
    const u32 by = powers(scales, Chunk);
    return make_uint4(mul_bf16_by<0>(up.x, by), mul_bf16_by<1>(up.y, by), mul_bf16_by<0>(up.z, by),
                      mul_bf16_by<1>(up.w, by));
#else
    return widened<Which>(top, bottom, factors<Chunk>(scales));
#endif
}
#endif

/* 16 rows x 32 k times the tokens of up to `count` rows; tokens(n) is this lane's part of the n-th 8 of them.
 */
template <class Tokens>
__device__ __forceinline__ void multiply_chunk(float (&acc)[TOKEN_TILES][4], const uint4& low,
                                               const uint4& high, int count, const Tokens& tokens) {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        const uint4 b = tokens(n);
        mma_bf16(acc[n], low, b.x, b.y);
        mma_bf16(acc[n], high, b.z, b.w);
    }
}

/* A unit times its tokens: tokens(chunk, n). */
template <class Tokens>
__device__ __forceinline__ void multiply(float (&acc)[TOKEN_TILES][4], const Unit& a, int count,
                                         const Tokens& tokens) {
#if MXFP4
    const uint4& v = a.words[0];
    multiply_chunk(acc, numbers<0, 0>(v, a.scales), numbers<0, 1>(v, a.scales), count,
                   [&](int n) { return tokens(0, n); });
    multiply_chunk(acc, numbers<1, 0>(v, a.scales), numbers<1, 1>(v, a.scales), count,
                   [&](int n) { return tokens(1, n); });
#elif FP8
    uint4 wide[4];
    widen_chunk(wide, a.words[0]), widen_chunk(wide + 2, a.words[1]);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        float part[4] = {};
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            const uint4 b = tokens(chunk, n);
            mma_bf16(part, wide[2 * chunk], b.x, b.y);
            mma_bf16(part, wide[2 * chunk + 1], b.z, b.w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = fmaf(e < 2 ? a.scale.x : a.scale.y, part[e], acc[n][e]);
    }
#else
    multiply_chunk(acc, a.words[0], a.words[1], count, [&](int n) { return tokens(0, n); });
#endif
}
