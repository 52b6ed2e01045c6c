/* How a row of attend_fast.cu ends: its sums are divided, a sink among them, and pieces of it become one. */
#pragma once
#include "attend_pieces.cuh"
#include "neighbours.cuh"

/* One over l, the sum of p of all keys of a tile row, whose largest score is m. A sink is in the sum as a key
 * without a value is, and in the maximum: then times what brings sums of p v to the new one. */
__device__ __forceinline__ float one_over(float l, float m, int tile_row) {
    if constexpr (!SINKS) return __frcp_rn(l);
    const float sink = *sink_at(tile_row), top = fmaxf(m, sink), keep = exp2_fast(__fsub_rn(m, top));
    return __fmul_rn(keep, __frcp_rn(__fmaf_rn(l, keep, exp2_fast(__fsub_rn(sink, top)))));
}

/* A sum of p v divided by that of p. Minus zero becomes zero: whether keys that a row does not see lay in its
 * tile must not show. */
__device__ __forceinline__ u32 divided(float x, float y, float r) {
    return pack_bf16(__fadd_rn(__fmul_rn(x, r), 0.f), __fadd_rn(__fmul_rn(y, r), 0.f));
}

/* The piece of a unit in the workspace: o [ROWS][HEAD], then m and l [ROWS]. */
constexpr int PIECE = ROWS * (HEAD + 2);
__device__ __forceinline__ float* piece_at(float* work, int index) {
    return work + COUNTERS + (size_t)index * PIECE;
}

__device__ __forceinline__ float2* stats_at(float* piece, int tile_row) {
    return (float2*)(piece + ROWS * HEAD) + tile_row;
}

/* How a piece joins those before it: the largest score of all, and what their sums and its own are times. */
struct Weights {
    float top, before, own;
};

__device__ __forceinline__ Weights weights_of(float before, float own) {
    const float top = fmaxf(before, own);
    return {top, exp2_fast(__fsub_rn(before, top)), exp2_fast(__fsub_rn(own, top))};
}

/* Half e of `out`, of one unit, joins `all`, those before: what merge() does, in registers. */
__device__ __forceinline__ void join(Sums& all, float& all_m, float& all_l, const Sums& out, float m, float l,
                                     int e) {
    const Weights w = weights_of(all_m, m);
    all_m = w.top, all_l = __fmaf_rn(all_l, w.before, __fmul_rn(l, w.own));
#pragma unroll
    for (int n = 0; n < 8 * HALVES; ++n)
#pragma unroll
        for (int i = 2 * e; i < 2 * e + 2; ++i)
            all[n / 8][n % 8][i] =
                __fmaf_rn(out[n / 8][n % 8][i], w.own, __fmul_rn(all[n / 8][n % 8][i], w.before));
}

/* A tile row of `count` pieces, the first at `pieces`, by a warp: a lane has HEAD / 32 components of all
 * pieces, and a piece's m and l. They join one after the other, in order. */
__device__ __forceinline__ void merge(float* pieces, int count, int tile_row, bf16* o) {
    constexpr int OWN = HEAD / 32,
                  BATCH = OWN > 4 ? 80 / OWN : 20;  // pieces whose loads are under way together
    const int lane = thread_again() % 32;
    float m = NO_KEY, l = 0.f, sum[OWN] = {};
    for (int first = 0; first < count; first += BATCH, pieces += (size_t)BATCH * PIECE) {
        const int here = min(BATCH, count - first);
        const float* const at = pieces + tile_row * HEAD + OWN * lane;
        Neighbours<float, OWN> part[BATCH] = {};  // zeros change nothing, and a branch for each would wait
        float2 stat = __ldcg(stats_at(pieces + (size_t)min(lane, here - 1) * PIECE, tile_row));
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (j < here) part[j].load_l2(at + j * PIECE);
        if (lane >= here) stat = make_float2(NO_KEY, 0.f);
        float top = fmaxf(m, stat.x);  // of the pieces up to the lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(FULL_WARP, top, step);
            if (lane >= step) top = fmaxf(top, other);
        }
        float before = __shfl_up_sync(FULL_WARP, top, 1);
        if (lane == 0) before = m;
        const Weights w = weights_of(before, stat.x);
        const float share = __fmul_rn(stat.y, w.own);
        m = __shfl_sync(FULL_WARP, top, 31);
        float keep[BATCH], own[BATCH], more[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            keep[j] = __shfl_sync(FULL_WARP, w.before, j), own[j] = __shfl_sync(FULL_WARP, w.own, j);
            more[j] = __shfl_sync(FULL_WARP, share, j);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            l = __fmaf_rn(l, keep[j], more[j]);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                sum[i] = __fmaf_rn(part[j].v[i], own[j], __fmul_rn(sum[i], keep[j]));
        }
    }
    const float r = one_over(l, m, tile_row);
#pragma unroll
    for (int i = 0; i < OWN; i += 2) *(u32*)(o + OWN * lane + i) = divided(sum[i], sum[i + 1], r);
}
