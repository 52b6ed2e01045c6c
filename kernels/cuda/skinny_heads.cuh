/* The end of qkv_fast and inject_fast: heads are finished by the block whose arrival makes them whole.
 * Every block first writes its slice's sums of all its tiles, then arrives once for each head that each tile
 * touches (a head's size need not be a multiple of 16), then finishes the heads for which it came last:
 * slices in order, the root of the row, bias, norm, rotation, one rounding. One warp a head and token. */
#pragma once
#include "skinny.cuh"

constexpr int MOST_HEADS = 512;  // of one launch
constexpr int MOST_HEAD_SIZE = 256;
constexpr int LANE_PART = MOST_HEAD_SIZE / 32;

/* The heads of one launch: those of the first matrix, then those of the second. */
struct Heads {
    int size, count, first_count, first_tiles;

    __device__ __forceinline__ int base(int head) const {  // tile where the head's matrix starts
        return head < first_count ? 0 : first_tiles;
    }
    __device__ __forceinline__ int row(int head) const {  // its first row in its matrix
        return (head < first_count ? head : head - first_count) * size;
    }
    __device__ __forceinline__ int tiles(int head) const {  // that hold rows of it
        return (row(head) + size - 1) / 16 - row(head) / 16 + 1;
    }
};

/* What becomes of a head of one token. `to` null: nothing. */
struct Finish {
    const float *bias, *norm;
    bf16* to;
    bool is_turned, is_zero;
};

/* A slice's sums as [tile][slice][token][16 rows]: whole sectors both when written and when read. */
__device__ __forceinline__ float* head_sums(const Task& task, float* work, int tile, int slice, int token) {
    float* sums = work + SQUARES * task.slices;
    return sums + (((size_t)tile * parts_of(task) + slice) * MOST_ROWS + token) * 16;
}

struct KeepSlice {
    const Task& task;
    float* work;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) const {
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (token_of(q) >= task.rows) continue;
            float* to = head_sums(task, work, tile, part_of(task), token_of(q)) + row_of();
            __stcg(to, v[q].x);
            __stcg(to + 8, v[q].y);
        }
    }
};

/* Arrive for the tiles of this block; `whole` gets the heads that became whole. */
__device__ __forceinline__ void arrive_heads(const Task& task, const Heads& heads, u32* counters, u16* whole,
                                             u32* whole_count) {
    for (int ordinal = threadIdx.x;; ordinal += THREADS) {
        int tile = task.first + ordinal * task.step;
        if (tile >= task.tiles) break;
        if (!is_owner(task, ordinal)) continue;
        bool is_first = tile < heads.first_tiles;
        int row = 16 * (is_first ? tile : tile - heads.first_tiles);
        int begin = is_first ? 0 : heads.first_count, end = is_first ? heads.first_count : heads.count;
        for (int head = begin + row / heads.size; head < end && heads.row(head) < row + 16; ++head) {
            u32 total = heads.tiles(head) * parts_of(task);
            if (atomic_add_acq_rel(counters + head, 1) != total - 1) continue;
            store_release(counters + head, 0);
            whole[atomicAdd(whole_count, 1)] = head;
        }
    }
}

/* One head of one token by one warp. scratch: size floats of this warp.
 */
__device__ __forceinline__ void finish_head(const Task& task, const Heads& heads, int head, int token,
                                            float* work, bool is_normed, float eps, const float* cos,
                                            const float* sin, int pairs, const Finish& how, float* scratch) {
    float y[LANE_PART], sum = 0.f, root = 1.f;
    if (is_normed) {
        float squares = 0.f;
        for (int slice = 0; slice < task.slices; ++slice) squares += __ldcg(work + SQUARES * slice + token);
        root = rsqrtf(squares / task.cols + eps);
    }
#pragma unroll
    for (int m = 0; m < LANE_PART; ++m) {
        int i = lane_index() + 32 * m, row = heads.row(head) + i;
        y[m] = 0.f;
        if (i >= heads.size) continue;
        const float* from = head_sums(task, work, heads.base(head) + row / 16, 0, token) + row % 16;
#pragma unroll 4
        for (int slice = 0; slice < parts_of(task); ++slice) y[m] += __ldcg(from + slice * MOST_ROWS * 16);
        y[m] = y[m] * root + (how.bias ? how.bias[i] : 0.f);
        sum += y[m] * y[m];
    }
    if (how.norm) {
        float r = rsqrtf(warp_sum(sum) / heads.size + eps);
#pragma unroll
        for (int m = 0; m < LANE_PART; ++m) {
            int i = lane_index() + 32 * m;
            if (i < heads.size) y[m] = how.norm[i] * (y[m] * r);
        }
    }
    if (how.is_turned) {
#pragma unroll
        for (int m = 0; m < LANE_PART; ++m) {
            int i = lane_index() + 32 * m;
            if (i < heads.size) scratch[i] = y[m];
        }
        __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < LANE_PART; ++m) {
        int i = lane_index() + 32 * m;
        if (i >= heads.size) continue;
        if (how.is_turned && i < pairs) y[m] = y[m] * cos[i] - scratch[i + pairs] * sin[i];
        if (how.is_turned && i >= pairs && i < 2 * pairs)
            y[m] = y[m] * cos[i - pairs] + scratch[i - pairs] * sin[i - pairs];
        how.to[i] = to_bf16(y[m]);
    }
    __syncwarp();
}

/* By all threads, after skinny() with KeepSlice. rule(head, token) says what becomes of it; pos: of each
 * token. */
template <class Rule>
__device__ __forceinline__ void finish_heads(const Task& task, const Heads& heads, float* work, u32* counters,
                                             bool is_normed, float eps, const float* cos, const float* sin,
                                             int pairs, const int* pos, const Rule& rule) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u16 whole[MOST_HEADS];
    __shared__ u32 whole_count;
    if (threadIdx.x == 0) whole_count = 0;
    __syncthreads();  // this block's sums are written, and its shared memory is free
    arrive_heads(task, heads, counters, whole, &whole_count);
    __syncthreads();
    if (warp_index() >= WARPS) return;  // the scratch is one of the streaming warps' sums
    float* scratch = (float*)dynamic + warp_index() * MOST_HEAD_SIZE;
    int work_items = (int)whole_count * task.rows;
    for (int item = warp_index(); item < work_items; item += WARPS) {
        int head = whole[item / task.rows], token = item % task.rows;
        Finish how = rule(head, token);
        if (!how.to) continue;
        if (how.is_zero) {
            for (int i = lane_index(); i < heads.size; i += 32) how.to[i] = to_bf16(0.f);
            continue;
        }
        size_t at = (size_t)pos[token] * pairs;
        finish_head(task, heads, head, token, work, is_normed, eps, cos + at, sin + at, pairs, how, scratch);
    }
}
