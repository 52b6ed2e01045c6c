/* lay_prefill: rows as prefill_wgmma.cuh wants its tokens, times the norm's weights, rounded to bf16, and
 *         1 / rms of each row, the scale of the sums; or just laid, where norm and scale are null.
 *         laid is [ceil(K/64)][rows, to a multiple of 8][64 k of 2 bytes], zeros past K. Of the 16-byte units
 * of a row of 64 k, unit u lies at u ^ row % 8 (wgmma.cuh). In it every 32 k, as 4 x 4 words of two k, are
 *         transposed: the order in which packed weights meet k (pack.cu, skinny.cuh).
 * Grid:   a block a row, 128 threads; K is a multiple of 8.
 * Moves:  4*T*K bytes.
 * Truth:  oracle.py rmsnorm. */
#include "sm90.cuh"

constexpr int UNIT_K = 32;

/* 8 k of a row, times the norm's weights. */
__device__ __forceinline__ uint4 normed(uint4 x, const float* norm, float& sum) {
    u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low = low_f32(word[i]), high = high_f32(word[i]);
        sum += low * low;
        sum += high * high;
        word[i] = pack_bf16(low * norm[2 * i], high * norm[2 * i + 1]);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

extern "C" __global__ void __launch_bounds__(128)
    lay_prefill(const bf16* x, const float* norm, float eps, bf16* laid, float* scale, int rows, int cols) {
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8;
    const bf16* from = x + (size_t)row * cols;
    float sum = 0.f;
    for (int unit = threadIdx.x; unit < (cols + 63) / 64 * 2; unit += 128) {
        uint4 v[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            int k = UNIT_K * unit + 8 * t;
            v[t] = k < cols ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0);
            if (norm && k < cols) v[t] = normed(v[t], norm + k, sum);
        }
        char* to = (char*)laid + ((size_t)(unit / 2) * padded + row) * 128;
        const int swizzle = row % 8, half = unit % 2 * 4;
        *(uint4*)(to + 16 * ((half + 0) ^ swizzle)) = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
        *(uint4*)(to + 16 * ((half + 1) ^ swizzle)) = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
        *(uint4*)(to + 16 * ((half + 2) ^ swizzle)) = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
        *(uint4*)(to + 16 * ((half + 3) ^ swizzle)) = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
    }
    if (!scale) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) scale[row] = rsqrtf(sum / cols + eps);
}
