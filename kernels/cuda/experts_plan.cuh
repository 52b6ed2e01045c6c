/* Which pieces of the experts' products a block takes (experts.cuh): experts that have pairs, runs, a walk.
 */
#pragma once
#include "skinny_task.cuh"

/* Pieces `piece` .. `end` - 1 are tiles from `tile` on of one expert, for `count` pairs of it: order[begin
 * ..]. */
struct Run {
    int expert, begin, count, tile, piece, end;
};

/* By one warp: an entry (expert, runs before it, its first place in order, pairs) for each expert that has
 * pairs; totals: how many of them, and runs. */
__device__ __forceinline__ void make_plan(const int* first, int experts, int4* entries,
                                          int2& totals) {
    const int lane = lane_index(), each = (experts + 31) / 32;
    const int begin = min(experts, lane * each), end = min(experts, begin + each);
    u32 mine = 0;  // experts; runs from bit 16 on
    int at = __ldcg(first + begin);
#pragma unroll 4
    for (int e = begin, last = at; e < end; ++e) {
        const int next = __ldcg(first + e + 1), count = next - last;
        if (count > 0) mine += 1 + ((count + MOST_ROWS - 1) / MOST_ROWS << 16);
        last = next;
    }
    u32 upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane >= step) upto += other;
    }
    int entry = (upto - mine) & 0xffff, runs = (upto - mine) >> 16;
#pragma unroll 4
    for (int e = begin; e < end; ++e) {
        const int next = __ldcg(first + e + 1), count = next - at;
        if (count > 0) {
            entries[entry++] = make_int4(e, runs, at, count);
            runs += (count + MOST_ROWS - 1) / MOST_ROWS;
        }
        at = next;
    }
    if (lane == 31) totals = make_int2(upto & 0xffff, upto >> 16);
}

/* All pieces, and this block's share of them: stretches of `length`, `step` apart. */
struct Walk {
    const int4* entries;
    int active, tiles, range, total, first, length, step;

    __device__ __forceinline__ Walk(int tiles_, int range_, int span, const int4* entries_, int2 totals)
        : entries(entries_), active(totals.x), tiles(tiles_), range(range_), total(tiles_ * totals.y) {
        const int block = blockIdx.x, blocks = gridDim.x;
        first = span ? block * span : (int)((i64)total * block / blocks);
        length = span ? span : (int)((i64)total * (block + 1) / blocks) - first;
        step = span ? blocks * span : total;
    }

    __device__ __forceinline__ Run find(int piece) const {
        const int before = piece / tiles;
        int low = 0, high = active - 1;  // the last entry that begins no later
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (entries[middle].y <= before)
                low = middle;
            else
                high = middle - 1;
        }
        const int4 entry = entries[low];
        const int runs = (entry.w + MOST_ROWS - 1) / MOST_ROWS;
        int strip = 0, size = tiles, tile = piece - tiles * entry.y, run = 0;
        if (range < tiles) {
            strip = tile / (range * runs), tile -= strip * range * runs;
            size = min(range, tiles - strip * range);
        }
        if (runs > 1) run = tile / size, tile -= run * size;
        return Run{entry.x,
                   entry.z + run * MOST_ROWS,
                   min(MOST_ROWS, entry.w - run * MOST_ROWS),
                   strip * range + tile,
                   piece,
                   piece + size - tile};
    }
};

/* A place on a walk. */
struct Cursor {
    int piece, end, stretch;  // of the run or the stretch, whichever ends first; where the stretch begins

    __device__ __forceinline__ bool is_there() const { return piece >= 0; }

    __device__ __forceinline__ void enter(const Walk& walk) {
        end = min(walk.find(piece).end, min(walk.total, stretch + walk.length));
    }

    __device__ __forceinline__ void start(const Walk& walk) {
        piece = stretch = walk.first;
        if (walk.first >= walk.total || walk.length == 0)
            piece = -1;
        else
            enter(walk);
    }

    __device__ __forceinline__ Run run(const Walk& walk) const { return walk.find(piece); }

    /* To the run behind this one. */
    __device__ __forceinline__ void skip(const Walk& walk) {
        piece = end;
        if (piece == min(walk.total, stretch + walk.length)) piece = stretch += walk.step;
        if (piece >= walk.total)
            piece = -1;
        else
            enter(walk);
    }

    /* To the next piece; true where a run begins, or behind the last. */
    __device__ __forceinline__ bool advance(const Walk& walk) {
        if (++piece < end) return false;
        skip(walk);
        return true;
    }
};
