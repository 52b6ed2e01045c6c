/* The token rows of the *_fast kernels: a block's slice of them goes to shared memory once.
 * The work is cut in units of 128 k of all rows, which warps take in turn. The first units are laid by the
 * streaming warps, which then start; where there are several finishing warps, they lay the rest meanwhile.
 * Eight lanes of a store cover two rows of a chunk: 128 bytes on end, no bank conflicts. */
#pragma once
#include "skinny_task.cuh"

constexpr int UNIT_CHUNKS = 4;
/* A finishing warp lays at most so many units while others stream; at 32 rows that takes a register too many.
 */
constexpr int LATE_UNITS = FINISHERS > 1 && TOKEN_TILES < 4 ? 4 : 0;

/* 8 activations from column k; zeros past the end. Aligned: 16 bytes at once. */
template <bool IS_ALIGNED>
__device__ __forceinline__ uint4 load_piece(const bf16* row, int k, int cols) {
    if (IS_ALIGNED) return k < cols ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = k + i < cols ? row[k + i].bits : 0;
    return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                      bits[6] | bits[7] << 16);
}

/* Eight of them. */
__device__ __forceinline__ uint4 scale_piece(uint4 v, const float (&scale)[8], float& sum) {
    return make_uint4(scale_pair(v.x, scale[0], scale[1], sum), scale_pair(v.y, scale[2], scale[3], sum),
                      scale_pair(v.z, scale[4], scale[5], sum), scale_pair(v.w, scale[6], scale[7], sum));
}

template <bool IS_ALIGNED>
__device__ __forceinline__ void load_scale(const float* norm, int k, int cols, float (&scale)[8]) {
    if (IS_ALIGNED && k < cols) {
        float4 a = *(const float4*)(norm + k), b = *(const float4*)(norm + k + 4);
        scale[0] = a.x, scale[1] = a.y, scale[2] = a.z, scale[3] = a.w;
        scale[4] = b.x, scale[5] = b.y, scale[6] = b.z, scale[7] = b.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = k + i < cols ? norm[k + i] : 0.f;
}

__device__ __forceinline__ int units_of(const Task& task) {
    return (task.end - task.begin + UNIT_CHUNKS - 1) / UNIT_CHUNKS;
}

/* Units that the streaming warps lay before they start. */
__device__ __forceinline__ int early_units(const Task& task) {
    int units = units_of(task), rounds = max(1, (units - LATE_UNITS * FINISHERS + WARPS - 1) / WARPS);
    return min(units, rounds * WARPS);
}

/* Count sums of a lane, each over the 16 lanes of its parity, lane bits 0, 1, 3, 4 in turn. While there are
 * several a lane gives half of them away and adds up the others: the same additions as butterflies of each,
 * with a quarter of the shuffles. Returns which one this lane has, whole. */
template <int Count>
__device__ __forceinline__ int add_up(float (&sum)[Count]) {
    static_assert(Count == 1 || Count == 4 || Count == 8);
    int own = 0, have = Count;
#pragma unroll
    for (int step = 1; step < 32; step *= step == 2 ? 4 : 2) {
        if (have == 1) {
            sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], step);
            continue;
        }
        have /= 2;
        const bool keeps_upper = lane_index() & step;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            if (i >= have) continue;
            const float given = keeps_upper ? sum[i] : sum[i + have],
                        kept = keeps_upper ? sum[i + have] : sum[i];
            sum[i] = kept + __shfl_xor_sync(FULL_WARP, given, step);
        }
        own += keeps_upper ? have : 0;
    }
    return own;
}

/* One unit by one warp: lane l has 8 k of the rows of parity l / 4 % 2. With a norm, tokens are multiplied by
 * its scale and rounded; unit_squares gets each row's sum of squares before that. */
template <bool IS_NORMED, bool IS_ALIGNED>
__device__ __forceinline__ void lay_unit(const Task& task, const bf16* x, const int* pick, const float* norm,
                                         int unit, unsigned char* tokens, float* unit_squares) {
    int lane = lane_index(), odd = lane / 4 % 2;
    int chunk = UNIT_CHUNKS * unit + lane / 8, k = 32 * (task.begin + chunk) + 8 * (lane % 4);
    bool is_chunk = chunk < task.end - task.begin;
    unsigned char* to = tokens + chunk * TOKEN_CHUNK + 64 * odd + 16 * (lane % 4);
    constexpr int LOADS = !IS_ALIGNED ? 1 : TOKEN_TILES == 2 ? 8 : 4;  // under way at once
    if (IS_ALIGNED && !IS_NORMED) {  // straight to shared memory: all are under way at once
        if (!is_chunk) return;
#pragma unroll 4
        for (int i = 0; i < MOST_ROWS / 2; ++i) {
            int row = 2 * i + odd;
            bool is_there = row < task.rows && k < task.cols;
            cp_async_16_or_zero(
                to + 128 * i, is_there ? x + (size_t)(pick ? pick[row] : row) * task.cols + k : x, is_there);
        }
        return;
    }
#pragma unroll(1)
    for (int first = 0; first < MOST_ROWS / 2; first += LOADS) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int row = 2 * (first + i) + odd;
            v[i] = make_uint4(0, 0, 0, 0);
            if (row < task.rows && is_chunk)
                v[i] = load_piece<IS_ALIGNED>(x + (size_t)(pick ? pick[row] : row) * task.cols, k, task.cols);
        }
        float scale[8];  // asked for after the tokens: it gets the registers of their addresses
        if (IS_NORMED && is_chunk) load_scale<IS_ALIGNED>(norm, k, task.cols, scale);
        constexpr int TOGETHER = TOKEN_TILES == 4 ? 1 : LOADS;  // at 32 rows registers are short
#pragma unroll
        for (int at = 0; at < LOADS; at += TOGETHER) {
            float sum[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                sum[i] = 0.f;
                if (!is_chunk) continue;
                if (IS_NORMED) v[at + i] = scale_piece(v[at + i], scale, sum[i]);
                *(uint4*)(to + 128 * (first + at + i)) = v[at + i];
            }
            if (!IS_NORMED) continue;
            const int own = add_up(sum);
            if (TOGETHER == 1 ? lane == 4 * odd : lane < 2 * TOGETHER)
                unit_squares[MOST_ROWS * unit + 2 * (first + at + own) + odd] = sum[0];
        }
    }
}

/* Units begin, + step ... < end, by one warp. pick: which rows of x, null: all. */
template <bool IS_NORMED>
__device__ __forceinline__ void lay_units(const Task& task, const bf16* x, const int* pick, const float* norm,
                                          int begin, int end, int step, unsigned char* tokens,
                                          float* unit_squares) {
    for (int unit = begin; unit < end; unit += step)
        if (task.cols % 8)
            lay_unit<IS_NORMED, false>(task, x, pick, norm, unit, tokens, unit_squares);
        else
            lay_unit<IS_NORMED, true>(task, x, pick, norm, unit, tokens, unit_squares);
    if (!IS_NORMED) cp_async_commit(), cp_async_wait<0>();
}

/* This slice's sums of squares, a lane a row, units in order: the same bits in all blocks of a slice. The
 * root scales the finished sums (RowScale). */
__device__ __forceinline__ float sum_squares(const Task& task, const float* unit_squares) {
    float sum = 0.f;
    if (lane_index() < MOST_ROWS)
        for (int unit = 0; unit < units_of(task); ++unit)
            sum += unit_squares[MOST_ROWS * unit + lane_index()];
    return sum;
}

__device__ __forceinline__ void keep_squares(const Task& task, float sum, float* squares) {
    if (lane_index() < MOST_ROWS) __stcg(squares + SQUARES * task.slice + lane_index(), sum);
    __syncwarp();
}
