/* head_fast: ids[pick[r]] = the smallest argmax of (W n(x[pick[r]]))[:limit]; -1 where one is not finite.
 * head_logits_fast: W n(x) itself, of all rows without pick, in f32: the same product, so that ids are its
 *         argmax bit for bit, and what sample draws from.
 * Grid:   skinny.cuh with one slice. The head's logits never reach memory: each block keeps the best of its
 *         tiles, the last block compares the blocks.
 * Moves:  V*D*2 bytes; bound by HBM.
 * Truth:  oracle.py head, head_logits; here x times the norm's scale is rounded to bf16 before the
 *         product. */
#include "skinny.cuh"

struct KeepBest {
    const Task& task;
    RowScale& scale;
    float* work;
    float eps;
    int limit;
    Best best[UNITS];

    __device__ __forceinline__ void prepare(int) const {}

    __device__ __forceinline__ void use_squares(float sum) { scale.make(task, sum, eps); }

    /* Zero times a number adds nothing; times NaN or infinity it makes a NaN, which nothing beats. */
    __device__ __forceinline__ void look_at(int q, float value, int index) {
        best[q] = better(best[q], Best{value, index});
        best[q].value = fmaf(value, 0.f, best[q].value);
    }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        int n = 16 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            float r = scale.of[token_of(q)];
            if (n < limit) look_at(q, v[q].x * r, n);
            if (n + 8 < limit) look_at(q, v[q].y * r, n + 8);
        }
    }

    /* The best of this warp's tiles to [rows][finishing warps of all blocks]. Here, so that the streaming
     * warps need not carry them. */
    __device__ __forceinline__ void end() {
        int me = blockIdx.x * FINISHERS + warp_index() - WARPS, count = gridDim.x * FINISHERS;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (best[q].value != best[q].value) best[q] = Best{infinity(), -1};
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {  // the 8 lanes that hold this token
                Best other{__shfl_xor_sync(FULL_WARP, best[q].value, step),
                           __shfl_xor_sync(FULL_WARP, best[q].index, step)};
                best[q] = better(best[q], other);
            }
            if (row_of() == 0 && token_of(q) < task.rows)
                ((Best*)(work + SQUARES))[(size_t)token_of(q) * count + me] = best[q];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    head_fast(const u16* w, const bf16* x, const int* pick, const float* norm, int* ids, u32* counters,
              float* work, float eps, int rows, int outputs, int cols, int limit) {
    __shared__ RowScale scales[FINISHERS];
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, 1);
    KeepBest sink{task, own_scale(scales), work, eps, min(limit, outputs), {}};
#pragma unroll
    for (int q = 0; q < UNITS; ++q) sink.best[q] = Best{-infinity(), 0x7fffffff};
    skinny<true>(task, Weights{cols, w}, x, pick, norm, work, sink);
    if (!last_to_arrive(counters, gridDim.x)) return;
    const float2* bests = (const float2*)(work + SQUARES);
    int count = gridDim.x * FINISHERS;
    for (int row = warp_index(); row < rows; row += THREADS / 32) {
        Best best{-infinity(), 0x7fffffff};
#pragma unroll 8
        for (int i = lane_index(); i < count; i += 32) {
            float2 bits = __ldcg(bests + (size_t)row * count + i);
            best = better(best, Best{bits.x, __float_as_int(bits.y)});
        }
        best = warp_best(best);
        if (lane_index() == 0) ids[pick[row]] = best.index;
    }
}

struct KeepLogits {
    const Task& task;
    RowScale& scale;
    float* logits;
    float eps;
    int outputs;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ void use_squares(float sum) { scale.make(task, sum, eps); }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        int n = 16 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            int token = token_of(q);
            if (token >= task.rows) continue;
            float* to = logits + (size_t)token * outputs + n;
            if (n < outputs) to[0] = v[q].x * scale.of[token];
            if (n + 8 < outputs) to[8] = v[q].y * scale.of[token];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    head_logits_fast(const u16* w, const bf16* x, const int* pick, const float* norm, float* logits,
                     float* work, float eps, int rows, int outputs, int cols) {
    __shared__ RowScale scales[FINISHERS];
    int tiles = (outputs + 15) / 16;
    Task task = make_task(rows, cols, tiles, 1);
    KeepLogits sink{task, own_scale(scales), logits, eps, outputs};
    skinny<true>(task, Weights{cols, w}, x, pick, norm, work, sink);
}
