/* The token rows of the *_fast kernels. A lane of a streaming warp brings to shared memory exactly the
 * 16-byte pieces that it multiplies in every tile (skinny.cuh), so nobody waits for anybody else's: the first
 * ones are used while the others are under way. With a norm, a piece is multiplied by its scale, and
 * rounded, where it lies, just before the first tile uses it; the row's squares are added up then. */
#pragma once
#include "skinny_task.cuh"

/* Chunks of this warp in a tile. */
__device__ __forceinline__ int own_chunks(const Task& task) {
    const int count = task.end - task.begin, spans = (count + SPAN - 1) / SPAN;
    const int own = (spans - warp_index() + WARPS - 1) / WARPS;
    const bool has_last = SPAN > 1 && own > 0 && (own - 1) * WARPS + (int)warp_index() == spans - 1;
    return own * SPAN - (has_last ? spans * SPAN - count : 0);
}

/* 8 activations, of which `count` are there; zeros for the others. */
__device__ __forceinline__ uint4 load_piece(const bf16* from, int count) {
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = i < count ? from[i].bits : 0;
    return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                      bits[6] | bits[7] << 16);
}

/* Eight of them, in order. */
__device__ __forceinline__ uint4 scale_piece(uint4 v, const float (&scale)[8], float& sum) {
    v.x = scale_pair(v.x, scale[0], scale[1], sum);
    v.y = scale_pair(v.y, scale[2], scale[3], sum);
    v.z = scale_pair(v.z, scale[4], scale[5], sum);
    v.w = scale_pair(v.w, scale[6], scale[7], sum);
    return v;
}

/* Behind the tokens lie the norm's scales, [chunk][32], and squares, [WARPS][TOKEN_TILES][32]. */
__device__ __forceinline__ float* scales_of(const Task& task, unsigned char* tokens) {
    return (float*)(tokens + (opaque(task.end) - task.begin) * TOKEN_CHUNK);
}

__device__ __forceinline__ float* squares_of(const Task& task, unsigned char* tokens) {
    return scales_of(task, tokens) + (opaque(task.end) - task.begin) * 32;
}

/* Scales of this warp's chunks. Nobody writes them: they need not wait for the kernel ahead. */
__device__ __forceinline__ void bring_scales(const Task& task, const float* norm, unsigned char* tokens) {
    const int lane = lane_index();
    for (int own = lane / 8; own < own_chunks(task); own += 4) {
        const int chunk = SPAN * warp_index() + chunk_at(own), k = 32 * (task.begin + chunk) + 4 * (lane % 8);
        float* to = scales_of(task, tokens) + 32 * chunk + 4 * (lane % 8);
        if (task.cols % 4 == 0)
            cp_async_16_or_zero(to, k < task.cols ? norm + k : norm, k < task.cols);
        else
            for (int i = 0; i < 4; ++i) to[i] = k + i < task.cols ? norm[k + i] : 0.f;
    }
}

constexpr int FIRST_CHUNKS = CHUNKS * AHEAD;  // of a warp: those whose weights are under way at the start

/* f(i, k) for this warp's chunks from its `first`th on: which of the slice's, and this lane's k of x. */
template <int AT_ONCE, class F>
__device__ __forceinline__ void each_chunk(const Task& task, int first, int end, const F& f) {
    int i = SPAN * warp_index() + chunk_at(first);
#pragma unroll(AT_ONCE)
    for (int own = first; own < end; ++own) {
        f(i, 32 * (task.begin + i) + 8 * (lane_index() % 4));
        i += SPAN == 1 ? WARPS : own % SPAN < SPAN - 1 ? 1 : SPAN * (WARPS - 1) + 1;
    }
}

/* This lane's pieces of this warp's chunks: row lane / 4 of every group of 8, 8 k. Those of the first
 * FIRST_CHUNKS, and the scales, are one group of copies, the others a second. pick: which rows of x, null:
 * all. Little code, and K that is no multiple of 8 has code of its own: no instruction of it is in a cache
 * when the kernel starts, and tokens wait for each that has to be fetched (bench/NOTES.md). */
__device__ __forceinline__ void bring_tokens(const Task& task, const bf16* x, const int* pick,
                                             unsigned char* tokens) {
    const int count = own_chunks(task);
#pragma unroll(1)
    for (int part = 0; part < 2; ++part) {
        const int first = part * FIRST_CHUNKS, end = part ? count : min(count, FIRST_CHUNKS);
#pragma unroll(1)
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const int row = 8 * n + lane_index() / 4;
            const bool is_row = row < task.rows;
            const bf16* from = x + (size_t)(pick && is_row ? pick[row] : row) * task.cols;
            unsigned char* to = tokens + 512 * n + 16 * lane_index();
            if (task.cols % 8 == 0)
                each_chunk<4>(task, first, end, [&](int i, int k) {
                    cp_async_16_or_zero(to + i * TOKEN_CHUNK, from + k, is_row && k < task.cols);
                });
            else
                each_chunk<1>(task, first, end, [&](int i, int k) {
                    *(uint4*)(to + i * TOKEN_CHUNK) = load_piece(from + k, is_row ? task.cols - k : 0);
                });
        }
        cp_async_commit();
    }
}

/* Of the first tile, this warp's chunks from its `first`th on, FIRST_CHUNKS of them: they are there, and
 * scaled. To squares_of goes each lane's sum over its own k, ascending. Addresses are made here, not kept
 * through the stream. */
template <bool IS_NORMED>
__device__ __forceinline__ void ready(const Task& task, int first, unsigned char* tokens) {
    if (first == 0)
        cp_async_wait<1>();
    else
        cp_async_wait<0>();
    if (!IS_NORMED) return;
    if (first == 0) __syncwarp();  // scales that other lanes brought
    const int thread = opaque(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int chunk = SPAN * warp + chunk_at(first), count = min(FIRST_CHUNKS, own_chunks(task) - first);
    unsigned char* own = tokens + chunk * TOKEN_CHUNK + 16 * lane;
    const float4* scales = (const float4*)(scales_of(task, tokens) + 32 * chunk) + 2 * (lane % 4);
    float* sums = squares_of(task, tokens) + warp * TOKEN_TILES * 32 + lane;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        float sum = first ? sums[32 * n] : 0.f;
#pragma unroll(4)  // each waits for shared memory
        for (int u = 0; u < count; ++u) {
            const float4 low = scales[8 * chunk_at(u)], high = scales[8 * chunk_at(u) + 1];
            const float scale[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            uint4* piece = (uint4*)(own + chunk_at(u) * TOKEN_CHUNK + 512 * n);
            *piece = scale_piece(*piece, scale, sum);
        }
        sums[32 * n] = sum;
    }
}

/* This slice's sums of squares, a lane a row: the four lanes of a row, warp after warp; the same bits in all
 * blocks of a slice. The root scales the finished sums (RowScale). */
__device__ __forceinline__ float sum_squares(const float* squares) {
    float4 sum{};
    if (lane_index() < MOST_ROWS)
#pragma unroll 4
        for (int warp = 0; warp < WARPS; ++warp) {
            const float4 part = ((const float4*)squares)[warp * MOST_ROWS + lane_index()];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

__device__ __forceinline__ void keep_squares(const Task& task, float sum, float* squares) {
    if (lane_index() < MOST_ROWS) __stcg(squares + SQUARES * task.slice + lane_index(), sum);
    __syncwarp();
}
