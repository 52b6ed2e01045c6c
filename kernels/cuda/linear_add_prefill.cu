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

    struct Met {
        Neighbours<bf16, PER> x;
        int row;
    };

    __device__ __forceinline__ bool is_whole() const {
        return outputs - first >= OUTPUTS && is_aligned<PER>(x + first, outputs) &&
               (!taps || is_aligned<PER>(taps + tap_at + first, tap_cols));
    }

    template <bool WHOLE>
    __device__ __forceinline__ Met read(int token) const {
        const int n = first + PER * lane_index();
        Met met;
        met.x.template load<WHOLE>(x + (size_t)token * outputs + n, outputs - n);
        met.row = taps ? tap_row[token] : -1;
        return met;
    }

    template <bool WHOLE>
    __device__ __forceinline__ void write(int token, Met met, const float* sums) const {
        const int n = first + PER * lane_index();
        const auto mine = *(const Neighbours<float, PER>*)(sums + n - first);
        Neighbours<float, PER> more{};
        if (bias) more.template load<false>(bias + n, outputs - n);
#pragma unroll
        for (int i = 0; i < PER; ++i) met.x.v[i] = to_bf16(to_f32(met.x.v[i]) + (mine.v[i] + more.v[i]));
        met.x.template store<WHOLE>(x + (size_t)token * outputs + n, outputs - n);
        if (met.row >= 0)
            met.x.template store<WHOLE>(taps + (size_t)met.row * tap_cols + tap_at + n, outputs - n);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_add_prefill(const u16* w, const bf16* a, const float* bias, const int* tap_row, bf16* x,
                       bf16* taps, int rows, int outputs, int cols, int tap_at, int tap_cols) {
    Product product(w, (outputs + 15) / 16, blockIdx.y, a, rows, cols);
    AddResidual sink{bias, tap_row, x, taps, outputs, (int)blockIdx.y * OUTPUTS, tap_at, tap_cols};
    prefill(product, sink);
}
