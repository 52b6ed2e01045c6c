/* Rows of an expert's weight in the plain kernels: as plain.cuh's, or MXFP4. */
#pragma once
#include "mxfp4.cuh"
#include "plain.cuh"

#ifndef MXFP4
#define MXFP4 0  // 1: WEIGHT is u8, blocks and their scales, or packed ones
#endif

/* Row n of expert e, `rows` rows each. */
#if MXFP4
struct ExpertRow {
    const u8 *blocks, *scales;
    bool is_bottom;

    __device__ __forceinline__ ExpertRow(const u8* w, const u8* scales_, int e, int n, int rows, int cols) {
        if (PACKED == 0) {
            size_t row = ((size_t)e * rows + n) * (cols / 32);
            blocks = w + 16 * row, scales = scales_ + row;
            return;
        }
        bool is_up = PACKED == 2 && n >= rows / 2;
        int row = is_up ? n - rows / 2 : n, height = PACKED == 2 ? 8 : 16, units = (cols + 63) / 64;
        int tiles = ((PACKED == 2 ? rows / 2 : rows) + height - 1) / height;
        is_bottom = PACKED == 2 ? is_up : row % 16 >= 8;
        const Mxfp4Tile place(e, row / height, tiles, units);
        blocks = w + place.words + row % 8 * 64, scales = w + place.scales + row % 8 * 4;
    }

    __device__ __forceinline__ float operator[](int k) const {
        if (PACKED == 0) return e2m1_value(blocks[k / 2] >> k % 2 * 4 & 15, scales[k / 32]);
        int unit = k / 64, which = k % 64 / 32 * 2 + is_bottom, pair = k % 8 / 2;
        u32 word = *(const u32*)(blocks + unit * MXFP4_WORDS + k % 32 / 8 * 16 + 4 * which);
        u32 two = pair == 0   ? e2m1_pair<0>(word)
                  : pair == 1 ? e2m1_pair<1>(word)
                  : pair == 2 ? e2m1_pair<2>(word)
                              : e2m1_pair<3>(word);
        float times = k % 2 ? high_f32(two) : low_f32(two);
        return times * 8.50705917e37f * power_of(scales[unit * MXFP4_SCALES + which]);
    }
};
#else
struct ExpertRow : WeightRow {
    __device__ __forceinline__ ExpertRow(const WEIGHT* w, const u8*, int e, int n, int rows, int cols)
        : WeightRow(w + e * size(rows, cols), n, rows, cols) {}
};
#endif
