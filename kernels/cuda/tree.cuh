/* The order in which the skinny family sums K (skinny.cuh), as a walk for kernels that read K in another way:
 * slices in order, of each its warps in order, of a warp its chunks of 32 ascending. TREE_SLICES and
 * TREE_WARPS are the cut's slices and streaming warps (kernels/gpu/split.py). */
#pragma once
#include "common.cuh"

#ifndef TREE_SLICES
#define TREE_SLICES 1
#endif
#ifndef TREE_WARPS
#define TREE_WARPS 8
#endif

/* One slice's chunks by steps of two of the same warp; where a warp has an odd number, its last step has one.
 * OF_SLICE: warps. */
template <int SLICES, int OF_SLICE>
struct TreeWalk {
    int begin, each, more;        // its first chunk; chunks of a warp; warps that have one more
    int base;                     // its first step
    int long_steps, short_steps;  // of a warp that has one more, of the others

    __device__ __forceinline__ TreeWalk(int cols, int slice) {
        const int chunks = (cols + 31) / 32;
        base = 0;
        for (int s = 0; s < slice; ++s) look_at(chunks, s), base += steps();
        look_at(chunks, slice);
    }

    __device__ __forceinline__ void look_at(int chunks, int slice) {
        begin = chunks * slice / SLICES;
        const int count = chunks * (slice + 1) / SLICES - begin;
        each = count / OF_SLICE, more = count % OF_SLICE;
        long_steps = (each + 2) / 2, short_steps = (each + 1) / 2;
    }

    __device__ __forceinline__ int steps() const {
        return more * long_steps + (OF_SLICE - more) * short_steps;
    }

    __device__ __forceinline__ int own(int warp) const { return each + (warp < more); }

    /* The first of a step's chunks of a warp, OF_SLICE before the other. */
    __device__ __forceinline__ int chunk(int warp, int step) const {
        return begin + warp + 2 * step * OF_SLICE;
    }

    /* A warp's first step. */
    __device__ __forceinline__ int first(int warp) const {
        return base + min(warp, more) * long_steps + max(warp - more, 0) * short_steps;
    }

    /* Which 8 k of a row that is laid in this order the quad of a chunk are, of all slices. */
    static __device__ __forceinline__ int place(int chunk, int quad, int cols) {
        const int chunks = (cols + 31) / 32;
        int slice = 0;
        while (slice + 1 < SLICES && chunks * (slice + 1) / SLICES <= chunk) ++slice;
        const TreeWalk walk(cols, slice);
        const int warp = (chunk - walk.begin) % OF_SLICE, turn = (chunk - walk.begin) / OF_SLICE;
        return 8 * walk.first(warp) + 4 * turn + quad;
    }
};

using Walk = TreeWalk<TREE_SLICES, TREE_WARPS>;
