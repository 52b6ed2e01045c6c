/* FP8: e4m3 codes (sign, four bits of exponent, three of mantissa; no infinities) and an f32 scale for 8 rows
 * x 128 k. As packed: by tiles of 16 rows (pack.cu says which), chunks of 32 k, 512 bytes each: lane l = 4g +
 * t has 16 of them, words (row g, k 8t..8t+3), (row g + 8, the same k), (row g, k 8t+4..8t+7), (row g + 8,
 * those). In a word k 0 and 1 are in bytes 0 and 2, k 2 and 3 in bytes 1 and 3, so that shifts and masks make
 * pairs of bf16, times 2^-120. Behind a tile's chunks lie its scales, [K/128][2]: rows 0..7, rows 8..15.
 * A product multiplies the f32 sum of 32 k by their scale: codes are bf16, their products with a scale are
 * not. Source: models.md 11. */
#pragma once
#include "sm90.cuh"

#ifndef FP8
#define FP8 0  // 1: weights are e4m3 codes and scales, 0: bf16 as pack.cu lays them
#endif

constexpr int SCALE_K = 128, FP8_CHUNK = 512;
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

/* Bytes 0 and 2 of a word, and bytes 1 and 3, as two bf16 times 2^-120. */
__device__ __forceinline__ u32 e4m3_evens(u32 word) {
    return (word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u);
}
__device__ __forceinline__ u32 e4m3_odds(u32 word) {
    return (word >> 4 & 0x07f007f0u) | (word & 0x80008000u);
}

/* A code as f32; exact. */
__device__ __forceinline__ float e4m3_value(u32 code) {
    return __uint_as_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 1.329227995784916e36f;  // 2^120
}

/* 16 rows x 16 k of two words, as mma's A operand. */
__device__ __forceinline__ uint4 widened(u32 top, u32 bottom) {
    constexpr u32 RAISED = 0x7b807b80u;  // 2^120
    return make_uint4(mul_bf16_by<0>(e4m3_evens(top), RAISED), mul_bf16_by<0>(e4m3_evens(bottom), RAISED),
                      mul_bf16_by<0>(e4m3_odds(top), RAISED), mul_bf16_by<0>(e4m3_odds(bottom), RAISED));
}

/* The same of a chunk's 16 bytes of a lane: k 0..15 and 16..31 as packed weights have them. */
__device__ __forceinline__ void widen_chunk(uint4* a, const uint4& words) {
    a[0] = widened(words.x, words.y), a[1] = widened(words.z, words.w);
}
