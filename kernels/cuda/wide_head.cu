/* wide_head: of each token and group of outputs the best logit, and (WITH_MARGIN) the second; head_ends: ids
 *         and margins out of them, what head_fast and head_margin_fast give, bit for bit.
 * Grid:   wide.cuh; head_ends a warp a row.
 * Moves:  V*D*2 bytes.
 * Truth:  oracle.py head. */
#include "best.cuh"
#include "wide_sinks.cuh"

#ifndef WITH_MARGIN
#define WITH_MARGIN 0
#endif

/* Of a token and a warp of the block. */
struct Candidates {
    Best best[TOKENS][CONSUMERS / 32];
    float second[WITH_MARGIN ? TOKENS : 1][CONSUMERS / 32];
};

/* bests: (rows, groups); seconds likewise. */
struct KeepTop {
    Candidates& shared;
    const float* scale;
    float2* bests;
    float* seconds;
    int rows, groups, limit;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const int n = unit.group * OUTPUTS + 16 * warp_index() + lane_index() / 4;
        const Scales scales(unit, rows, scale);
        named_barrier_sync(1, CONSUMERS);  // the unit before has been read
        each_column(sums, [&](int k, int column, float low, float high) {
            Top<WITH_MARGIN> top;
            if (n < limit) top.look_at(low * scales.of[k], n);
            if (n + 8 < limit) top.look_at(high * scales.of[k], n + 8);
            top.close();
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top.take_lane(step);  // the 8 lanes of this token
            if (lane_index() >= 4) return;
            shared.best[column][warp_index()] = top.best;
            if (WITH_MARGIN) shared.second[column][warp_index()] = top.second;
        });
        named_barrier_sync(1, CONSUMERS);
        for (int column = threadIdx.x; column < min(TOKENS, rows - unit.first_token); column += CONSUMERS) {
            Top<WITH_MARGIN> top;
#pragma unroll
            for (int warp = 0; warp < CONSUMERS / 32; ++warp)
                top.take(shared.best[column][warp], WITH_MARGIN ? shared.second[column][warp] : 0.f);
            const size_t to = (size_t)(unit.first_token + column) * groups + unit.group;
            bests[to] = make_float2(top.best.value, __int_as_float(top.best.index));
            if (WITH_MARGIN) seconds[to] = top.second;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide_head(const u16* w, const bf16* x, const float* scale, float2* bests, float* seconds, u32* counters,
              float* handed, int rows, int cols, int outputs, int limit) {
    __shared__ Candidates shared;
    const int groups = (outputs + OUTPUTS - 1) / OUTPUTS;
    const Work work{x, handed, counters, rows, cols, groups};
    wide(work, OneMatrix{w, outputs, cols},
         KeepTop{shared, scale, bests, seconds, rows, groups, min(limit, outputs)});
}

extern "C" __global__ void __launch_bounds__(128)
    head_ends(const float2* bests, const float* seconds, const int* pick, int* ids, float* margin, int rows,
              int groups) {
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.x * 4 + warp_index();
    if (row >= rows) return;
    name_best<WITH_MARGIN>(bests + (size_t)row * groups, seconds + (size_t)row * groups, groups,
                           ids + pick[row], margin + (WITH_MARGIN ? pick[row] : 0));
}
