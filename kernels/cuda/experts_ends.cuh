/* The warps that end tiles of the experts' products: the streaming warps' sums of a tile, in warp order, then
 * the kernel's sink. */
#pragma once
#include "experts_plan.cuh"
#include "experts_units.cuh"

/* A tile of the list, as its finishing warp sees it. */
struct Ending {
    int which, at;  // tile `at` of run `which`
    int expert, tile;
    Run run;

    /* Whether there is one, `step` tiles on. */
    __device__ __forceinline__ bool move(int step, const Plan& plan, const Shape& shape, const Run* list) {
        at += step;
        while (which < plan.listed && at >= list[which].tiles) at -= list[which++].tiles;
        if (which >= plan.listed) return false;
        run = list[which], expert = run.tile / shape.tiles, tile = run.tile - expert * shape.tiles + at;
        return true;
    }
};

/* sink.prepare(run, expert, tile) asks for what the end of a tile needs (a Sink::Ready), while the end before
 * it is still waited for: behind all weights under way it takes as long as several tiles. sink(run, tile, v,
 * ready) gets each tile once, by one finishing warp: v as in skinny.cuh, of the pairs that the run has. */
template <class Sink>
__device__ __forceinline__ void end_tiles(const Plan& plan, const Shape& shape, const Run* list,
                                          const float2* sums, Barriers& barriers, Sink& sink) {
    int ordinal = warp_index() - WARPS;
    Ending next{0, 0};
    bool has_next = next.move(ordinal, plan, shape, list);
    typename Sink::Ready soon{};
    if (has_next) soon = sink.prepare(next.run, next.expert, next.tile);
    while (has_next) {
        const Run run = next.run;
        const int tile = next.tile, set = ordinal % SUM_SETS;
        const typename Sink::Ready ready = soon;
        has_next = next.move(FINISHERS, plan, shape, list);
        if (has_next) soon = sink.prepare(next.run, next.expert, next.tile);
        const float2* from = sums + set * WARPS * UNITS * 32 + lane_index();
        float2 v[UNITS];
        mbarrier_wait(&barriers.full[ordinal % FULL_BARRIERS], ordinal / FULL_BARRIERS & 1);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            if (n > 0 && 8 * n >= run.count) break;
            v[2 * n] = from[64 * n], v[2 * n + 1] = from[64 * n + 32];
#pragma unroll(5)
            for (int warp = 1; warp < WARPS; ++warp) {
                const float2 even = from[32 * (warp * UNITS + 2 * n)],
                             odd = from[32 * (warp * UNITS + 2 * n + 1)];
                v[2 * n].x += even.x, v[2 * n].y += even.y;
                v[2 * n + 1].x += odd.x, v[2 * n + 1].y += odd.y;
            }
        }
        mbarrier_arrive(&barriers.empty[set]);
        sink(run, tile, v, ready);
        ordinal += FINISHERS;
    }
}
