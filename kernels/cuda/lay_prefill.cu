/* lay_prefill: rows as prefill_wgmma.cuh wants its tokens, times the norm's weights, rounded to bf16, and
 *         1 / rms of each row, the scale of the sums; or just laid, where norm and scale are null.
 *         laid is [ceil(K/64)][rows, to a multiple of 8][64 k of 2 bytes], zeros past K. Of the 16-byte
 *         units of a row of 64 k, unit u lies at u ^ row % 8 (wgmma.cuh). In it every 32 k, as 4 x 4 words
 *         of two k, are transposed: the order in which packed weights meet k (pack.cu, skinny.cuh).
 * Grid:   a block a row, 128 threads; K is a multiple of 8.
 * Moves:  4*T*K bytes.
 * Truth:  oracle.py rmsnorm. */
#include "lay.cuh"

constexpr int LAY_THREADS = 128, IN_FLIGHT = 2;  // units of a thread whose loads are under way together

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
            if (unit < units) *laid_unit(laid, padded, row, unit) = v[i];
        }
    }
    if (!scale) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) scale[row] = rsqrtf(sum / cols + eps);
}
