/* experts_down_fast: x[t] += sum over k of share[t, k] * (W h[t, k] + bias) of its expert, in router order,
 *         rounded once; the new row also goes among the taps.
 * Grid:   experts.cuh. Each pair's products go to the workspace, [tile][pair][16] f32; the last run that
 *         comes to a tile adds up its rows, or, of many rows, experts_sum does: any number of blocks of 4
 *         warps.
 * Moves:  D*F numbers of each expert that has pairs, and 4*pairs*D bytes twice; bound by HBM, the latter in
 *         L2.
 * Bits:   a row adds up its own pairs, so who adds does not matter.
 * Truth:  oracle_moe.py experts_down. */
#include "experts.cuh"

#ifndef ADDS
#define ADDS 1  // 0: x becomes the sum, and an inactive row 0
#endif

/* What sums meet. */
struct Rows {
    const int *expert, *tap_row;
    bf16 *x, *taps;
    const float* work;
    int rows, used, outputs, tap_at, tap_cols;

    /* 16 outputs of 8 rows, by a warp: a lane four outputs of row t. All that it reads is asked for at once.
     */
    __device__ __forceinline__ void end(int tile, int t) const {
        const int n = 16 * tile + 4 * (lane_index() % 4), there = min(4, outputs - n);
        if (t >= rows || there <= 0) return;
        const float4* from = (const float4*)(work + ((size_t)tile * rows + t) * used * 16) + lane_index() % 4;
        bf16* to = x + (size_t)t * outputs + n;
        const int first = __ldcg(expert + (size_t)t * used), row = taps ? tap_row[t] : -1;
        bf16 old[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) old[i] = ADDS && i < there ? to[i] : bf16{0};
        float4 sum{};
#pragma unroll 8
        for (int k = 0; k < used; ++k) {
            const float4 part = __ldcg(from + 4 * k);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        if (ADDS && first < 0) return;
        if (!ADDS && first < 0) sum = float4{};  // what lies there is nobody's
        const float all[4] = {sum.x, sum.y, sum.z, sum.w};
        bf16* tap = taps + (size_t)max(row, 0) * tap_cols + tap_at + n;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= there) break;
            const bf16 y = to_bf16(to_f32(old[i]) + all[i]);
            to[i] = y;
            if (row >= 0) tap[i] = y;
        }
    }
};

struct KeepPairs {
    const Shape& shape;
    const Rows& rows;
    const float *bias, *share;
    u32* counters;
    float* work;
    const int* order;
    int runs;

    struct Ready {
        float low, high;
        int pair;  // of the run's row lane_index(), and its share
        float part;
    };

    __device__ __forceinline__ void begin() const {}

    __device__ __forceinline__ Ready prepare(const Run& run, int of_expert, int tile) const {
        const int n = 16 * tile + row_of();
        const float* mine = bias + (size_t)of_expert * rows.outputs + n;
        const int pair = lane_index() < run.count ? order[run.begin + lane_index()] : -1;
        return {bias && n < rows.outputs ? mine[0] : 0.f, bias && n + 8 < rows.outputs ? mine[8] : 0.f, pair,
                pair >= 0 ? __ldcg(share + pair) : 0.f};
    }

    __device__ __forceinline__ void operator()(const Run& run, int tile, const float2 (&v)[UNITS],
                                               const Ready& ready) const {
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (q > 1 && 8 * (q / 2) >= run.count) break;
            const int from = __shfl_sync(FULL_WARP, ready.pair, token_of(q));
            const float times = __shfl_sync(FULL_WARP, ready.part, token_of(q));
            if (from < 0) continue;
            float* to = work + ((size_t)tile * shape.pairs + from) * 16 + row_of();
            __stcg(to, times * (v[q].x + ready.low));
            __stcg(to + 8, times * (v[q].y + ready.high));
        }
        if (!counters || !warp_last_to_arrive(counters + tile, runs)) return;
        for (int t = lane_index() / 4; t < (rows.rows + 7) / 8 * 8; t += 8) rows.end(tile, t);
    }
};

/* Of few rows registers are left for a block of experts_sum, which then waits beside this one. */
constexpr int SUM_THREADS = 128, LEFT_THREADS = HOLDS_TOKENS ? SUM_THREADS : 0;

extern "C" __global__ void __launch_bounds__(EXPERTS_THREADS + LEFT_THREADS, 1)
    experts_down_fast(const u8* w, const bf16* h, const float* bias, const int* expert, const float* share,
                      const int* first, const int* order, const int* tap_row, bf16* x, bf16* taps,
                      u32* counters, float* work, int rows, int used, int experts_, int outputs, int cols,
                      int range, int span, int room, int tap_at, int tap_cols) {
    const Shape shape{experts_, (outputs + 15) / 16, cols, rows * used, range, span, room};
    const Rows ends{expert, tap_row, x, taps, work, rows, used, outputs, tap_at, tap_cols};
    KeepPairs sink{shape, ends, bias, share, counters, work, nullptr, 0};
    experts<true>(shape, w, Tokens{h, 1}, first, order, sink);
}

extern "C" __global__ void experts_sum(const int* expert, const int* tap_row, bf16* x, bf16* taps,
                                       const float* work, int rows, int used, int outputs, int tap_at,
                                       int tap_cols) {
    griddep_launch();
    griddep_wait();
    const Rows ends{expert, tap_row, x, taps, work, rows, used, outputs, tap_at, tap_cols};
    const int tiles = (outputs + 15) / 16, groups = (rows + 7) / 8, warps = blockDim.x / 32;
    for (int i = blockIdx.x * warps + warp_index(); i < tiles * groups; i += gridDim.x * warps)
        ends.end(i % tiles, i / tiles * 8 + lane_index() / 4);
}
