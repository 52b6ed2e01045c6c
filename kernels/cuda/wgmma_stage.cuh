/* Stages of tokens and packed weights in wgmma's order: a ring of them that one warpgroup fills and the
 * others read, and the product of half a stage, by wgmma or, without WGMMA, by mma.sync, with the same bits.
 * What prefill_wgmma.cuh and wide.cuh share. */
#pragma once
#include "fp8.cuh"
#include "stage.cuh"
#ifdef WGMMA
#include "wgmma.cuh"
#endif

constexpr int CONSUMERS = 2 * OUTPUTS;  // threads, the first of a block: those that compute
constexpr int COLUMN_BYTES = 2 * STAGE_K;
constexpr int TILE_BYTES = 2 * CHUNK_BYTES;  // of a row tile of weights
constexpr int TOKEN_BYTES = TOKENS * COLUMN_BYTES, STAGE = TOKEN_BYTES + WEIGHT_TILES * TILE_BYTES;

/* bytes: of the stages, behind which barriers lie. */
struct Ring {
    char* stages;  // [tokens][weights]: columns want an alignment of 1024
    u64 *full, *empty;

    __device__ __forceinline__ Ring(char* shared, int bytes)
        : stages(kept_shared(shared)), full((u64*)(stages + bytes)), empty(full + STAGES) {}

    /* By thread 0, before a barrier of the block. fillers: warps that copy. emptiers: who gives back. */
    __device__ __forceinline__ void open(int fillers = 1, int emptiers = CONSUMERS) const {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(&full[s], fillers), mbarrier_init(&empty[s], emptiers);
        mbarrier_fence_init();
    }
};

/* The weights of half a stage in registers, and their products, a group of their own. */
struct Half {
    uint4 a[2];

    __device__ __forceinline__ void load(const char* stage, int half) {
        const char* from =
            stage + TOKEN_BYTES + warp_index() * TILE_BYTES + CHUNK_BYTES * half + 16 * lane_index();
        if constexpr (FP8)
            widen_chunk(a, *(const uint4*)from);
        else
            a[0] = *(const uint4*)from, a[1] = *(const uint4*)(from + 512);
    }

    /* Upon acc, or instead of what there is. */
    __device__ __forceinline__ void multiply(float (&acc)[TOKENS / 2], const char* stage, int half,
                                             bool is_upon = true) const {
#ifdef WGMMA
        const u64 tokens = wgmma_columns(stage) | 4 * half;  // in 16 bytes, of 1024
        wgmma_fence();
        wgmma(acc, a[0], tokens, is_upon);
        wgmma(acc, a[1], tokens | 2);
        wgmma_commit();
#else
        const int row = lane_index() % 8,
                  unit = 4 * half + lane_index() / 8;  // of a matrix of 8 tokens x 8 k
        const char* tokens = stage + row * COLUMN_BYTES + 16 * (unit ^ row);
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
            const uint4 b = ldmatrix_x4(tokens + 8 * n * COLUMN_BYTES);
            float (&d)[4] = *(float (*)[4])(acc + 4 * n);
            if (!is_upon) d[0] = d[1] = d[2] = d[3] = 0.f;
            mma_bf16(d, a[0], b.x, b.y);
            mma_bf16(d, a[1], b.z, b.w);
        }
#endif
    }
};

/* Until no half is under way, and what is between sums and products. */
#ifdef WGMMA
__device__ __forceinline__ void halves_wait() { wgmma_wait<0>(); }
template <int Count>
__device__ __forceinline__ void halves_pin(float (&d)[Count]) {
    wgmma_pin(d);
}
#else
__device__ __forceinline__ void halves_wait() {}
template <int Count>
__device__ __forceinline__ void halves_pin(float (&)[Count]) {}
#endif

/* Every lane arrives, for the weights that it read itself (skinny_finish.cuh). */
__device__ __forceinline__ void give_back(const Ring& ring, int slot) { mbarrier_arrive(&ring.empty[slot]); }
