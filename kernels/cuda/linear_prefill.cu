/* linear_prefill: y = scale (x W^T) in f32, for kernels that finish rows: qkv.cu, inject.cu, norm.cu; or,
 *         where OUT is bf16, the row linear: y = x W^T + bias, rounded once.
 * norm_prefill: x times the norm's weights, rounded to bf16, and 1 / rms of each row, the scale above.
 * Grid:   prefill.cuh; norm_prefill a block a row, 256 threads.
 * Moves:  N*K*2 + T*K*2 bytes in, T*N*4 (T*N*2 of bf16) out; bound by tensor cores.
 * Truth:  oracle.py product, linear, rmsnorm; the root scales the finished sum, as in skinny.cuh. */
#include "prefill.cuh"

#ifndef OUT
#define OUT float
#endif

constexpr bool IS_ROUNDED = sizeof(OUT) == 2;  // sums in f32 get their bias later

struct Keep {
    OUT* y;
    const float *scale, *bias;
    int stride, first, count;  // outputs of this block: first .. first + count - 1 of y's `stride`

    __device__ __forceinline__ bool is_whole() const {
        return count >= OUTPUTS && is_aligned<PER>(y + first, stride);
    }

    template <bool>
    __device__ __forceinline__ float read(int token) const {
        return scale ? scale[token] : 1.f;
    }

    template <bool WHOLE>
    __device__ __forceinline__ void write(int token, float r, const float* sums) const {
        const int n = PER * lane_index();
        auto mine = *(const Neighbours<float, PER>*)(sums + n);
#pragma unroll
        for (int i = 0; i < PER; ++i) mine.v[i] *= r;
        if (IS_ROUNDED && bias) {
            Neighbours<float, PER> more;
            more.template load<false>(bias + first + n, count - n);
#pragma unroll
            for (int i = 0; i < PER; ++i) mine.v[i] += more.v[i];
        }
        Neighbours<OUT, PER> out;
#pragma unroll
        for (int i = 0; i < PER; ++i) out.v[i] = from_f32<OUT>(mine.v[i]);
        out.template store<WHOLE>(y + (size_t)token * stride + first + n, count - n);
    }
};

/* Two matrices side by side in y: w's outputs, then v's (v_outputs 0: none). scale: null, or of each row.
 * bias: null, or of the outputs where they are rounded. */
extern "C" __global__ void __launch_bounds__(THREADS)
    linear_prefill(const u16* w, const u16* v, const bf16* x, const float* scale, OUT* y, int rows, int cols,
                   int outputs, int v_outputs, const float* bias) {
    int groups = (outputs + OUTPUTS - 1) / OUTPUTS, group = blockIdx.y;
    bool is_first = group < groups;
    if (!is_first) group -= groups;
    int own = is_first ? outputs : v_outputs;
    Product product(is_first ? w : v, (own + 15) / 16, group, x, rows, cols);
    Keep sink{y,
              scale,
              bias,
              outputs + v_outputs,
              (is_first ? 0 : outputs) + group * OUTPUTS,
              own - group * OUTPUTS};
    prefill(product, sink);
}

extern "C" __global__ void __launch_bounds__(256)
    norm_prefill(const bf16* x, const float* norm, float eps, bf16* y, float* scale, int cols) {
    griddep_launch();
    griddep_wait();
    const u32* from = (const u32*)(x + (size_t)blockIdx.x * cols);
    u32* to = (u32*)(y + (size_t)blockIdx.x * cols);
    float sum = 0.f;
    for (int i = threadIdx.x; i < cols / 2; i += 256)
        to[i] = scale_pair(from[i], norm[2 * i], norm[2 * i + 1], sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) scale[blockIdx.x] = rsqrtf(sum / cols + eps);
}
