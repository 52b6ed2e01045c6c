/* pack_fp8: rows of a plain (N, K) matrix of e4m3 codes, and their scales, into the order of fp8.cuh. Tiles
 * as in pack.cu: rows 0..7 begin at row 0, rows 8..15 at row `bottom` of a matrix of `each` rows.
 * Grid:   a thread for 8 k of one row pair: tiles * ceil(K/64) * 64 threads, 256 a block; in y matrices.
 * Moves:  N*K*2 bytes, once at load.
 * Truth:  oracle.py; packed, the products of weights. */
#include "fp8.cuh"

/* Four k of a row, as a word of fp8.cuh. */
__device__ __forceinline__ u32 read_four(const u8* row, bool is_row, int k, int cols) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (is_row && k + i < cols) word |= place_e4m3(row[k + i], i);
    return word;
}

extern "C" __global__ void pack_fp8(const u8* codes, const float* scales, u8* packed, int top_rows,
                                    int bottom_rows, int bottom, int stride, int tiles, int cols, int each) {
    const int chunks = (cols + 63) / 64 * 2, blocks = (cols + SCALE_K - 1) / SCALE_K;
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = at % 32, chunk = at / 32 % chunks, tile = at / 32 / chunks;
    if (tile >= tiles) return;
    const int row = tile * stride + lane / 4, k = 32 * chunk + 8 * (lane % 4);
    const bool has_top = row < top_rows, has_bottom = row < bottom_rows;
    const u8* top = codes + ((size_t)blockIdx.y * each + row) * cols;
    const u8* below = top + (size_t)bottom * cols;
    u8* to = packed + ((size_t)blockIdx.y * tiles + tile) * fp8_tile(cols);
    *(uint4*)(to + FP8_CHUNK * chunk + 16 * lane) =
        make_uint4(read_four(top, has_top, k, cols), read_four(below, has_bottom, k, cols),
                   read_four(top, has_top, k + 4, cols), read_four(below, has_bottom, k + 4, cols));
    if (chunk % 4 || lane >= 2) return;                     // of a scale's k the first chunk
    const int first = tile * stride + (lane ? bottom : 0);  // of the 8 rows
    const size_t groups = (each + 7) / 8;
    const bool is_there = tile * stride < (lane ? bottom_rows : top_rows);
    ((float*)(to + fp8_codes(cols)))[chunk / 4 * 2 + lane] =
        is_there ? scales[(blockIdx.y * groups + first / 8) * blocks + chunk / 4] : 0.f;
}
