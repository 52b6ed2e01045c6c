/* MXFP4: 32 neighbours of a row, a block, share a scale 2^(s - 127); a number of e2m1 is sign, two bits of
 * exponent, one of mantissa. As in a checkpoint: 16 bytes a block, k 2b in the low half of byte b. As packed:
 * by tiles of 16 rows and units of 64 k. Of a matrix first come all units' words, 512 bytes each: lane l = 4g
 * + t has 16 of them, (chunk 0 row g), (chunk 0 row g + 8), (chunk 1 row g), (chunk 1 row g + 8) of k
 * 8t..8t+7. Then come all units' scales, 32 bytes each: four a g, in the order of the words. So words begin
 * at whole lines: copies of them that do not take 6 to 15 % longer. In a word the even k of a pair are in the
 * lower half, the odd ones in the upper one, and bits lie so that a shift and a mask make pairs 0 to 2 two
 * bf16 (times 2^-126); of pair 3 the mantissa is elsewhere. Source: OCP Microscaling Formats 1.0;
 * models.md 4. */
#pragma once
#include "common.cuh"

constexpr int MXFP4_WORDS = 512, MXFP4_SCALES = 32;  // bytes of a unit
constexpr u32 PAIR = 0x81c081c0u;                    // sign, exponent and mantissa of two bf16

/* Where the words and the scales of tile `tile` lie, of matrices of `tiles` tiles of `units` units each. */
struct Mxfp4Tile {
    size_t words, scales;

    __device__ __forceinline__ Mxfp4Tile(int matrix, int tile, int tiles, int units) {
        const size_t all = (size_t)tiles * units, first = matrix * all * (MXFP4_WORDS + MXFP4_SCALES);
        words = first + (size_t)tile * units * MXFP4_WORDS;
        scales = first + all * MXFP4_WORDS + (size_t)tile * units * MXFP4_SCALES;
    }
};

/* Number i of a word at its place. Of pair 2 the signs are in the other number's half. */
__device__ __forceinline__ u32 place_e2m1(u32 nibble, int i) {
    const u32 sign = nibble >> 3 & 1, rest = nibble & 7;
    const int pair = i / 2, half = 16 * (i % 2);
    if (pair < 2) return (sign << (9 + 4 * pair) | rest << 4 * pair) << half;
    if (pair == 2) return sign << 3 << (16 - half) | rest << 10 << half;
    return (sign << 15 | rest >> 1 << 7 | (rest & 1) << 14) << half;
}

/* Pair j of a packed word as two bf16, times 2^-126. */
template <int J>
__device__ __forceinline__ u32 e2m1_pair(u32 word) {
    if (J < 2) return word << (6 - 4 * J) & PAIR;
    if (J == 2) return (word >> 4 | word << 28) & PAIR;
    return (word & 0x81808180u) | (word >> 8 & 0x00400040u);
}

/* 2^(scale - 127); of scale 0 a subnormal. */
__device__ __forceinline__ float power_of(u32 scale) {
    return __uint_as_float(scale ? scale << 23 : 0x00400000u);
}

/* A number times its scale, as f32: both steps are exact, or infinite where f32 ends. */
__device__ __forceinline__ float e2m1_value(u32 nibble, u32 scale) {
    float times = __uint_as_float((nibble & 7) << 22 | (nibble & 8) << 28);
    return times * 8.50705917e37f * power_of(scale);  // 2^126
}
