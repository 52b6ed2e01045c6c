/* lay_wide, lay_wide_normed: rows as wide.cuh wants its tokens, K in the order of tree.cuh's walk; normed:
 *         times the norm's weights, rounded to bf16, and what the row's root is made of.
 *         laid is lay_prefill.cu's, with the walk's steps.
 * Grid:   (rows, pieces of 32 chunks), four lanes a chunk; normed: a block a row, four lanes a warp of the
 *         skinny kernel, with its lanes' 8 k each, so that a row's squares are added up as there. 128
 *         threads. K is a multiple of 8.
 * Moves:  4*T*K bytes; bound by the way to L2 and back, so all loads of a lane are under way together.
 * Truth:  oracle.py rmsnorm. */
#include "lay.cuh"
#include "tree.cuh"

#ifndef LAID_TOGETHER  // chunks of a lane of lay_wide_normed
#define LAID_TOGETHER 4
#endif

constexpr int LAY_THREADS = 128, LAY_CHUNKS = LAY_THREADS / 4;

/* pick: which rows of x, null: all. */
__device__ __forceinline__ const bf16* picked(const bf16* x, const int* pick, int row, int cols) {
    return x + (size_t)(pick ? pick[row] : row) * cols;
}

extern "C" __global__ void __launch_bounds__(LAY_THREADS)
    lay_wide(const bf16* x, const int* pick, bf16* laid, int rows, int cols) {
    griddep_launch();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8, quad = threadIdx.x % 4,
              chunks = (cols + 31) / 32;
    const int chunk = blockIdx.y * LAY_CHUNKS + threadIdx.x / 4, k = 32 * chunk + 8 * quad;
    int slice = 0;
    while (slice + 1 < TREE_SLICES && chunks * (slice + 1) / TREE_SLICES <= chunk) ++slice;
    const Walk walk(cols, slice);
    const int warp = (chunk - walk.begin) % TREE_WARPS, turn = (chunk - walk.begin) / TREE_WARPS;
    const int unit = 8 * walk.first(warp) + 4 * turn + quad;
    griddep_wait();
    const bf16* from = picked(x, pick, row, cols);
    const uint4 v = transposed(k < cols ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0));
    if (chunk < chunks) *laid_unit(laid, padded, row, unit) = v;
}

/* squares: (slices, rows); scale: (rows), 1 / rms. */
extern "C" __global__ void __launch_bounds__(LAY_THREADS)
    lay_wide_normed(const bf16* x, const int* pick, const float* norm, float eps, bf16* laid, float* squares,
                    float* scale, int rows, int cols) {
    __shared__ float4 sums[TREE_SLICES * TREE_WARPS];
    __shared__ float of_slices[TREE_SLICES];
    griddep_launch();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8, quad = threadIdx.x % 4;
    const int of_slice = ((cols + 31) / 32 + TREE_SLICES - 1) / TREE_SLICES;  // chunks at most
    const int most = (of_slice + TREE_WARPS - 1) / TREE_WARPS;                // of a warp
    for (int first = threadIdx.x / 4; first / 8 * 8 < TREE_SLICES * TREE_WARPS; first += LAY_CHUNKS) {
        const int item = min(first, TREE_SLICES * TREE_WARPS - 1), warp = item % TREE_WARPS;
        const Walk walk(cols, item / TREE_WARPS);
        const int count = item == first ? walk.own(warp) : 0;
        float sum = 0.f;
        for (int begin = 0; begin < most; begin += LAID_TOGETHER) {  // the same for all lanes
            uint4 v[LAID_TOGETHER];
            float4 weights[LAID_TOGETHER][2] = {};
            auto k_of = [&](int i) { return 32 * (walk.begin + warp + (begin + i) * TREE_WARPS) + 8 * quad; };
            auto is_there = [&](int i) { return begin + i < count && k_of(i) < cols; };
#pragma unroll
            for (int i = 0; i < LAID_TOGETHER; ++i)
                if (is_there(i))
                    weights[i][0] = *(const float4*)(norm + k_of(i)),
                    weights[i][1] = *(const float4*)(norm + k_of(i) + 4);
            griddep_wait();  // from the second time on for nothing
            const bf16* from = picked(x, pick, row, cols);
#pragma unroll
            for (int i = 0; i < LAID_TOGETHER; ++i)
                v[i] = is_there(i) ? *(const uint4*)(from + k_of(i)) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < LAID_TOGETHER; ++i) {
                v[i] = transposed(normed(v[i], weights[i], sum));
                const int unit = 8 * walk.first(warp) + 4 * (begin + i) + quad;
                if (begin + i < count) *laid_unit(laid, padded, row, unit) = v[i];
            }
        }
        if (item == first) ((float*)&sums[item])[quad] = sum;
    }
    __syncthreads();
    for (int slice = threadIdx.x; slice < TREE_SLICES; slice += LAY_THREADS) {
        float4 sum{};
#pragma unroll
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
