/* FP8: e4m3 codes (sign, four bits of exponent, three of mantissa; no infinities) and an f32 scale for 8 rows
 * x 128 k. As packed: by tiles of 16 rows (pack.cu says which), chunks of 32 k, 512 bytes each: lane l = 4g +
 * t has 16 of them, words (row g, k 8t..8t+3), (row g + 8, the same k), (row g, k 8t+4..8t+7), (row g + 8,
 * those). In a word k 0 and 2 are in the lower half, 1 and 3 in the upper one. 0 and 1 lie as bf16 times
 * 2^-120 have them: a mask makes the pair. 2 and 3 lie around them, so that two shifts and two masks do.
 * Behind a tile's chunks lie its scales, [K/128][2]: rows 0..7, rows 8..15.
 * A product multiplies the f32 sum of the 128 k of a scale by it, experts' products that of 32 k: codes are
 * bf16, their products with a scale are not. Source: models.md 11. */
#pragma once
#include "sm90.cuh"

#ifndef FP8
#define FP8 0  // 1: weights are e4m3 codes and scales, 0: bf16 as pack.cu lays them
#endif

constexpr bool LEAVES_FIRST = !FP8;  // weights, from L2: FP8 is no faster by it (bench/NOTES.md)
constexpr int SCALE_K = 128, FP8_CHUNK = 512;
constexpr int SPAN = FP8 ? SCALE_K / 32 : 1;  // chunks side by side that are one warp's: those of a scale
constexpr int CHUNK_BYTES = FP8 ? FP8_CHUNK : 1024;  // of packed weights: 16 rows x 32 k

/* Codes alone, of an even number of chunks, and all bytes of a tile: lines are whole. */
__device__ __forceinline__ size_t fp8_codes(int cols) { return (size_t)(cols + 63) / 64 * 2 * FP8_CHUNK; }
__device__ __forceinline__ size_t fp8_tile(int cols) {
    return fp8_codes(cols) + (size_t)((cols + SCALE_K - 1) / SCALE_K * 8 + 127) / 128 * 128;
}

/* Bytes of a packed row tile. */
__device__ __forceinline__ size_t tile_bytes(int cols) {
    return FP8 ? fp8_tile(cols) : (size_t)((cols + 31) / 32) * CHUNK_BYTES;
}

constexpr u32 IN_PLACE = 0x87f087f0u;  // sign, exponent and mantissa of two numbers as bf16 times 2^-120

/* Number i of a word at its place. */
__device__ __forceinline__ u32 place_e4m3(u32 code, int i) {
    const u32 sign = code >> 7, rest = code & 0x7f;
    return (i < 2 ? sign << 15 | rest << 4 : sign << 11 | rest >> 4 << 12 | (rest & 0xf)) << 16 * (i % 2);
}

/* Its code. */
__device__ __forceinline__ u32 code_of_e4m3(u32 word, int i) {
    const u32 half = word >> 16 * (i % 2);
    return i < 2 ? (half >> 8 & 0x80) | (half >> 4 & 0x7f)
                 : (half >> 4 & 0x80) | (half >> 8 & 0x70) | (half & 0xf);
}

/* Numbers 0 and 1 of a word, and 2 and 3, as two bf16 times 2^-120. */
__device__ __forceinline__ u32 e4m3_first(u32 word) { return word & IN_PLACE; }
__device__ __forceinline__ u32 e4m3_second(u32 word) {
    return (word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u);
}

/* A code as f32; exact. */
__device__ __forceinline__ float e4m3_value(u32 code) {
    return __uint_as_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 1.329227995784916e36f;  // 2^120
}

/* 16 rows x 16 k of two words, as mma's A operand. */
__device__ __forceinline__ uint4 widened(u32 top, u32 bottom) {
    constexpr u32 RAISED = 0x7b807b80u;  // 2^120
    return make_uint4(mul_bf16_by<0>(e4m3_first(top), RAISED), mul_bf16_by<0>(e4m3_first(bottom), RAISED),
                      mul_bf16_by<0>(e4m3_second(top), RAISED), mul_bf16_by<0>(e4m3_second(bottom), RAISED));
}

/* The same of a chunk's 16 bytes of a lane: k 0..15 and 16..31 as packed weights have them. */
__device__ __forceinline__ void widen_chunk(uint4* a, const uint4& words) {
    a[0] = widened(words.x, words.y), a[1] = widened(words.z, words.w);
}
