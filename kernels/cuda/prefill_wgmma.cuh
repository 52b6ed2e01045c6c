/* The frame of prefill.cuh on wgmma, sm_90a: the same product, tokens from lay_prefill.cu.
 * Grid:   (tiles of TOKENS tokens, groups of 16 * WEIGHT_TILES outputs): neighbours share weights in L2.
 *         A warpgroup for 64 outputs x TOKENS tokens each, and one whose first warp copies. Packed weights
 *         are wgmma's A operand in registers as they lie in memory; tokens its B operand.
 * Moves:  each block its weights and tokens once, through a ring of bulk copies of 64 k; bound by tensor
 *         cores.
 * Bits:   an output's sum runs over k ascending, in one accumulator: no matter of rows, tiles or chunks of
 *         a prompt. They are not those of the mma.sync frame.
 * Source: kernel-playbook 7. */
#pragma once
#include "wgmma_stage.cuh"

constexpr int THREADS = CONSUMERS + 128;
constexpr int FINISHED = 4 * TOKENS * PITCH;
constexpr int RING = STAGES * STAGE > FINISHED ? STAGES * STAGE : FINISHED;  // bytes; barriers lie behind

/* What one block computes. */
struct Product {
    const char* weights;  // its first row tile
    const char* x;        // its first token: [64 k][padded rows][128 bytes]
    int tiles, tokens;    // row tiles and padded rows from there on that there are in this block
    int first_token, rows, padded, cols;

    /* w: packed, `tiles` row tiles. group: which WEIGHT_TILES of them. */
    __device__ __forceinline__ Product(const u16* w, int tiles_, int group, const bf16* x_, int rows_,
                                       int cols_)
        : weights((const char*)w + group * WEIGHT_TILES * tile_bytes(cols_)),
          x((const char*)x_ + (size_t)blockIdx.x * TOKENS * COLUMN_BYTES),
          tiles(min(WEIGHT_TILES, tiles_ - group * WEIGHT_TILES)),
          first_token(blockIdx.x * TOKENS),
          rows(rows_),
          padded((rows_ + 7) / 8 * 8),
          cols(cols_) {
        tokens = min(TOKENS, padded - first_token);
    }
};

/* Of the copying warp: lane i orders row tile i. Past the last chunk of K comes the one before again, for
 * tokens that are zeros. */
__device__ __forceinline__ void copy_weights(const Product& p, const Ring& ring, int slot, int step) {
    const int chunks = (p.cols + 31) / 32, lane = lane_index();
    if (lane == 0) mbarrier_arrive_expect(&ring.full[slot], p.tiles * TILE_BYTES + p.tokens * COLUMN_BYTES);
    __syncwarp();
    if (lane >= p.tiles) return;
    char* to = ring.stages + slot * STAGE + TOKEN_BYTES + lane * TILE_BYTES;
    const char* from = p.weights + lane * tile_bytes(p.cols) + 2 * step * CHUNK_BYTES;
    if (2 * step + 1 < chunks) {
        bulk_load(to, from, TILE_BYTES, &ring.full[slot]);
    } else {
        bulk_load(to, from, CHUNK_BYTES, &ring.full[slot]);
        bulk_load(to + CHUNK_BYTES, from, CHUNK_BYTES, &ring.full[slot]);
    }
}

__device__ __forceinline__ void copy_tokens(const Product& p, const Ring& ring, int slot, int step) {
    if (lane_index() > 0) return;
    bulk_load(ring.stages + slot * STAGE, p.x + (size_t)step * p.padded * COLUMN_BYTES,
              p.tokens * COLUMN_BYTES, &ring.full[slot]);
}

/* Weights are asked for before the kernel ahead has ended. */
__device__ __forceinline__ void copy_all(const Product& p, const Ring& ring, int steps) {
    for (int s = 0; s < min(STAGES, steps); ++s) copy_weights(p, ring, s, s);
    griddep_wait();
    for (int s = 0; s < min(STAGES, steps); ++s) copy_tokens(p, ring, s, s);
    for (int step = STAGES, slot = 0, parity = 0; step < steps; ++step) {
        mbarrier_wait(&ring.empty[slot], parity);
        copy_weights(p, ring, slot, step);
        copy_tokens(p, ring, slot, step);
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    griddep_launch();
}

/* FP8: sums over the 128 k that share a scale, and the scales of this lane's rows. */
struct Scaled {
    const float2* of;  // of this warp's row tile: rows 0..7, rows 8..15
    float2 scale;
    float part[TOKENS / 2] = {};

    __device__ __forceinline__ explicit Scaled(const Product& p)
        : of((const float2*)(p.weights + min((int)warp_index(), p.tiles - 1) * tile_bytes(p.cols) +
                             fp8_codes(p.cols))) {}

    /* Before a stage, of which two share scales. */
    __device__ __forceinline__ void begin(int step) {
        if (step % 2) return;
        scale = __ldg(of + step / 2);
        wgmma_pin(part);
    }

    /* After it: nothing is under way. */
    __device__ __forceinline__ void end(float (&acc)[TOKENS / 2], int step, int steps) {
        if (step % 2 == 0 && step + 1 < steps) return;
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i)
            acc[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, part[i], acc[i]), part[i] = 0.f;
    }
};

/* All sums of a warpgroup. Half a stage is multiplied while the weights of the next half come to registers
 * that the half before has left. */
__device__ __forceinline__ void multiply_all(float (&acc)[TOKENS / 2], const Product& p, const Ring& ring,
                                             int steps) {
    Half first, second;
    Scaled scaled(p);
    float (&sums)[TOKENS / 2] = FP8 ? scaled.part : acc;
    int step = 0, slot = 0, parity = 0;
    do {
        const char* stage = ring.stages + slot * STAGE;
        if (FP8) scaled.begin(step);
        mbarrier_wait(&ring.full[slot], parity);
        first.load(stage, 0);
        first.multiply(sums, stage, 0);
        wgmma_wait<1>();
        if (step > 0 && step - 1 + STAGES < steps) give_back(ring, (slot ? slot : STAGES) - 1);
        second.load(stage, 1);
        second.multiply(sums, stage, 1);
        wgmma_wait<1>();
        if (FP8) scaled.end(acc, step, steps);
        if (++slot == STAGES) slot = 0, parity ^= 1;
    } while (++step < steps);
    wgmma_wait<0>();
}

/* The whole of it; the sink as in prefill.cuh. */
template <class Sink>
__device__ __forceinline__ void prefill(const Product& p, const Sink& sink) {
    extern __shared__ __align__(1024) char dynamic[];  // RING bytes, then barriers
    const Ring ring(dynamic, RING);
    const int steps = (p.cols + STAGE_K - 1) / STAGE_K;
    if (threadIdx.x == 0) ring.open();
    __syncthreads();
    if (warp_index() >= CONSUMERS / 32) {
        if constexpr (TOKENS == 256) registers_give<40>();
        if (warp_index() == CONSUMERS / 32) copy_all(p, ring, steps);
        return;
    }
    if constexpr (TOKENS == 256) registers_take<232>();  // of 168, half a warpgroup's sums and more
    float acc[TOKENS / 2] = {};
    multiply_all(acc, p, ring, steps);
    griddep_wait();
    named_barrier_sync(1, CONSUMERS);  // all stages have been read
    float* tile = (float*)dynamic;
    const int lane = opaque(lane_index()), first = 16 * opaque(warp_index()) + lane / 4;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i)
        tile[(i / 4 * 8 + 2 * (lane % 4) + i % 2) * PITCH + first + i % 4 / 2 * 8] = acc[i];
    named_barrier_sync(1, CONSUMERS);
    write_tile(sink, tile, p.first_token, min(TOKENS, p.rows - p.first_token), CONSUMERS / 32);
}
