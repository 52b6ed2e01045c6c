/* head_fast: ids[pick[r]] = the smallest argmax of (W n(x[pick[r]]))[:limit]; -1 where one is not finite.
 * head_logits_fast: W n(x) itself, of all rows without pick, in f32: the same product, so that ids are its
 *         argmax bit for bit, and what sample draws from.
 * Grid:   skinny.cuh with one slice; ids as head_best.cuh says.
 * Moves:  V*D*2 bytes; bound by HBM.
 * Truth:  oracle.py head, head_logits; here x times the norm's scale is rounded to bf16 before the
 *         product. */
#include "head_best.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    head_fast(const u16* w, const bf16* x, const int* pick, const float* norm, int* ids, u32* counters,
              float* work, float eps, int rows, int outputs, int cols, int limit) {
    __shared__ RowScale scales[FINISHERS];
    choose<false>(own_scale(scales), w, x, pick, norm, ids, nullptr, counters, work, eps, rows, outputs, cols,
                  limit);
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
