/* pack: rows of a plain (N, K) bf16 matrix into the fragment order of skinny.cuh; unpack: back again.
 *         A tile's rows 0..7 come from `top`, rows 8..15 from `bottom`; the next tile is `stride` rows on.
 *         One matrix: bottom = top + 8 rows, stride 16. Gate and up: bottom = the first up row, stride 8,
 *         so that a thread holds both.
 * Grid:   a thread for 8 k of one row pair: tiles * ceil(K/32) * 32 threads, 256 a block; in y matrices, as
 *         experts have them.
 * Moves:  N*K*4 bytes, once at load.
 * Truth:  the other of the two: packed and unpacked a matrix is itself. */
#include "common.cuh"

/* k 0..7 of a row as 4 words; zeros where there is none. */
__device__ __forceinline__ void read_eight(const u16* row, bool is_row, int k, int cols, u32 (&word)[4]) {
    if (cols % 8 == 0) {  // rows are aligned
        uint4 v = is_row && k < cols ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = k + 2 * i;
        u32 low = is_row && at < cols ? row[at] : 0, high = is_row && at + 1 < cols ? row[at + 1] : 0;
        word[i] = low | high << 16;
    }
}

__device__ __forceinline__ void write_eight(u16* row, bool is_row, int k, int cols, const u32 (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int at = k + 2 * i;
        if (is_row && at < cols) row[at] = (u16)word[i];
        if (is_row && at + 1 < cols) row[at + 1] = (u16)(word[i] >> 16);
    }
}

/* Rows and k of a thread: packed [tile][chunk][j][lane] holds 16 bytes a lane. */
struct Place {
    int tile, chunk, lane, row, k;

    __device__ __forceinline__ explicit Place(int chunks, int stride) {
        size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
        lane = at % 32;
        chunk = at / 32 % chunks;
        tile = at / 32 / chunks;
        row = tile * stride + lane / 4;
        k = 32 * chunk + 8 * (lane % 4);
    }
};

/* each: rows between the matrices of a grid with more than one block in y. */
extern "C" __global__ void pack(const u16* top, const u16* bottom, uint4* packed, int top_rows,
                                int bottom_rows, int stride, int tiles, int cols, int each) {
    int chunks = (cols + 31) / 32;
    Place place(chunks, stride);
    if (place.tile >= tiles) return;
    u32 low[4], high[4];
    size_t row = ((size_t)blockIdx.y * each + place.row) * cols;
    packed += (size_t)blockIdx.y * tiles * chunks * 64;
    read_eight(top + row, place.row < top_rows, place.k, cols, low);
    read_eight(bottom + row, place.row < bottom_rows, place.k, cols, high);
    uint4* to = packed + ((size_t)place.tile * chunks + place.chunk) * 64 + place.lane;
    to[0] = make_uint4(low[0], high[0], low[1], high[1]);
    to[32] = make_uint4(low[2], high[2], low[3], high[3]);
}

extern "C" __global__ void unpack(u16* top, u16* bottom, const uint4* packed, int top_rows, int bottom_rows,
                                  int stride, int tiles, int cols) {
    int chunks = (cols + 31) / 32;
    Place place(chunks, stride);
    if (place.tile >= tiles) return;
    const uint4* from = packed + ((size_t)place.tile * chunks + place.chunk) * 64 + place.lane;
    uint4 a = from[0], b = from[32];
    u32 low[4] = {a.x, a.z, b.x, b.z}, high[4] = {a.y, a.w, b.y, b.w};
    size_t row = (size_t)place.row * cols;
    write_eight(top + row, place.row < top_rows, place.k, cols, low);
    write_eight(bottom + row, place.row < bottom_rows, place.k, cols, high);
}
