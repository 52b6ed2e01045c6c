/* gate_up_prefill: h = act(Wg n(x)) * (Wu n(x)), rounded once. A packed tile holds 8 gate rows and the 8
 *         up rows that go with them.
 * Grid:   prefill.cuh.
 * Moves:  2*F*D*2 + T*(D + F)*2 bytes; bound by tensor cores.
 * Truth:  oracle.py gate_up; x comes times the norm's weights, rounded to bf16, its root scales the sums;
 * scale is null where there is no norm. */
#include "activate.cuh"
#include "prefill.cuh"

#ifndef NORMED
#define NORMED 1  // 0: rows come as they are, without a scale
#endif
#ifndef ACT
#define ACT SILU
#endif

struct Gated {
    const float* scale;
    bf16* h;
    int ffn, first;

    __device__ __forceinline__ bool is_whole() const {
        return ffn - first >= OUTPUTS / 2 && is_aligned<2>(h + first, ffn);
    }

    template <bool>
    __device__ __forceinline__ float read(int token) const {
        return NORMED ? scale[token] : 1.f;
    }

    /* A lane has two neighbours. */
    template <bool WHOLE>
    __device__ __forceinline__ void write(int token, float r, const float* sums) const {
        const int f = 2 * lane_index();
        if (f >= OUTPUTS / 2) return;
        const float2 gate = *(const float2*)(sums + f / 8 * 16 + f % 8);
        const float2 up = *(const float2*)(sums + f / 8 * 16 + 8 + f % 8);
        auto gated = [r](float g, float u) {
            return g *= r, __fdividef(g, 1.f + __expf(-sigmoid_of(ACT, g))) * (u * r);
        };
        const Neighbours<bf16, 2> both{to_bf16(gated(gate.x, up.x)), to_bf16(gated(gate.y, up.y))};
        both.template store<WHOLE>(h + (size_t)token * ffn + first + f, ffn - first - f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_up_prefill(const u16* w, const bf16* x, const float* scale, bf16* h, int rows, int ffn, int cols) {
    Product product(w, (ffn + 7) / 8, blockIdx.y, x, rows, cols);
    prefill(product, Gated{scale, h, ffn, (int)blockIdx.y * OUTPUTS / 2});
}
