/* A row as wide.cuh wants its tokens, K in the order of tree.cuh's walk: times the norm's weights, and what
 * its root is made of. By a block a row; lay_wide.cu and wide_rows.cu share it. */
#pragma once
#include "lay.cuh"
#include "tree.cuh"

constexpr int LAY_THREADS = 256;

/* What is asked for before the wait: the norm's weights of a thread's first pieces of 8 k. */
struct NormWeights {
    static constexpr int KEPT = 2;  // rows of up to 4,096 numbers
    float4 of[KEPT][2];

    __device__ __forceinline__ NormWeights(const float* norm, int cols) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int k = 8 * (threadIdx.x + i * LAY_THREADS);
            of[i][0] = of[i][1] = float4{};
            if (k < cols) of[i][0] = *(const float4*)(norm + k), of[i][1] = *(const float4*)(norm + k + 4);
        }
    }
};

/* Eight activations' squares, in order. */
__device__ __forceinline__ void add_squares(const uint4& v, float& sum) {
    add_squares(v.x, sum), add_squares(v.y, sum), add_squares(v.z, sum), add_squares(v.w, sum);
}

/* Where rows go. squares: (slices, rows); scale: (rows), 1 / rms. */
struct LaidRows {
    const float* norm;
    float eps;
    bf16* laid;
    float *squares, *scale;
    int rows, cols;
};

/* By a block, row `row`, which lies in shared memory. Four lanes have the same 8 of 32 k in turn as a warp's
 * lanes of the skinny kernel, so that a row's squares are added up as there. */
__device__ __forceinline__ void lay_row(const LaidRows& to, int row, const bf16* from,
                                        const NormWeights& weights) {
    __shared__ float4 sums[TREE_SLICES * TREE_WARPS];
    __shared__ float of_slices[TREE_SLICES];
    const int padded = (to.rows + 7) / 8 * 8, quad = threadIdx.x % 4, pieces = (to.cols + 31) / 32 * 4;
    __syncthreads();  // the row is there
    auto piece_of = [&](int k) { return k < to.cols ? *(const uint4*)(from + k) : uint4{0, 0, 0, 0}; };
    auto lay = [&](int piece, const float4(&norm)[2]) {
        float unused = 0.f;
        const uint4 v = transposed(normed(piece_of(8 * piece), norm, unused));
        if (piece < pieces) *laid_unit(to.laid, padded, row, Walk::place(piece / 4, quad, to.cols)) = v;
    };
#pragma unroll
    for (int i = 0; i < NormWeights::KEPT; ++i) lay(threadIdx.x + i * LAY_THREADS, weights.of[i]);
    for (int first = NormWeights::KEPT * LAY_THREADS; first < pieces; first += LAY_THREADS) {
        const int piece = first + threadIdx.x, k = 8 * piece;
        float4 norm[2] = {};
        if (k < to.cols) norm[0] = *(const float4*)(to.norm + k), norm[1] = *(const float4*)(to.norm + k + 4);
        lay(piece, norm);
    }
    for (int item = threadIdx.x / 4; item < TREE_SLICES * TREE_WARPS; item += LAY_THREADS / 4) {
        const Walk walk(to.cols, item / TREE_WARPS);
        const int warp = item % TREE_WARPS, own = walk.own(warp);
        float sum = 0.f;
#pragma unroll 4
        for (int turn = 0; turn < own; ++turn)
            add_squares(piece_of(32 * walk.chunk(warp, turn) + 8 * quad), sum);
        ((float*)&sums[item])[quad] = sum;
    }
    __syncthreads();
    for (int slice = threadIdx.x; slice < TREE_SLICES; slice += LAY_THREADS) {
        float4 sum{};
#pragma unroll
        for (int warp = 0; warp < TREE_WARPS; ++warp) {
            const float4 part = sums[slice * TREE_WARPS + warp];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        of_slices[slice] = to.squares[slice * to.rows + row] = (sum.x + sum.y) + (sum.z + sum.w);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float sum = of_slices[0];
    for (int slice = 1; slice < TREE_SLICES; ++slice) sum += of_slices[slice];
    to.scale[row] = rsqrtf(sum / to.cols + to.eps);
}
