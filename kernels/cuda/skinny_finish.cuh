/* The end of a tile in the *_fast kernels, by the finishing warps: the streaming warps' sums, in warp order,
 * then the slices', in slice order, then the sink. Tile o of a block is finishing warp o % FINISHERS's: what
 * a tile's end waits for (memory, mostly) then overlaps with the next tiles' ends. Slices meet in global
 * memory, the last to arrive adds them up, or (CLUSTER_MERGE) in the shared memory of one of the cluster's
 * blocks, which take turns: no trip to memory and back, twice, for the last tile. */
#pragma once
#include "skinny_tokens.cuh"

#ifndef SUM_SETS
#define SUM_SETS 2  // tiles whose sums are in shared memory
#endif

/* full: a tile's sums are written; one barrier a finishing warp, at least two, since a fast warp may be a
 * tile ahead. empty: a set of sums is read. arrived: the other slices' sums, counted in bytes. Every lane
 * arrives, for what it wrote or read itself: racecheck does not follow that one lane's arrival behind a
 * __syncwarp would do for all, and a round takes as long (H100, Qwen3-8B, 7.73 ms). */
constexpr int FULL_BARRIERS = FINISHERS == 1 ? 2 : FINISHERS;
struct Barriers {
    u64 full[FULL_BARRIERS], empty[SUM_SETS], arrived[FINISHERS];

    /* By one thread. */
    __device__ __forceinline__ void init(const Task& task) {
        for (int i = 0; i < FULL_BARRIERS; ++i) mbarrier_init(&full[i], 32 * WARPS);
        for (int i = 0; i < FINISHERS; ++i) mbarrier_init(&arrived[i], 1);
        for (int set = 0; set < SUM_SETS; ++set) mbarrier_init(&empty[set], 32);
        mbarrier_fence_init();
    }
};

/* This lane's place in a set of sums, [SUM_SETS][WARPS][UNITS][32]: made where it is used, not kept through a
 * stream. */
__device__ __forceinline__ float2* own_sums(float2* sums, int set) {
    const int thread = opaque(threadIdx.x);
    return sums + (set * WARPS + thread / 32) * UNITS * 32 + thread % 32;
}

/* A tile's sums of this warp to the finishing warp whose tile it is, and acc to zero. Each set is written by
 * all warps (`full`), then read by one (`empty`). count: rows that there are. place(set): this lane's in a
 * set. HAS_ODD: there are rows 1, 3, ... IS_FREE: the set is known to be read. */
template <bool HAS_ODD = true, bool IS_FREE = false, class Place>
__device__ __forceinline__ void give_sums(float (&acc)[TOKEN_TILES][4], u32 ordinal, int count,
                                          const Place& place, Barriers& barriers) {
    const int set = ordinal % SUM_SETS;
    if (!IS_FREE) mbarrier_wait(&barriers.empty[set], (ordinal / SUM_SETS & 1) ^ 1);
    float2* const to = place(set);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        to[64 * n] = make_float2(acc[n][0], acc[n][2]);
        if (HAS_ODD) to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    }
    __syncwarp();  // lanes may have parted in the wait
    mbarrier_arrive(&barriers.full[ordinal % FULL_BARRIERS]);
}

/* Every lane of the warp that arrives last of `total` gets true and sees what the others' warps wrote before.
 * The counter is left at zero. */
__device__ __forceinline__ bool warp_last_to_arrive(u32* counter, u32 total) {
    __syncwarp();
    u32 before = 0;
    if (lane_index() == 0) {
        before = atomic_add_acq_rel(counter, 1);
        if (before == total - 1) *counter = 0;  // nobody asks again in this launch
    }
    before = __shfl_sync(FULL_WARP, before, 0);
    __syncwarp();  // a shuffle alone orders no memory
    return before == total - 1;
}

/* Where unit 0 of this lane lies among the slices' sums: [tile][slice][UNITS][32]. */
__device__ __forceinline__ float2* slice_sums(const Task& task, float* work, int tile, int slice) {
    float2* sums = (float2*)(work + SQUARES * task.slices);
    return sums + ((size_t)tile * task.slices + slice) * UNITS * 32 + lane_index();
}

__device__ __forceinline__ void keep_slice(const Task& task, float* work, int tile,
                                           const float2 (&v)[UNITS]) {
    float2* to = slice_sums(task, work, tile, task.slice);
#pragma unroll
    for (int q = 0; q < UNITS; ++q) __stcg(to + 32 * q, v[q]);
}

/* True for the slice that comes last to a tile; v is then the sum over all slices. */
__device__ __forceinline__ bool merge(const Task& task, float* work, u32* counters, int tile,
                                      float2 (&v)[UNITS]) {
    if (CLUSTER_MERGE || task.slices == 1) return true;
    keep_slice(task, work, tile, v);
    if (!warp_last_to_arrive(counters + tile, task.slices)) return false;
#pragma unroll
    for (int q = 0; q < UNITS; ++q) v[q] = make_float2(0.f, 0.f);
    const float2* from = slice_sums(task, work, tile, 0);
    constexpr int AT_ONCE = (BLOCKS_PER_SM == 1 ? 16 : 8) / UNITS;  // 32 or 16 registers of loads under way
#pragma unroll(AT_ONCE)
    for (int slice = 0; slice < task.slices; ++slice) {
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            float2 part = __ldcg(from + 32 * (slice * UNITS + q));
            v[q].x += part.x, v[q].y += part.y;
        }
    }
    return true;
}

/* 1 / rms of each token row. */
struct RowScale {
    float of[MOST_ROWS];

    /* By one warp, a lane a row. */
    __device__ __forceinline__ void make(const Task& task, float sum, float eps) {
        if (lane_index() < MOST_ROWS) of[lane_index()] = rsqrtf(sum / task.cols + eps);
        __syncwarp();
    }

    /* From the slices' sums of squares, which are all there once any tile is whole. One slice needs no sum
     * (Sink::use_squares). */
    __device__ __forceinline__ void gather(const Task& task, const float* squares, float eps) {
        float sum = 0.f;
        if (lane_index() < MOST_ROWS)
            for (int slice = 0; slice < task.slices; ++slice)
                sum += __ldcg(squares + SQUARES * slice + lane_index());
        make(task, sum, eps);
    }
};

/* Each finishing warp has its own: they come to their first tiles at different times. */
__device__ __forceinline__ RowScale& own_scale(RowScale (&scales)[FINISHERS]) {
    return scales[max(0, warp_index() - WARPS)];
}

/* In a cluster: the sum over all slices to the block whose tile it is, true there. A finishing warp talks
 * only to its likes in the other blocks. One box a sender is enough: before a block sends to the same owner
 * again, it has had that owner's sums for a tile of its own, which were sent after the box was read. */
__device__ __forceinline__ bool exchange(const Task& task, int turn, float4* inbox, u64* arrived,
                                         float2 (&v)[UNITS]) {
    int owner = turn % task.slices;
    float4* mine = inbox + task.slice * (UNITS / 2) * 32 + lane_index();
    if (task.slices == 1) return true;
    u32 to = cluster_address(mine, owner), there = cluster_address(arrived, owner);
#pragma unroll
    for (int q = 0; q < UNITS / 2; ++q) {
        float4 pair = make_float4(v[2 * q].x, v[2 * q].y, v[2 * q + 1].x, v[2 * q + 1].y);
        if (task.slice != owner)
            store_async(to + 512 * q, pair, there);
        else
            mine[32 * q] = pair;  // no other lane reads it
    }
    if (task.slice != owner) return false;
    if (lane_index() == 0) mbarrier_arrive_expect(arrived, (task.slices - 1) * UNITS * 32 * 8);
#pragma unroll
    for (int q = 0; q < UNITS; ++q) v[q] = make_float2(0.f, 0.f);
    mbarrier_wait_cluster(arrived, turn / task.slices & 1);
#pragma unroll(1)
    for (int slice = 0; slice < task.slices; ++slice)
#pragma unroll
        for (int q = 0; q < UNITS / 2; ++q) {
            float4 part = inbox[32 * (slice * (UNITS / 2) + q) + lane_index()];
            v[2 * q].x += part.x, v[2 * q].y += part.y;
            v[2 * q + 1].x += part.z, v[2 * q + 1].y += part.w;
        }
    return true;
}

/* sink.prepare(tile) may ask for what the end of a tile needs while its sums are not there yet; sink(tile, v)
 * gets each tile once they are, sink.end() comes after the last. By one finishing warp. */
template <bool IS_NORMED, class Sink>
__device__ __forceinline__ void gather(const Task& task, const float2* sums, float4* inbox,
                                       unsigned char* tokens, float* squares, Barriers& barriers,
                                       Sink& sink) {
    int me = warp_index() - WARPS, ordinal = me;
    for (int tile = task.first + me * task.step; tile < task.tiles; tile += FINISHERS * task.step) {
        int set = ordinal & 1, turn = ordinal / FINISHERS;
        const float2* from = sums + set * WARPS * UNITS * 32 + lane_index();
        float2 v[UNITS];
        if (is_owner(task, ordinal)) sink.prepare(tile);
        mbarrier_wait(&barriers.full[ordinal % FULL_BARRIERS], ordinal / FULL_BARRIERS & 1);
        if constexpr (IS_NORMED)
            if (turn == 0) {
                float sum = sum_squares(squares_of(task, tokens));
                if (task.slices == 1)
                    sink.use_squares(sum);
                else
                    keep_squares(task, sum, squares);
            }
#pragma unroll
        for (int q = 0; q < UNITS; ++q) v[q] = from[32 * q];
#pragma unroll(5)  // all at once are so many instructions that fetching them takes longer
        for (int warp = 1; warp < WARPS; ++warp)
#pragma unroll
            for (int q = 0; q < UNITS; ++q) {
                float2 part = from[32 * (warp * UNITS + q)];
                v[q].x += part.x, v[q].y += part.y;
            }
        mbarrier_arrive(&barriers.empty[set]);
        ordinal += FINISHERS;
        if (CLUSTER_MERGE &&
            !exchange(task, turn, inbox + me * task.slices * UNITS / 2 * 32, &barriers.arrived[me], v))
            continue;
        sink(tile, v);
    }
    sink.end();
}
