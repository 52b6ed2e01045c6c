/* gate_up_prefill: h = silu(Wg n(x)) * (Wu n(x)), rounded once. A packed tile holds 8 gate rows and the 8
 *         up rows that go with them.
 * Grid:   prefill.cuh.
 * Moves:  2*F*D*2 + T*(D + F)*2 bytes; bound by tensor cores.
 * Truth:  oracle.py gate_up; x comes times the norm's weights, rounded to bf16, its root scales the sums. */
#include "prefill.cuh"

struct Swiglu {
    const float* scale;
    bf16* h;
    int ffn, first;

    __device__ __forceinline__ void operator()(int token, const float* sums) const {
        float r = scale[token];
        bf16* to = h + (size_t)token * ffn + first;
        for (int f = lane_index(); f < OUTPUTS / 2 && first + f < ffn; f += 32) {
            float gate = sums[f / 8 * 16 + f % 8] * r, up = sums[f / 8 * 16 + 8 + f % 8] * r;
            to[f] = to_bf16(gate / (1.f + expf(-gate)) * up);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_up_prefill(const u16* w, const bf16* x, const float* scale, bf16* h, int rows, int ffn, int cols) {
    Product product(w, (ffn + 7) / 8, blockIdx.y, x, rows, cols);
    prefill(product, Swiglu{scale, h, ffn, (int)blockIdx.y * OUTPUTS / 2});
}
