/* The end of qkv_fast and inject_fast: heads are ended by all blocks, a head of a token by a warp.
 * A finishing warp writes its slice's sums of a tile and arrives for the heads that the tile has rows of (a
 * head's size need not be a multiple of 16). All heads of all tokens are dealt out to the warps of the grid,
 * which wait until theirs is whole: slices in order, the root of the row, bias, norm, rotation, one rounding.
 * So the last tiles' heads are ended side by side, not by the block that came last; the blocks must be on the
 * card together (CudaDevice.launch sees to that). */
#pragma once
#include "skinny.cuh"

constexpr int MOST_HEADS = 512;  // of one launch: a counter of arrivals each, then one of those who went on
constexpr int MOST_HEAD_SIZE = 256;

/* The heads of one launch: those of the first matrix, then those of the second. */
struct Heads {
    int size, count, first_count;

    __device__ __forceinline__ int first_tiles() const { return (opaque(first_count) * size + 15) / 16; }
    __device__ __forceinline__ int tiles() const {
        return first_tiles() + ((count - first_count) * size + 15) / 16;
    }
    __device__ __forceinline__ int base(int head) const {  // tile where the head's matrix starts
        return head < first_count ? 0 : first_tiles();
    }
    __device__ __forceinline__ int row(int head) const {  // its first row in its matrix
        return (head < first_count ? head : head - first_count) * size;
    }
    __device__ __forceinline__ int tiles_of(int head) const {  // that hold rows of it
        return (row(head) + size - 1) / 16 - row(head) / 16 + 1;
    }
};

/* Two packed matrices whose tiles follow each other. */
struct HeadWeights {
    int cols, first_rows;
    const u16 *first, *second;

    __device__ __forceinline__ const char* at(int tile) const {
        int first_tiles = (opaque(first_rows) + 15) / 16;
        bool is_first = tile < first_tiles;
        return (const char*)(is_first ? first : second) +
               (size_t)(is_first ? tile : tile - first_tiles) * ((opaque(cols) + 31) / 32) * CHUNK_BYTES;
    }
};

/* Sums that meet in the workspace: [tile][slice][token][16 rows], whole sectors both ways. Slices that are a
 * cluster have met before. */
__device__ __forceinline__ int parts_of(const Task& task) { return CLUSTER_MERGE ? 1 : task.slices; }

__device__ __forceinline__ float* head_sums(const Task& task, float* work, int tile, int part, int token) {
    float* sums = work + SQUARES * task.slices;
    return sums + (((size_t)tile * parts_of(task) + part) * MOST_ROWS + token) * 16;
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
        if (head < end && heads.row(head) < row + 16) red_add_release(counters + head, 1);
    }
};

/* What becomes of a head of one token: bias, norm may be null. `to` null: nothing. */
struct Finish {
    const float *bias, *norm;
    bf16* to;
    bool is_turned, is_zero;
};

/* One head of one token by one warp, once it is whole. A lane has pairs of components: those that turn with
 * each other, and of those that do not turn two neighbours. */
__device__ __forceinline__ void finish_head(const Task& task, const Heads& heads, int head, int token,
                                            float* work, const u32* counter, bool is_normed, float eps,
                                            const float* cos, const float* sin, int pairs,
                                            const Finish& how) {
    constexpr int LANE_PAIRS = MOST_HEAD_SIZE / 64;
    float low[LANE_PAIRS], high[LANE_PAIRS], squares = 0.f, root = 1.f;
    if (!how.is_turned) pairs = 0;
    auto low_at = [&](int p) { return p < pairs ? p : 2 * p; };
    auto high_at = [&](int p) { return p < pairs ? p + pairs : 2 * p + 1; };
    for (int p = 32 * lane_index(); p < pairs; p += 1024) prefetch_l1(cos + p), prefetch_l1(sin + p);
    for (int i = 32 * lane_index(); how.norm && i < heads.size; i += 1024) prefetch_l1(how.norm + i);
    while (load_acquire(counter) != heads.tiles_of(head) * parts_of(task)) {
    }
    __syncwarp();
    auto sum = [&](int i) {
        float y = 0.f;
        if (i >= heads.size) return y;
        int row = heads.row(head) + i;
        const float* from = head_sums(task, work, heads.base(head) + row / 16, 0, token) + row % 16;
#pragma unroll 4
        for (int part = 0; part < parts_of(task); ++part) y += __ldcg(from + part * MOST_ROWS * 16);
        return y;
    };
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        int p = lane_index() + 32 * m;
        low[m] = sum(low_at(p)), high[m] = sum(high_at(p));
    }
    if (is_normed) {
        for (int slice = 0; slice < task.slices; ++slice) squares += __ldcg(work + SQUARES * slice + token);
        root = rsqrtf(squares / task.cols + eps);
        squares = 0.f;
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        int p = lane_index() + 32 * m;
        low[m] = low[m] * root + (how.bias && low_at(p) < heads.size ? how.bias[low_at(p)] : 0.f);
        high[m] = high[m] * root + (how.bias && high_at(p) < heads.size ? how.bias[high_at(p)] : 0.f);
        squares += low[m] * low[m];
        squares += high[m] * high[m];
    }
    if (how.norm) {
        float r = rsqrtf(warp_sum(squares) / heads.size + eps);
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            int p = lane_index() + 32 * m;
            if (low_at(p) < heads.size) low[m] = how.norm[low_at(p)] * (low[m] * r);
            if (high_at(p) < heads.size) high[m] = how.norm[high_at(p)] * (high[m] * r);
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        int p = lane_index() + 32 * m;
        if (p < pairs) {
            float x = low[m], y = high[m];
            low[m] = x * cos[p] - y * sin[p];
            high[m] = y * cos[p] + x * sin[p];
        }
        if (low_at(p) < heads.size) how.to[low_at(p)] = to_bf16(how.is_zero ? 0.f : low[m]);
        if (high_at(p) < heads.size) how.to[high_at(p)] = to_bf16(how.is_zero ? 0.f : high[m]);
    }
}

/* By all threads, after skinny() with KeepTile. rule(head, token) says what becomes of it; pos: of each
 * token. */
template <class Rule>
__device__ __forceinline__ void finish_heads(const Task& task, const Heads& heads, float* work, u32* counters,
                                             bool is_normed, float eps, const float* cos, const float* sin,
                                             int pairs, const int* pos, const Rule& rule) {
    int items = heads.count * task.rows, step = gridDim.x * (THREADS / 32);
    for (int item = blockIdx.x + warp_index() * gridDim.x; item < items; item += step) {
        int head = item / task.rows, token = item % task.rows;
        Finish how = rule(head, token);
        size_t at = (size_t)max(pos[token], 0) * pairs;
        if (how.to)
            finish_head(task, heads, head, token, work, counters + head, is_normed, eps, cos + at, sin + at,
                        pairs, how);
        __syncwarp();
        if (lane_index() == 0 && atomic_add_acq_rel(counters + MOST_HEADS + head, 1) == task.rows - 1) {
            while (load_acquire(counters + head) != heads.tiles_of(head) * parts_of(task)) {
            }  // where nobody waited
            store_release(counters + head, 0);
            store_release(counters + MOST_HEADS + head, 0);
        }
    }
}
