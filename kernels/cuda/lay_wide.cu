/* lay_wide: rows as wide.cuh wants its tokens, K in the order of tree.cuh's walk, times the norm's weights,
 *         rounded to bf16, and what the row's root is made of; or just laid, where norm is null.
 *         laid is lay_prefill.cu's, with the walk's steps.
 * Grid:   (rows, parts of a row), one part where there is a norm, 128 threads: four lanes a warp of the
 *         skinny kernel, with its lanes' 8 k each, so that a row's squares are added up as there.
 *         K is a multiple of 8.
 * Moves:  4*T*K bytes.
 * Truth:  oracle.py rmsnorm. */
#include "lay.cuh"
#include "tree.cuh"

constexpr int LAY_THREADS = 128, IN_FLIGHT = 4;  // chunks of a thread whose loads are under way together

/* pick: which rows of x, null: all. squares: (slices, rows); scale: (rows), 1 / rms. */
extern "C" __global__ void __launch_bounds__(LAY_THREADS)
    lay_wide(const bf16* x, const int* pick, const float* norm, float eps, bf16* laid, float* squares,
             float* scale, int rows, int cols) {
    __shared__ float4 sums[TREE_SLICES * TREE_WARPS];
    __shared__ float of_slices[TREE_SLICES];
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8, quad = threadIdx.x % 4;
    const bf16* from = x + (size_t)(pick ? pick[row] : row) * cols;
    for (int first = threadIdx.x / 4; first / 8 * 8 < TREE_SLICES * TREE_WARPS; first += LAY_THREADS / 4) {
        const int item = min(first, TREE_SLICES * TREE_WARPS - 1), warp = item % TREE_WARPS;
        const Walk walk(cols, item / TREE_WARPS);
        const int count = item == first ? walk.own(warp) : 0;
        const int most = (cols + 31) / 32 / TREE_SLICES + 1;  // chunks of a slice at most
        float sum = 0.f;
        for (int begin = blockIdx.y * IN_FLIGHT; begin * TREE_WARPS < most;  // the same for all lanes
             begin += gridDim.y * IN_FLIGHT) {
            uint4 v[IN_FLIGHT];
            float4 weights[IN_FLIGHT][2] = {};
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int k = 32 * (walk.begin + warp + (begin + i) * TREE_WARPS) + 8 * quad;
                const bool is_there = begin + i < count && k < cols;
                v[i] = is_there ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0);
                if (norm && is_there)
                    weights[i][0] = *(const float4*)(norm + k),
                    weights[i][1] = *(const float4*)(norm + k + 4);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                if (norm) v[i] = normed(v[i], weights[i], sum);
                v[i] = transposed(v[i]);
                const int unit = 8 * walk.first(warp) + 4 * (begin + i) + quad;
                if (begin + i < count) *laid_unit(laid, padded, row, unit) = v[i];
            }
        }
        if (item == first) ((float*)&sums[item])[quad] = sum;
    }
    if (!norm) return;
    __syncthreads();
    for (int slice = threadIdx.x; slice < TREE_SLICES; slice += LAY_THREADS) {
        float4 sum{};
        for (int warp = 0; warp < TREE_WARPS; ++warp) {
            const float4 part = sums[slice * TREE_WARPS + warp];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        of_slices[slice] = squares[slice * rows + row] = (sum.x + sum.y) + (sum.z + sum.w);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float sum = of_slices[0];
    for (int slice = 1; slice < TREE_SLICES; ++slice) sum += of_slices[slice];
    scale[row] = rsqrtf(sum / cols + eps);
}
