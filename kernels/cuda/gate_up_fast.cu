/* gate_up_fast: h = act(Wg n(x)) * (Wu n(x)), rounded once. A packed tile holds 8 gate rows and the 8 up
 *         rows that go with them, so both numbers of an output are in one thread.
 * Grid:   skinny.cuh; the slice that comes last to a tile finishes it.
 * Moves:  2*F*D*2 bytes; bound by HBM.
 * Truth:  oracle.py gate_up; here x times the norm's scale, if there is one, is rounded to bf16 before the
 *         product. */
#include "activate.cuh"
#include "skinny.cuh"

#ifndef ACT
#define ACT SILU
#endif

struct Gated {
    const Task& task;
    RowScale& scale;
    bf16* h;
    u32* counters;
    float* work;
    float eps;
    int ffn;
    bool has_scale;

    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void end() const {}
    __device__ __forceinline__ void use_squares(float sum) {
        scale.make(task, sum, eps);
        has_scale = true;
    }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        if (!merge(task, work, counters, tile, v)) return;
        if (NORMED && !has_scale) scale.gather(task, work, eps);
        has_scale = true;
        int f = 8 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            int token = token_of(q);
            if (token >= task.rows || f >= ffn) continue;
            const float r = NORMED ? scale.of[token] : 1.f;
            float gate = v[q].x * r, up = v[q].y * r;
            h[(size_t)token * ffn + f] = to_bf16(activate(ACT, gate, up, 0.f, 0.f));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gate_up_fast(const u16* w, const bf16* x, const float* norm, bf16* h, u32* counters, float* work,
                 float eps, int rows, int ffn, int cols, int slices) {
    __shared__ RowScale scales[FINISHERS];
    int tiles = (ffn + 7) / 8;
    Task task = make_task(rows, cols, tiles, slices);
    Gated sink{task, own_scale(scales), h, counters, work, eps, ffn, false};
    skinny<NORMED>(task, Weights{cols, w}, x, nullptr, norm, work, sink);
}
