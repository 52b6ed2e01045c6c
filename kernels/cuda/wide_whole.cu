/* end_fuse, end_linear_add_normed: what fuse_fast and linear_add_normed_fast make of a row's sums, from those
 *         of all slices in f32 (wide_sums.cu): slices in order, the bias, the squares of
 * each tile of 16 outputs, the tiles' in the order of skinny_normed.cuh.
 * Grid:   a block a row, 256 threads; up to 8,192 outputs.
 * Moves:  T*N*4 bytes a slice from L2, and T*N*2 to 4 bytes.
 * Truth:  oracle.py fuse, linear_add. */
#include "normed_ends.cuh"
#include "tree.cuh"

constexpr int END_THREADS = 256, MOST_TILES = 512;

struct Row {
    const float *y, *bias;  // of its first slice
    int slice_stride, outputs;

    /* y and bias of output n. */
    __device__ __forceinline__ float sum(int n) const {
        float sum = y[n];
#pragma unroll
        for (int slice = 1; slice < TREE_SLICES; ++slice) sum += y[(size_t)slice * slice_stride + n];
        return sum + (bias ? bias[n] : 0.f);
    }
};

template <class End>
__device__ __forceinline__ void end_whole(const float* y, const float* bias, float eps, int outputs,
                                          End& end) {
    __shared__ float sums[16 * MOST_TILES], squares[MOST_TILES];
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.x, tiles = (outputs + 15) / 16, lane = lane_index();
    const Row mine{y + (size_t)row * outputs, bias, (int)gridDim.x * outputs, outputs};
    for (int first = 4 * warp_index(); first < tiles; first += END_THREADS / 8) {  // 8 lanes a tile
        const int tile = first + lane / 8, low = 16 * tile + lane % 8, high = low + 8;
        const float x = low < outputs ? mine.sum(low) : 0.f, z = high < outputs ? mine.sum(high) : 0.f;
        if (low < outputs) sums[low] = x;
        if (high < outputs) sums[high] = z;
        float of_tile = fmaf(x, x, z * z);
#pragma unroll
        for (int other = 1; other < 8; other *= 2) of_tile += __shfl_xor_sync(FULL_WARP, of_tile, other);
        if (lane % 8 == 0 && tile < tiles) squares[tile] = of_tile;
    }
    __syncthreads();
    float sum = 0.f;
#pragma unroll 4
    for (int tile = lane; tile < tiles; tile += 32) sum += squares[tile];
    const float r = rsqrtf(warp_sum(sum) / outputs + eps);
    for (int n = PER * threadIdx.x; n < outputs; n += PER * END_THREADS) {
        const int there = min(PER, outputs - n);
        end.prepare(row, n, there);
        float v[PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) v[i] = i < there ? sums[n + i] : 0.f;
        end(row, n, there, v, r);
    }
}

extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_fuse(const float* y, const float* norm, float eps, bf16* f, int outputs) {
    Fused end{norm, f, outputs, {}};
    end_whole(y, nullptr, eps, outputs, end);
}

extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_linear_add_normed(const float* y, const float* bias, const float* norm, float eps, const float* scale,
                          const int* tap_row, bf16* x, bf16* taps, int outputs, int tap_at, int tap_cols) {
    EndLayer end{norm, scale, tap_row, x, taps, outputs, tap_at, tap_cols, {}, {}, 1.f, -1};
    end_whole(y, bias, eps, outputs, end);
}
