/* The end of qkv_fast and inject_fast: heads are ended by all blocks, a head of a token by a warp.
 * A finishing warp writes its slice's sums of a tile and arrives for the heads that the tile has rows of (a
 * head's size need not be a multiple of 16). All heads of all tokens are dealt out to the warps of the grid,
 * which wait until theirs is whole: slices in order, the root of the row, bias, norm, rotation, one rounding.
 * So the last tiles' heads are ended side by side, not by the block that came last; the blocks must be on the
 * card together (kernels/gpu/fast.py sees to that). */
#pragma once
#include "skinny.cuh"

#ifndef MOST_HEAD_SIZE
#define MOST_HEAD_SIZE 128  // a multiple of 64
#endif
#ifndef SHARED_KV  // 1: the second matrix has k heads alone, and what they are at first is the v heads' too
#define SHARED_KV 0
#endif

constexpr int MOST_HEADS = 512;  // of one launch: two counters each, of arrivals and of tokens ended

/* The heads of one launch: those of the first matrix, then those of the second. Heads past `count` share the
 * second's sums. */
struct Heads {
    int size, count, first_count;

    __device__ __forceinline__ int first_tiles() const { return (opaque(first_count) * size + 15) / 16; }
    __device__ __forceinline__ int tiles() const {
        return first_tiles() + ((count - first_count) * size + 15) / 16;
    }
    __device__ __forceinline__ int ended() const { return SHARED_KV ? 2 * count - first_count : count; }
    __device__ __forceinline__ int source(int head) const {
        return SHARED_KV && head >= count ? head - (count - first_count) : head;
    }
    __device__ __forceinline__ int users(int head) const { return SHARED_KV && head >= first_count ? 2 : 1; }
    __device__ __forceinline__ int base(int head) const {  // tile where the head's matrix starts
        return head < first_count ? 0 : first_tiles();
    }
    __device__ __forceinline__ int row(int head) const {  // its first row in its matrix
        return (head < first_count ? head : head - first_count) * size;
    }
    /* Its counters: many warps ask for them over and over, so each head has a line of its own if there is
     * room, else a sector. */
    __device__ __forceinline__ int counter(int head) const { return head * (count <= 128 ? 32 : 8); }
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

/* What becomes of a head of one token: bias, norm may be null. `to` null: nothing. */
struct Finish {
    const float *bias, *norm;
    bf16* to;
    bool is_turned, is_zero;
};

/* One head of one token by one warp, once it is whole. A lane has pairs of components: those that turn with
 * each other, and of those that do not turn two neighbours. Whatever can be is read before the wait. Of a
 * head's tokens the one that comes last puts its counters back to zero; what it asks for that is under way
 * meanwhile. */
__device__ __forceinline__ void finish_head(const Task& task, const Heads& heads, int head, int token,
                                            float* work, u32* counter, bool is_normed, float eps,
                                            const float* cos, const float* sin, int pairs,
                                            const Finish& how) {
    constexpr int LANE_PAIRS = MOST_HEAD_SIZE / 64;
    constexpr bool IS_SMALL = LANE_PAIRS <= 2;  // else registers are too few for what is read ahead
    constexpr int KEPT = IS_SMALL ? LANE_PAIRS : 1;
    float2 y[LANE_PAIRS], norm[KEPT], turn[KEPT];
    if (!how.is_turned) pairs = 0;
    auto low_at = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? p : 2 * p;
    };
    auto high_at = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? p + pairs : 2 * p + 1;
    };
    auto both = [&](const float* from, int m) {
        return make_float2(from && low_at(m) < heads.size ? from[low_at(m)] : 0.f,
                           from && high_at(m) < heads.size ? from[high_at(m)] : 0.f);
    };
    auto turn_of = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? make_float2(cos[p], sin[p]) : make_float2(1.f, 0.f);
    };
    if constexpr (IS_SMALL)
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            norm[m] = both(how.norm, m);
            turn[m] = turn_of(m);
        }
    warp_wait_for(counter, heads.tiles_of(head) * parts_of(task));
    u32 ended = 0;
    if (lane_index() == 0) ended = atomicAdd(counter + 1, 1u);
    float of_slices[2];  // squares of the row, a slice a lane: at most 64
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        int slice = lane_index() + 32 * m;
        of_slices[m] = is_normed && slice < task.slices ? __ldcg(work + SQUARES * slice + token) : 0.f;
    }
    const float* sums = head_sums(task, work, heads.base(head), 0, token);
    auto sum_at = [&](int n) {
        int row = heads.row(head) + min(n, heads.size - 1);
        return row / 16 * parts_of(task) * MOST_ROWS * 16 + row % 16;
    };
    int from[LANE_PAIRS][2];
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        y[m] = make_float2(0.f, 0.f);
        from[m][0] = sum_at(low_at(m)), from[m][1] = sum_at(high_at(m));
    }
    constexpr int AT_ONCE = IS_SMALL ? 2 : 1;  // parts whose loads are under way together
#pragma unroll 1
    for (int part = 0; part < parts_of(task); part += AT_ONCE) {
        float2 first[LANE_PAIRS], second[KEPT];
        const float* at = sums + part * MOST_ROWS * 16;
        const bool has_second = IS_SMALL && part + 1 < parts_of(task);
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            first[m] = make_float2(__ldcg(at + from[m][0]), __ldcg(at + from[m][1]));
            if (m >= KEPT) continue;
            second[m] = make_float2(0.f, 0.f);
            if (has_second)
                second[m] = make_float2(__ldcg(at + MOST_ROWS * 16 + from[m][0]),
                                        __ldcg(at + MOST_ROWS * 16 + from[m][1]));
        }
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            y[m].x += first[m].x, y[m].y += first[m].y;
            if (m < KEPT && has_second) y[m].x += second[m].x, y[m].y += second[m].y;
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        if (low_at(m) >= heads.size) y[m].x = 0.f;
        if (high_at(m) >= heads.size) y[m].y = 0.f;
    }
    float root = is_normed ? rsqrtf(warp_sum(of_slices[0] + of_slices[1]) / task.cols + eps) : 1.f;
    float squares = 0.f;
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        float2 bias = both(how.bias, m);
        y[m] = make_float2(y[m].x * root + bias.x, y[m].y * root + bias.y);
        squares += y[m].x * y[m].x;
        squares += y[m].y * y[m].y;
    }
    if (how.norm) {
        float r = rsqrtf(warp_sum(squares) / heads.size + eps);
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            const float2 times = IS_SMALL ? norm[m % KEPT] : both(how.norm, m);
            y[m].x = times.x * (y[m].x * r), y[m].y = times.y * (y[m].y * r);
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        if (lane_index() + 32 * m < pairs) {
            const float2 by = IS_SMALL ? turn[m % KEPT] : turn_of(m);
            y[m] = make_float2(y[m].x * by.x - y[m].y * by.y, y[m].y * by.x + y[m].x * by.y);
        }
        if (how.to && low_at(m) < heads.size) how.to[low_at(m)] = to_bf16(how.is_zero ? 0.f : y[m].x);
        if (how.to && high_at(m) < heads.size) how.to[high_at(m)] = to_bf16(how.is_zero ? 0.f : y[m].y);
    }
    if (lane_index() == 0 && ended == task.rows * heads.users(head) - 1) counter[0] = counter[1] = 0;
}

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
        finish_head(task, heads, source, token, work, counters + heads.counter(source), is_normed, eps,
                    cos + at, sin + at, pairs, how);
    }
}
