/* pack_mxfp4: rows of a checkpoint's MXFP4 blocks and scales into the order of mxfp4.cuh. Tiles as in
 *         pack.cu: rows 0..7 begin at row 0, rows 8..15 at row `bottom` of a matrix of `each` rows.
 * Grid:   a thread for the 16 numbers of a lane in a unit: tiles * ceil(K/64) * 32 threads, 256 a block; in
 *         y matrices. K is a multiple of 32.
 *         largest: of all scales, zero before.
 * Moves:  N*K*4.25/8 bytes in and out, once at load.
 * Truth:  oracle_moe.py mxfp4; packed, the products of experts. */
#include "mxfp4.cuh"

extern "C" __global__ void pack_mxfp4(const u8* blocks, const u8* scales, u8* packed, u32* largest,
                                      int top_rows, int bottom_rows, int bottom, int stride, int tiles,
                                      int cols, int each) {
    const int units = (cols + 63) / 64, chunks = cols / 32;
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = at % 32, unit = at / 32 % units, tile = at / 32 / units;
    if (tile >= tiles) return;
    u32 most = 0;
    const Mxfp4Tile place(blockIdx.y, tile, tiles, units);
    u8 *words = packed + place.words + unit * MXFP4_WORDS,
       *scales_to = packed + place.scales + unit * MXFP4_SCALES;
#pragma unroll
    for (int which = 0; which < 4; ++which) {
        const int chunk = 2 * unit + which / 2, row = tile * stride + lane / 4;
        const bool is_there = chunk < chunks && row < (which % 2 ? bottom_rows : top_rows);
        const size_t block = ((size_t)blockIdx.y * each + row + (which % 2 ? bottom : 0)) * chunks + chunk;
        const u32 from = is_there ? *(const u32*)(blocks + 16 * block + 4 * (lane % 4)) : 0;
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) word |= place_e2m1(from >> 4 * i & 15, i);
        *(u32*)(words + 16 * lane + 4 * which) = word;
        if (lane % 4 != which) continue;
        const u32 scale = is_there ? scales[block] : 0;
        scales_to[lane / 4 * 4 + which] = scale;
        most = max(most, scale);
    }
    if (most > __ldcg(largest)) atomicMax(largest, most);
}
