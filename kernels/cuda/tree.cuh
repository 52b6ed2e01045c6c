/* The order in which the skinny family sums K (skinny.cuh), as a walk for kernels that read K in another way:
 * slices in order, of each its warps in order, of a warp its chunks of 32 ascending. TREE_SLICES, TREE_WARPS
 * and TREE_SPAN are the cut's slices, streaming warps and chunks side by side that are one warp's
 * (kernels/gpu/split.py). */
#pragma once
#include "common.cuh"

#ifndef TREE_SLICES
#define TREE_SLICES 1
#endif
#ifndef TREE_WARPS
#define TREE_WARPS 8
#endif
#ifndef TREE_SPAN
#define TREE_SPAN 1
#endif

/* One slice's chunks by steps of two of the same warp, of the same span where spans have several; where a
 * warp has an odd number, its last step has one. OF_SLICE: warps. SIDE: chunks of a span, 1 or even. */
template <int SLICES, int OF_SLICE, int SIDE>
struct TreeWalk {
    static_assert(SIDE == 1 || SIDE % 2 == 0);
    static constexpr int GAP = SIDE == 1 ? OF_SLICE : 1;  // from a step's first chunk to its second

    int begin, each, more;        // its first chunk; spans of a warp; warps that have one more
    int base;                     // its first step
    int long_steps, short_steps;  // of a warp that has one more, of the others
    int last, missing;            // the warp whose last span ends early, and by how many chunks

    __device__ __forceinline__ TreeWalk(int cols, int slice) {
        const int chunks = (cols + 31) / 32;
        base = 0;
        for (int s = 0; s < slice; ++s) look_at(chunks, s), base += steps();
        look_at(chunks, slice);
    }

    /* The first chunk of a slice, of so many in all. */
    static __device__ __forceinline__ int begin_of(int chunks, int slice) {
        return (chunks + SIDE - 1) / SIDE * slice / SLICES * SIDE;
    }

    __device__ __forceinline__ void look_at(int chunks, int slice) {
        begin = begin_of(chunks, slice);
        const int end = begin_of(chunks, slice + 1), count = (end - begin) / SIDE;
        each = count / OF_SLICE, more = count % OF_SLICE;
        long_steps = ((each + 1) * SIDE + 1) / 2, short_steps = (each * SIDE + 1) / 2;
        last = count > 0 ? (count - 1) % OF_SLICE : OF_SLICE, missing = SIDE == 1 ? 0 : max(0, end - chunks);
    }

    __device__ __forceinline__ int steps() const {
        return more * long_steps + (OF_SLICE - more) * short_steps - missing / 2;
    }

    __device__ __forceinline__ int own(int warp) const {
        return SIDE * (each + (warp < more)) - (warp == last ? missing : 0);
    }

    /* A warp's i-th chunk. */
    __device__ __forceinline__ int chunk(int warp, int i) const {
        return begin + (i / SIDE * OF_SLICE + warp) * SIDE + i % SIDE;
    }

    /* A warp's first step. */
    __device__ __forceinline__ int first(int warp) const {
        return base + min(warp, more) * long_steps + max(warp - more, 0) * short_steps -
               (warp > last ? missing / 2 : 0);
    }

    /* Which 8 k of a row that is laid in this order the quad of a chunk are, of all slices. */
    static __device__ __forceinline__ int place(int chunk, int quad, int cols) {
        const int chunks = (cols + 31) / 32;
        int slice = 0;
        while (slice + 1 < SLICES && begin_of(chunks, slice + 1) <= chunk) ++slice;
        const TreeWalk walk(cols, slice);
        const int own = chunk - walk.begin, warp = own / SIDE % OF_SLICE;
        return 8 * walk.first(warp) + 4 * (own / SIDE / OF_SLICE * SIDE + own % SIDE) + quad;
    }
};

using Walk = TreeWalk<TREE_SLICES, TREE_WARPS, TREE_SPAN>;
