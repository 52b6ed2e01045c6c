/* embed_fast: x[t] = scale * table[ids[t]], gathered from a packed table (skinny.cuh).
 * Grid:   one block a row, 128 threads; a thread takes 8 columns.
 * Moves:  T*D*4 bytes, and as much again that comes along in the sectors.
 * Truth:  oracle.py embed. */
#include "sm90.cuh"

extern "C" __global__ void embed_fast(const int* ids, const uint2* table, bf16* x, float scale, int cols) {
    griddep_launch();
    griddep_wait();
    int id = ids[blockIdx.x], chunks = (cols + 31) / 32;
    int half = id % 16 / 8, lane = id % 8 * 4;
    const u32* tile = (const u32*)table + (size_t)(id / 16) * chunks * 256;
    bf16* row = x + (size_t)blockIdx.x * cols;
    for (int piece = threadIdx.x; piece < 4 * chunks; piece += blockDim.x) {
        const u32* from = tile + piece / 4 * 256 + (lane + piece % 4) * 4 + half;
        u32 words[4] = {from[0], from[2], from[128], from[130]};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int k = 8 * piece + 2 * i;
            if (k < cols) row[k] = to_bf16(scale * low_f32(words[i]));
            if (k + 1 < cols) row[k + 1] = to_bf16(scale * high_f32(words[i]));
        }
    }
}
