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

/* Pieces of a tile row: more than one must be joined. */
__device__ __forceinline__ int pieces_to_join(const Row* rows, int group, int tile_row) {
    const int at = tile_row_of(tile_row).at;
    return at < group ? rows[at].pieces : 0;
}

/* Where the pieces of a tile row meet in its owner's shared memory: block tile_row % OWNERS. */
__device__ __forceinline__ float* box_of(int tile_row, int units) {
    return (float*)(shared + INBOX_AT) + tile_row / OWNERS * units * BOX;
}

/* Of all pieces of the rows that a block of a cluster owns. */
__device__ __forceinline__ u32 bytes_to_come(const Row* rows, int group, int owner) {
    u32 pieces = 0;
    for (int tile_row = owner; tile_row < ROWS; tile_row += OWNERS)
        if (const int count = pieces_to_join(rows, group, tile_row); count > 1) pieces += count;
    return pieces * (HEAD + 2) * 4;
}

/* Half e of `out` to the owner of its tile row, as piece `own`. By the four lanes that have it. */
__device__ __forceinline__ void send(const Sums& out, float m, float l, int e, int tile_row, int own,
                                     int units, u64* arrived) {
    const int owner = tile_row % OWNERS, part = thread_again() % 4;
    const u32 to = cluster_address(box_of(tile_row, units) + own * BOX, owner),
              there = cluster_address(arrived, owner);
#pragma unroll
    for (int n = 0; n < 8 * HALVES; ++n)
        store_async(to + 4 * (8 * n + 2 * part),
                    make_float2(out[n / 8][n % 8][2 * e], out[n / 8][n % 8][2 * e + 1]), there);
    if (part == 0) store_async(to + 4 * HEAD, make_float2(m, l), there);
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

/* A tile row of `count` pieces, by a warp: a lane has HEAD / 32 components of all pieces, and a piece's m and
 * l. They join one after the other, in order. sums, stats: the first piece's, in the workspace or, of a
 * cluster, in shared memory. */
__device__ __forceinline__ void merge(const float* sums, const float2* stats, int count, int tile_row,
                                      bf16* o) {
    constexpr int STRIDE = CLUSTER ? BOX : PIECE;  // floats from a piece to the next
    constexpr int OWN = HEAD / 32,
                  BATCH = OWN > 4 ? 80 / OWN : 20;  // pieces whose loads are under way together
    const int lane = thread_again() % 32;
    float m = NO_KEY, l = 0.f, sum[OWN] = {};
    for (int first = 0; first < count; first += BATCH) {
        const int here = min(BATCH, count - first);
        const float* const at = sums + (size_t)first * STRIDE + OWN * lane;
        const float2* const own_stat = stats + (size_t)(first + min(lane, here - 1)) * (STRIDE / 2);
        Neighbours<float, OWN> part[BATCH] = {};  // zeros change nothing, and a branch for each would wait
        float2 stat = CLUSTER ? *own_stat : __ldcg(own_stat);
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (j < here) {
                if (CLUSTER)
                    part[j].template load<true>(at + j * STRIDE, OWN);
                else
                    part[j].load_l2(at + j * STRIDE);
            }
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
