/* The frame of prefill.cuh on mma.sync, for every card: tokens (rows x K) times packed weights (N x K)
 * transposed, many rows.
 * Grid:   (tiles of TOKENS tokens, groups of 16 * WEIGHT_TILES outputs): neighbours share weights in L2.
 *         Warps of 64 outputs x 64 tokens; weights are the A operand as they lie in memory (skinny.cuh),
 *         tokens the B operand.
 * Moves:  each block its weights and tokens once, through a ring of cp.async stages of 64 k; bound by
 *         tensor cores.
 * Bits:   an output's sum runs over k ascending, in one accumulator: no matter of rows, tiles or chunks of
 *         a prompt. They differ from the skinny family's, which cuts K; all runs of a prompt share what
 *         prefill made.
 * Source: kernel-playbook 7. */
#pragma once
#include "sm90.cuh"

constexpr int WARPS_DOWN = OUTPUTS / 64, WARPS_ACROSS = TOKENS / 64;
constexpr int THREADS = 32 * WARPS_DOWN * WARPS_ACROSS;
constexpr int TILE_BYTES = 2 * CHUNK_BYTES;  // of a row tile of weights, in a stage
constexpr int WEIGHT_BYTES = WEIGHT_TILES * TILE_BYTES, TOKEN_BYTES = TOKENS * STAGE_K * 2;

/* What one block computes. */
struct Product {
    const char* weights;  // its first row tile
    int tiles;            // row tiles from there on that there are
    const bf16* x;
    int first_token, rows, cols;

    /* w: packed, `tiles` row tiles. group: which WEIGHT_TILES of them. */
    __device__ __forceinline__ Product(const u16* w, int tiles_, int group, const bf16* x_, int rows_,
                                       int cols_)
        : weights((const char*)w + group * WEIGHT_TILES * tile_bytes(cols_)),
          tiles(tiles_ - group * WEIGHT_TILES),
          x(x_),
          first_token(blockIdx.x * TOKENS),
          rows(rows_),
          cols(cols_) {}
};

/* A stage's weights: [tile][2 chunks] as in memory. Zeros past the last tile or chunk. */
__device__ __forceinline__ void load_weights(const Product& p, char* stage, int step) {
    const int chunks = (p.cols + 31) / 32, thread = opaque(threadIdx.x);
#pragma unroll
    for (int i = 0; i < WEIGHT_BYTES / 16 / THREADS; ++i) {
        int unit = i * THREADS + thread, tile = unit / (TILE_BYTES / 16),
            rest = 16 * (unit % (TILE_BYTES / 16));
        bool is_there = tile < p.tiles && 2 * step + rest / CHUNK_BYTES < chunks;
        const char* from = p.weights + tile * tile_bytes(p.cols) + 2 * step * CHUNK_BYTES + rest;
        cp_async_16_or_zero(stage + 16 * unit, is_there ? from : p.weights, is_there);
    }
}

/* A stage's tokens: rows of 64 k. The four lanes of a token read 64 bytes side by side, two tokens at a time,
 * so odd rows have their halves exchanged: all banks. Zeros past the last token or column; cols is a multiple
 * of 8. */
__device__ __forceinline__ int token_unit(int row, int unit) { return 8 * row + (unit ^ (row & 1) * 4); }

__device__ __forceinline__ void load_tokens(const Product& p, char* stage, int step) {
    char* to = stage + WEIGHT_BYTES;
    const int thread = opaque(threadIdx.x);
#pragma unroll
    for (int i = 0; i < TOKEN_BYTES / 16 / THREADS; ++i) {
        int row = (i * THREADS + thread) / 8, unit = thread % 8, k = step * STAGE_K + 8 * unit;
        bool is_there = p.first_token + row < p.rows && k < p.cols;
        const bf16* from = p.x + (size_t)(p.first_token + row) * p.cols + k;
        cp_async_16_or_zero(to + 16 * token_unit(row, unit), is_there ? from : p.x, is_there);
    }
}

/* FP8: the scales of a stage's k, of this warp's four row tiles: rows 0..7, rows 8..15. */
struct Scales {
    float2 of[4];

    __device__ __forceinline__ void load(const Product& p, int step) {
        const int first = warp_index() % WARPS_DOWN * 4;
        const char* scales = p.weights + fp8_codes(p.cols) + step / (SCALE_K / STAGE_K) * sizeof(float2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of[i] = __ldg((const float2*)(scales + min(first + i, p.tiles - 1) * tile_bytes(p.cols)));
    }
};

/* acc[i][n]: 16 outputs x 8 tokens of the warp's 64 x 64, over the 64 k of a stage. */
__device__ __forceinline__ void multiply(float (&acc)[4][8][4], const char* stage, const Scales& scales) {
    const int lane = opaque(lane_index()), warp = opaque(warp_index());
    const int down = warp % WARPS_DOWN, across = warp / WARPS_DOWN;
    const char* weights = stage + down * 4 * TILE_BYTES + 16 * lane;
    const char* tokens = stage + WEIGHT_BYTES + across * 64 * 128;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        uint4 a[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4* words = (const uint4*)(weights + i * TILE_BYTES + chunk * CHUNK_BYTES);
            if constexpr (FP8)
                widen_chunk(a[i], *words);
            else
                a[i][0] = words[0], a[i][1] = words[32];
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            uint4 b = *(const uint4*)(tokens + 16 * token_unit(8 * n + lane / 4, 4 * chunk + lane % 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float part[4] = {};
                float (&sums)[4] = FP8 ? part : acc[i][n];
                mma_bf16(sums, a[i][0], b.x, b.y);
                mma_bf16(sums, a[i][1], b.z, b.w);
                if (FP8)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        acc[i][n][e] = fmaf(e < 2 ? scales.of[i].x : scales.of[i].y, part[e], acc[i][n][e]);
            }
        }
    }
}

/* The whole of it; the sink as in prefill.cuh. Weights are asked for before the kernel ahead has ended. */
template <class Sink>
__device__ __forceinline__ void prefill(const Product& p, const Sink& sink) {
    extern __shared__ __align__(128) char dynamic[];  // STAGES stages, then the finished tile in their place
    constexpr int STAGE = WEIGHT_BYTES + TOKEN_BYTES;
    const int steps = (p.cols + STAGE_K - 1) / STAGE_K;
    float acc[4][8][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < steps) load_weights(p, dynamic + s * STAGE, s);
    griddep_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_tokens(p, dynamic + s * STAGE, s);
        cp_async_commit();
    }
    int reading = 0, filling = STAGES - 1;
    for (int step = 0; step < steps; ++step) {
        Scales scales;
        if (FP8) scales.load(p, step);
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for all, and the one before has been read by all
        int later = step + STAGES - 1;
        if (later < steps) {
            load_weights(p, dynamic + filling * STAGE, later);
            load_tokens(p, dynamic + filling * STAGE, later);
        }
        cp_async_commit();
        multiply(acc, dynamic + reading * STAGE, scales);
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        filling = filling + 1 == STAGES ? 0 : filling + 1;
    }
    griddep_launch();
    cp_async_wait<0>();
    __syncthreads();
    float* tile = (float*)dynamic;
    const int lane = opaque(lane_index()), warp = opaque(warp_index());
    const int down = warp % WARPS_DOWN, across = warp / WARPS_DOWN;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int token = across * 64 + 8 * n + 2 * (lane % 4) + e % 2;
                tile[token * PITCH + down * 64 + 16 * i + lane / 4 + e / 2 * 8] = acc[i][n][e];
            }
    __syncthreads();
    write_tile(sink, tile, p.first_token, min(TOKENS, p.rows - p.first_token), THREADS / 32);
}
