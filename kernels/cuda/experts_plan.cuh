/* Which pieces of the experts' products a block takes (experts.cuh): the experts that have pairs, then a list
 * of runs, both made by one warp. */
#pragma once
#include "skinny_task.cuh"

/* Tiles tile .. tile + tiles - 1, of all experts' in a row, for the pairs order[begin .. begin + count - 1].
 */
struct Run {
    int tile, tiles, begin, count;
};

/* What a launch is told of its matrices and how pieces are dealt out. room: runs that a list can have. span:
 * 0, or tiles of a stretch, as many as of a range, which divide the tiles. */
struct Shape {
    int experts, tiles, cols, pairs, range, span, room;
};

/* Expert, runs of those before it, its first place in order, its pairs. */
struct Entry {
    int expert, runs, begin, pairs;
};

__device__ __forceinline__ int runs_of(int pairs) { return (pairs + MOST_ROWS - 1) / MOST_ROWS; }

struct Plan {
    int active, runs;  // experts that have pairs; runs of all of them
    int listed;        // runs of this block's list

    /* Entries of the experts that have pairs. By a warp. */
    __device__ __forceinline__ void open(const int* starts, const Shape& shape, Entry* entries) {
        const int lane = lane_index();
        const u32 below = (1u << lane) - 1;
        int entry = 0, sum = 0;
        for (int e = lane; e - lane < shape.experts; e += 32) {
            const int begin = starts[min(e, shape.experts)],
                      pairs = starts[min(e + 1, shape.experts)] - begin;
            const u32 has = __ballot_sync(FULL_WARP, pairs > 0);
            int upto = __popc(has & below), all = __popc(has);  // runs before this one's; runs
            if (__any_sync(FULL_WARP, pairs > MOST_ROWS)) {
                upto = runs_of(pairs);
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int other = __shfl_up_sync(FULL_WARP, upto, step);
                    if (lane >= step) upto += other;
                }
                all = __shfl_sync(FULL_WARP, upto, 31), upto -= runs_of(pairs);
            }
            if (pairs > 0) entries[entry + __popc(has & below)] = Entry{e, sum + upto, begin, pairs};
            entry += __popc(has), sum += all;
        }
        if (lane == 0) active = entry, runs = sum;
        __syncwarp();
    }

    /* The run that a piece belongs to, from there on. By a warp. */
    __device__ __forceinline__ Run find(const Shape& shape, const Entry* entries, int at) const {
        const int before_it = at / shape.tiles;
        int which = -1;
        for (int i = lane_index(); i - lane_index() < active; i += 32)
            which += __popc(__ballot_sync(FULL_WARP, i < active && entries[i].runs <= before_it));
        const Entry entry = entries[which];
        const int runs_here = runs_of(entry.pairs);
        int strip = 0, size = shape.tiles, tile = at - shape.tiles * entry.runs, run = 0;
        if (shape.range < shape.tiles) {
            strip = tile / (shape.range * runs_here), tile -= strip * shape.range * runs_here;
            size = min(shape.range, shape.tiles - strip * shape.range);
        }
        if (runs_here > 1) run = tile / size, tile -= run * size;
        return Run{entry.expert * shape.tiles + strip * shape.range + tile, size - tile,
                   entry.begin + run * MOST_ROWS, min(MOST_ROWS, entry.pairs - run * MOST_ROWS)};
    }

    /* This block's runs. By the same warp. */
    __device__ __forceinline__ void make_list(const Shape& shape, const Entry* entries, Run* list) {
        const u32 total = shape.tiles * runs;  // small without a span: times the grid, it is a u32
        int at = shape.span ? blockIdx.x * shape.span : total * blockIdx.x / gridDim.x, count = 0;
        int end = shape.span ? at + shape.span : total * (blockIdx.x + 1) / gridDim.x;
        while (at < min(end, (int)total)) {
            Run run = find(shape, entries, at);
            run.tiles = min(run.tiles, end - at), at += run.tiles;
            if (lane_index() == 0) list[count] = run;
            ++count;
            if (shape.span && at == end) at += (gridDim.x - 1) * shape.span, end = at + shape.span;
        }
        if (lane_index() == 0) listed = count;
    }
};
