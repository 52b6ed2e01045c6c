/* What the plain kernels share: types by macro, one warp a weight row, tokens in groups of 8.
 * ACTIVATION, WEIGHT: float or bf16; of FP8, which is always packed (fp8.cuh), u8. Every kernel here takes
 * any shape and is the reading copy of a fast one.
 */
#pragma once
#include "fp8.cuh"

#ifndef ACTIVATION
#define ACTIVATION bf16
#endif
#ifndef WEIGHT
#define WEIGHT bf16
#endif

constexpr int GROUP = 8;  // tokens that one read of a weight row serves
constexpr int WARPS = 4;  // of a block

/* Row n of a weight with `rows` rows. PACKED as a Weight's layout: 0 plain, 1 fragment order (pack.cu), 2
 * fragment order with 8 gate rows and the 8 up rows that go with them in a tile. */
#ifndef PACKED
#define PACKED 0
#endif

#if FP8
struct WeightRow {
    const u8* first;      // of the row's lanes
    const float* scales;  // every other one

    __device__ __forceinline__ static size_t size(int rows, int cols) {
        return (size_t)((PACKED == 2 ? rows / 2 + 7 : rows + 15) / (PACKED == 2 ? 8 : 16)) * fp8_tile(cols);
    }

    __device__ __forceinline__ WeightRow(const u8* w, int n, int rows, int cols) {
        bool is_up = PACKED == 2 && n >= rows / 2;
        int row = is_up ? n - rows / 2 : n, tile = row / (PACKED == 2 ? 8 : 16);
        bool is_bottom = PACKED == 2 ? is_up : row % 16 >= 8;
        const u8* record = w + tile * fp8_tile(cols);
        first = record + row % 8 * 64 + 4 * is_bottom;
        scales = (const float*)(record + fp8_codes(cols)) + is_bottom;
    }

    __device__ __forceinline__ float operator[](int k) const {
        const u8* word = first + k / 32 * FP8_CHUNK + k % 32 / 8 * 16 + k % 8 / 4 * 8;
        const u32 code = code_of_e4m3(*(const u32*)word, k % 4);
        return e4m3_value(code) * scales[k / SCALE_K * 2];
    }
};
#else
struct WeightRow {
    const WEIGHT* first;

    /* Elements of a whole weight. */
    __device__ __forceinline__ static size_t size(int rows, int cols) {
        if (PACKED == 0) return (size_t)rows * cols;
        return (size_t)((PACKED == 2 ? rows / 2 + 7 : rows + 15) / (PACKED == 2 ? 8 : 16)) *
               ((cols + 31) / 32) * 512;
    }

    __device__ __forceinline__ WeightRow(const WEIGHT* w, int n, int rows, int cols) {
        if (PACKED == 0) {
            first = w + (size_t)n * cols;
            return;
        }
        bool is_up = PACKED == 2 && n >= rows / 2;
        int row = is_up ? n - rows / 2 : n, tile = row / (PACKED == 2 ? 8 : 16), chunks = (cols + 31) / 32;
        bool is_bottom = PACKED == 2 ? is_up : row % 16 >= 8;
        first = w + (size_t)tile * chunks * 512 + row % 8 * 32 + 2 * is_bottom;
    }

    __device__ __forceinline__ float operator[](int k) const {
        if (PACKED == 0) return to_f32(first[k]);
        return to_f32(first[k / 32 * 512 + k % 8 / 4 * 256 + k % 32 / 8 * 8 + k % 4 / 2 * 4 + k % 2]);
    }
};
#endif

/* Lane i < count gets w . tokens(i), for up to GROUP tokens of `cols` elements; the other lanes get 0.
 * Lane l sums k = l, l + 32, ..., then the 32 sums meet in lane order: the same bits whatever `count` is.
 * tokens: function of i -> where the token lies. */
template <class Row, class Tokens>
__device__ __forceinline__ float dot_each(Row w, const Tokens& tokens, int cols, int count) {
    __shared__ float part[WARPS][GROUP][33];
    decltype(tokens(0)) token[GROUP];
    float sum[GROUP] = {};
#pragma unroll
    for (int i = 0; i < GROUP; ++i) token[i] = i < count ? tokens(i) : nullptr;
    for (int k = lane_index(); k < cols; k += 32) {
        float weight = w[k];
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            if (i < count) sum[i] = fmaf(weight, to_f32(token[i][k]), sum[i]);
    }
    float (&mine)[GROUP][33] = part[warp_index()];
    __syncwarp();  // the last group's sums have been read
#pragma unroll
    for (int i = 0; i < GROUP; ++i) mine[i][lane_index()] = sum[i];
    __syncwarp();
    float total = 0.f;
    if (lane_index() < count)
        for (int l = 0; l < 32; ++l) total += mine[lane_index()][l];
    return total;
}

/* The same for tokens that lie one behind the other. */
template <class X>
__device__ __forceinline__ float dot_group(WeightRow w, const X* tokens, int cols, int count) {
    return dot_each(w, [=](int i) { return tokens + (size_t)i * cols; }, cols, count);
}

__device__ __forceinline__ int warps_in_grid() { return gridDim.x * WARPS; }
__device__ __forceinline__ int warp_in_grid() { return blockIdx.x * WARPS + warp_index(); }
