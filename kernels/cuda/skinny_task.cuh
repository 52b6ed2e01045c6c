/* What a block of the *_fast kernels of few rows is given: token rows, a slice of K, row tiles of the
 * weights. The frame itself is skinny.cuh. */
#pragma once
#include "fp8.cuh"
#include "sm90.cuh"

#ifndef TOKEN_TILES
#define TOKEN_TILES 1  // groups of 8 token rows
#endif
#ifndef STREAM_WARPS
#define STREAM_WARPS 8
#endif
#ifndef STEP_CHUNKS
#define STEP_CHUNKS 4  // chunks of 32 k that a warp takes in one step: 2 loads of 16 bytes a lane each
#endif
#ifndef EVEN_STEPS
#define EVEN_STEPS 0  // steps of a tile, if every warp has all chunks in each: then no chunk needs a branch
#endif
#ifndef STEPS_AHEAD
#define STEPS_AHEAD 1  // steps whose weights are on their way to registers
#endif
#ifndef ASKED_CHUNKS
#define ASKED_CHUNKS 0  // chunks of a warp behind those, asked for in L2 before the wait
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

#ifndef FINISH_WARPS
#define FINISH_WARPS 1  // warps that end tiles, each every so-manyth
#endif
#ifndef CLUSTER_MERGE
#define CLUSTER_MERGE 0  // 1: the slices of a tile are one cluster and meet in its shared memory
#endif
#ifndef EARLY_LAUNCH
#define EARLY_LAUNCH 0  // 1: the next kernel may start at once; it needs room beside this one
#endif

#ifndef NORMED
#define NORMED 1  // 0: the token rows of qkv_fast and gate_up_fast come as they are, without a norm
#endif

constexpr int WARPS = STREAM_WARPS;
constexpr int FINISHERS = FINISH_WARPS;
constexpr int THREADS = 32 * (WARPS + FINISHERS);
constexpr int CHUNKS = STEP_CHUNKS;
constexpr int AHEAD = STEPS_AHEAD;
constexpr int UNITS = 2 * TOKEN_TILES;  // pairs of outputs a lane: rows g, g + 8 of a token, g = lane / 4
constexpr int MOST_ROWS = 8 * TOKEN_TILES;
constexpr int LOADS = CHUNK_BYTES / 512;        // of 16 bytes a lane, of a chunk
constexpr int TOKEN_CHUNK = 512 * TOKEN_TILES;  // bytes of a chunk of the tokens
constexpr int SQUARES = 64;  // floats a slice at the start of the workspace: sums of squares by token row

/* What one block does. */
struct Task {
    int rows, cols, tiles;          // token rows, K, row tiles of all weights
    int slice, slices, begin, end;  // this block's chunks of K
    int first, step;                // its tiles: first, first + step, ...
};

__device__ __forceinline__ Task make_task(int rows, int cols, int tiles, int slices) {
    Task task;
    int chunks = (cols + 31) / 32;
    task.rows = rows, task.cols = cols, task.tiles = tiles;
    task.slice = blockIdx.x % slices, task.slices = slices;
    const int spans = (chunks + SPAN - 1) / SPAN;
    task.begin = spans * task.slice / slices * SPAN;
    task.end = spans * (task.slice + 1) / slices * SPAN;
    if (SPAN > 1) task.end = min(task.end, chunks);
    task.first = blockIdx.x / slices, task.step = gridDim.x / slices;
    return task;
}

/* Where the i-th chunk of a warp lies behind its first: spans are dealt out to warps in turn. */
__device__ __forceinline__ constexpr int chunk_at(int i) { return i / SPAN * SPAN * WARPS + i % SPAN; }

/* Whether this block ends its how-manyth tile; in a cluster the blocks take turns, for each finishing warp
 * by itself. */
__device__ __forceinline__ bool is_owner(const Task& task, int ordinal) {
    return !CLUSTER_MERGE || ordinal / FINISHERS % task.slices == task.slice;
}

/* A packed matrix. What at() needs it makes anew, once a tile, rather than keep registers from the stream. */
struct Weights {
    int cols;
    const u16* packed;

    __device__ __forceinline__ const char* at(int tile) const {
        return (const char*)packed + tile * tile_bytes(opaque(cols));
    }
};

/* The same task, made anew after the stream, which then need not keep it in registers. */
__device__ __forceinline__ Task again(int rows, int cols, int tiles, int slices) {
    return make_task(rows, cols, tiles, opaque(slices));
}

/* The token row and the weight row within its tile of unit q: v[q].x is row g, v[q].y row g + 8. */
__device__ __forceinline__ int token_of(int q) { return 8 * (q / 2) + 2 * (lane_index() % 4) + q % 2; }
__device__ __forceinline__ int row_of() { return lane_index() / 4; }
