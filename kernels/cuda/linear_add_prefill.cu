/* linear_add_prefill: x += a W^T + bias, rounded once; the new row also goes among the taps.
 * Grid:   prefill.cuh.
 * Moves:  N*K*2 + T*(K + 2*N)*2 bytes; bound by tensor cores.
 * Truth:  oracle.py linear_add. */
#include "prefill.cuh"

struct AddResidual {
    const float* bias;
    const int* tap_row;
    bf16 *x, *taps;
    int outputs, first, tap_at, tap_cols;

    __device__ __forceinline__ void operator()(int token, const float* sums) const {
        bf16* to = x + (size_t)token * outputs + first;
        int row = taps ? tap_row[token] : -1;
        bf16* tap = taps + (size_t)max(row, 0) * tap_cols + tap_at + first;
#pragma unroll
        for (int i = 0; i < OUTPUTS / 32; ++i) {
            int n = 32 * i + lane_index();
            if (first + n >= outputs) continue;
            bf16 sum = to_bf16(to_f32(to[n]) + (sums[n] + (bias ? bias[first + n] : 0.f)));
            to[n] = sum;
            if (row >= 0) tap[n] = sum;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_add_prefill(const u16* w, const bf16* a, const float* bias, const int* tap_row, bf16* x,
                       bf16* taps, int rows, int outputs, int cols, int tap_at, int tap_cols) {
    Product product(w, (outputs + 15) / 16, blockIdx.y, a, rows, cols);
    AddResidual sink{bias, tap_row, x, taps, outputs, (int)blockIdx.y * OUTPUTS, tap_at, tap_cols};
    prefill(product, sink);
}
