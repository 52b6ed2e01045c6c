/* lay_wide, lay_wide_normed: rows as wide.cuh wants its tokens, K in the order of tree.cuh's walk; normed:
 *         times the norm's weights, rounded to bf16, and what the row's root is made of.
 *         laid is lay_prefill.cu's, with the walk's steps.
 * Grid:   (rows, pieces of 32 chunks), four lanes a chunk, 128 threads; normed: a block a row (lay_rows.cuh).
 *         K is a multiple of 8.
 * Moves:  4*T*K bytes; bound by the way to L2 and back, so all loads of a lane are under way together.
 * Truth:  oracle.py rmsnorm. */
#include "lay_rows.cuh"

constexpr int FLAT_THREADS = 128, FLAT_CHUNKS = FLAT_THREADS / 4;

/* pick: which rows of x, null: all. */
__device__ __forceinline__ const bf16* picked(const bf16* x, const int* pick, int row, int cols) {
    return x + (size_t)(pick ? pick[row] : row) * cols;
}

extern "C" __global__ void __launch_bounds__(FLAT_THREADS)
    lay_wide(const bf16* x, const int* pick, bf16* laid, int rows, int cols) {
    griddep_launch();
    const int row = blockIdx.x, padded = (rows + 7) / 8 * 8, quad = threadIdx.x % 4;
    const int chunk = blockIdx.y * FLAT_CHUNKS + threadIdx.x / 4, k = 32 * chunk + 8 * quad;
    const int place = Walk::place(chunk, quad, cols);
    griddep_wait();
    const bf16* from = picked(x, pick, row, cols);
    const uint4 v = transposed(k < cols ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0));
    if (32 * chunk < cols) *laid_unit(laid, padded, row, place) = v;
}

/* squares: (slices, rows); scale: (rows), 1 / rms. */
extern "C" __global__ void __launch_bounds__(LAY_THREADS)
    lay_wide_normed(const bf16* x, const int* pick, const float* norm, float eps, bf16* laid, float* squares,
                    float* scale, int rows, int cols) {
    extern __shared__ __align__(16) bf16 shared_row[];
    griddep_launch();
    const NormWeights weights(norm, cols);
    griddep_wait();
    const bf16* from = picked(x, pick, blockIdx.x, cols);
#pragma unroll 4
    for (int k = 8 * threadIdx.x; k < cols; k += 8 * LAY_THREADS)
        *(uint4*)(shared_row + k) = *(const uint4*)(from + k);
    lay_row(LaidRows{norm, eps, laid, squares, scale, rows, cols}, blockIdx.x, shared_row, weights);
}
