/* The frames of the *_prefill kernels: tokens times packed weights transposed, for many token rows. Either
 * one gives Product (what a block computes), prefill(product, sink) and THREADS. WGMMA: tokens come
 * as lay_prefill.cu lays them, and only sm_90a has the instruction.
 * A sink gets a token's sums by one warp, a lane PER neighbours of the OUTPUTS: sink.read(token) gives what
 * they meet in memory, and sink.write(token, that, sums) ends it. Both have a WHOLE variant, without looks at
 * ends and addresses, where sink.is_whole(). */
#pragma once
#include "fp8.cuh"
#include "neighbours.cuh"
#include "stage.cuh"

constexpr int PER = OUTPUTS / 32;  // of a token's sums, a lane's
constexpr int PITCH =
    OUTPUTS + 4;  // floats between tokens of the finished tile: no bank conflicts in its reads

/* A warp's tokens of the finished tile, BATCH at a time: what they meet is under way together. */
template <bool WHOLE, int BATCH, class Sink>
__device__ __forceinline__ void write_rows(const Sink& sink, const float* tile, int first_token, int count,
                                           int warps) {
    for (int first = warp_index(); first < count; first += warps * BATCH) {
        decltype(sink.template read<WHOLE>(0)) met[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            met[i] = sink.template read<WHOLE>(first_token + min(first + i * warps, count - 1));
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (int token = first + i * warps; token < count)
                sink.template write<WHOLE>(first_token + token, met[i], tile + token * PITCH);
    }
}

template <class Sink>
__device__ __forceinline__ void write_tile(const Sink& sink, const float* tile, int first_token, int count,
                                           int warps) {
    if (sink.is_whole())
        write_rows<true, 8>(sink, tile, first_token, count, warps);
    else
        write_rows<false, 1>(sink, tile, first_token, count, warps);
}

#ifdef WGMMA
#include "prefill_wgmma.cuh"
#else
#include "prefill_mma.cuh"
#endif
