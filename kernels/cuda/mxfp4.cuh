/* MXFP4: 32 neighbours of a row, a block, share a scale 2^(s - 127); a number of e2m1 is sign, two bits of
 * exponent, one of mantissa. As in a checkpoint: 16 bytes a block, k 2b in the low half of byte b. As packed:
 * by tiles of 16 rows and units of 64 k, 544 bytes each: lane l = 4g + t has 16 of them, words (chunk 0 row
 * g), (chunk 0 row g + 8), (chunk 1 row g), (chunk 1 row g + 8) of k 8t..8t+7, then come four scales a g, in
 * the order of the words. In a word the even k of a pair are in the lower half, the odd ones in the upper
 * one, and pairs 0 to 2 lie so that a shift by 3j and a mask make them two bf16 (times 2^-126); pair 3 has
 * the bits that are left. Source: OCP Microscaling Formats 1.0; models.md 4. */
#pragma once
#include "common.cuh"

constexpr int UNIT_BYTES = 544, UNIT_SCALES = 512;
constexpr u32 PAIR = 0x81c081c0u;  // sign, exponent and mantissa of two bf16

/* A number at its place in half a word, as number j of that half. */
__device__ __forceinline__ u32 place_e2m1(u32 nibble, int j) {
    u32 sign = nibble >> 3 & 1, rest = nibble & 7;
    if (j < 3) return sign << (15 - 3 * j) | rest << (6 - 3 * j);
    return sign << 10 | rest >> 1 << 13 | (rest & 1) << 11;
}

/* Pair j of a packed word as two bf16, times 2^-126. */
template <int J>
__device__ __forceinline__ u32 e2m1_pair(u32 word) {
    if (J < 3) return word << (3 * J) & PAIR;
    return (word << 5 & 0x80008000u) | (word >> 6 & 0x01800180u) | (word >> 5 & 0x00400040u);
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
