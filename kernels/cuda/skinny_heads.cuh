/* The end of qkv_fast and inject_fast: heads are ended by all blocks, a head of a token by a warp.
 * A finishing warp writes its slice's sums of a tile and arrives for the heads that the tile has rows of (a
 * head's size need not be a multiple of 16). All heads of all tokens are dealt out to the warps of the grid,
 * which wait until theirs is whole: slices in order, the root of the row, bias, norm, rotation, one rounding.
 * So the last tiles' heads are ended side by side, not by the block that came last; the blocks must be on the
 * card together (kernels/gpu/fast.py sees to that). */
#pragma once
#include "end_head.cuh"
#include "skinny.cuh"

constexpr int MOST_HEADS = 512;  // of one launch: two counters each, of arrivals and of tokens ended

/* Two packed matrices whose tiles follow each other. */
struct HeadWeights {
    int cols, first_rows;
    const u16 *first, *second;

    __device__ __forceinline__ const char* at(int tile) const {
        int first_tiles = (opaque(first_rows) + 15) / 16;
        bool is_first = tile < first_tiles;
        return (const char*)(is_first ? first : second) +
               (is_first ? tile : tile - first_tiles) * tile_bytes(opaque(cols));
    }
};

/* Sums that meet in the workspace: [tile][slice][token][16 rows], whole sectors both ways. Slices that are a
 * cluster have met before. */
__device__ __forceinline__ int parts_of(const Task& task) { return CLUSTER_MERGE ? 1 : task.slices; }

__device__ __forceinline__ float* head_sums(const Task& task, float* work, int tile, int part, int token) {
    float* sums = work + SQUARES * task.slices;
    return sums + ((tile * parts_of(task) + part) * MOST_ROWS + token) * 16;
}

struct KeepTile {
    const Task& task;
    const Heads& heads;
    float* work;
    u32* counters;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}
    __device__ __forceinline__ void use_squares(float sum) const { keep_squares(task, sum, work); }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) const {
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (token_of(q) >= task.rows) continue;
            float* to = head_sums(task, work, tile, CLUSTER_MERGE ? 0 : task.slice, token_of(q)) + row_of();
            __stcg(to, v[q].x);
            __stcg(to + 8, v[q].y);
        }
        bool is_first = tile < heads.first_tiles();
        int row = 16 * (is_first ? tile : tile - heads.first_tiles());
        int begin = is_first ? 0 : heads.first_count, end = is_first ? heads.first_count : heads.count;
        int head = begin + row / heads.size + lane_index();
        __syncwarp();
        if (head < end && heads.row(head) < row + 16) red_add_release(counters + heads.counter(head), 1);
    }
};

/* A head of one token, once all its tiles have come. Of a head's tokens the one that comes last puts its
 * counters back to zero; what it asks for that is under way meanwhile. */
struct HeadTurn {
    u32* counter;
    u32 arrivals, tokens, ended;

    __device__ __forceinline__ void begin() {
        warp_wait_for(counter, arrivals);
        ended = 0;
        if (lane_index() == 0) ended = atomicAdd(counter + 1, 1u);
    }

    __device__ __forceinline__ void end() const {
        if (lane_index() == 0 && ended == tokens - 1) counter[0] = counter[1] = 0;
    }
};

/* By all threads, after skinny() with KeepTile. rule(head, token) says what becomes of it; pos: of each
 * token. */
template <class Rule>
__device__ __forceinline__ void finish_heads(const Task& task, const Heads& heads, float* work, u32* counters,
                                             bool is_normed, float eps, const float* cos, const float* sin,
                                             int pairs, const int* pos, const Rule& rule) {
    int items = heads.ended() * task.rows, step = gridDim.x * (THREADS / 32);
    for (int item = blockIdx.x + warp_index() * gridDim.x; item < items; item += step) {
        int head = item / task.rows, token = item % task.rows;
        Finish how = rule(head, token);
        size_t at = (size_t)max(pos[token], 0) * pairs;
        int source = heads.source(head);
        const int parts = parts_of(task);
        const HeadSums sums{head_sums(task, work, heads.base(source), 0, token),
                            is_normed ? work + token : nullptr,
                            parts,
                            MOST_ROWS * 16,
                            parts * MOST_ROWS * 16,
                            task.slices,
                            SQUARES,
                            task.cols};
        HeadTurn turn{counters + heads.counter(source), (u32)(heads.tiles_of(source) * parts),
                      (u32)(task.rows * heads.users(source)), 0};
        end_head(sums, heads, source, turn, eps, cos + at, sin + at, pairs, how);
    }
}
