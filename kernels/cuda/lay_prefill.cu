/* lay_prefill: rows as prefill_wgmma.cuh wants its tokens, times the norm's weights, rounded to bf16, and
 *         1 / rms of each row, the scale of the sums; or just laid, where norm and scale are null.
 *         laid is [ceil(K/64)][rows, to a multiple of 8][64 k of 2 bytes], zeros past K. Of the 16-byte
 *         units of a row of 64 k, unit u lies at u ^ row % 8 (wgmma.cuh). In it every 32 k, as 4 x 4 words
 *         of two k, are transposed: the order in which packed weights meet k (pack.cu, skinny.cuh).
 * Grid:   a block a row, 128 threads; K is a multiple of 8.
 * Moves:  4*T*K bytes.
 * Truth:  oracle.py rmsnorm. */
#include "sm90.cuh"

constexpr int LAY_THREADS = 128, IN_FLIGHT = 2;  // units of a thread whose loads are under way together

/* 8 k of a row, times the norm's weights. */
__device__ __forceinline__ uint4 normed(uint4 x, const float4 (&norm)[2], float& sum) {
    return make_uint4(scale_pair(x.x, norm[0].x, norm[0].y, sum), scale_pair(x.y, norm[0].z, norm[0].w, sum),
                      scale_pair(x.z, norm[1].x, norm[1].y, sum), scale_pair(x.w, norm[1].z, norm[1].w, sum));
}

/* Four lanes hold a matrix of 4 x 4 words by rows; by columns afterwards. */
__device__ __forceinline__ uint4 transposed(uint4 v) {
    const int lane = lane_index();
    const bool odd = lane & 1, upper = lane & 2;
    u32 a = __shfl_xor_sync(FULL_WARP, odd ? v.x : v.y, 1),
        b = __shfl_xor_sync(FULL_WARP, odd ? v.z : v.w, 1);
    v = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    a = __shfl_xor_sync(FULL_WARP, upper ? v.x : v.z, 2),
    b = __shfl_xor_sync(FULL_WARP, upper ? v.y : v.w, 2);
    return upper ? make_uint4(a, b, v.z, v.w) : make_uint4(v.x, v.y, a, b);
}

extern "C" __global__ void __launch_bounds__(LAY_THREADS)
    lay_prefill(const bf16* x, const float* norm, float eps, bf16* laid, float* scale, int rows, int cols) {
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8, units = (cols + 63) / 64 * 8;
    const bf16* from = x + (size_t)row * cols;
    float sum = 0.f;
    for (int first = warp_index() * 32; first < units; first += IN_FLIGHT * LAY_THREADS) {
        uint4 v[IN_FLIGHT];
        float4 weights[IN_FLIGHT][2] = {};
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int k = 8 * (first + i * LAY_THREADS + lane_index());
            v[i] = k < cols ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0);
            if (norm && k < cols)
                weights[i][0] = *(const float4*)(norm + k), weights[i][1] = *(const float4*)(norm + k + 4);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int unit = first + i * LAY_THREADS + lane_index();
            if (norm) v[i] = normed(v[i], weights[i], sum);
            v[i] = transposed(v[i]);
            char* to = (char*)laid + ((size_t)(unit / 8) * padded + row) * 128;
            if (unit < units) *(uint4*)(to + 16 * ((unit ^ row) % 8)) = v[i];
        }
    }
    if (!scale) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) scale[row] = rsqrtf(sum / cols + eps);
}
