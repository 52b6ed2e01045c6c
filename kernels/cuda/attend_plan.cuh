/* What the blocks of attend_fast.cu agree on without talking: which keys each row sees, how they are cut, and
 * how the pieces meet again.
 *
 * Keys are cut at absolute positions: a leaf is 128 keys, a chain CHAIN leaves, a span SPAN chains. A leaf's
 * softmax is its own; leaves meet in ascending order within their chain, chains within their span, spans
 * within the row. So a row's bits do not depend on who computed which piece: a unit of work is a leaf, a
 * chain or a span (the plan's level 0, 1, 2), whatever keeps the grid busy and fits the workspace. A piece in
 * which a row sees no key leaves the row as it was. */
#pragma once
#include "sm90.cuh"

#ifndef CHAIN
#define CHAIN 4
#endif
#ifndef SPAN
#define SPAN 16
#endif

constexpr int LEAF = 128, THREADS = 128;
constexpr int MOST_ROWS = THREADS;  // of a launch: a thread plans one row
constexpr float NO_KEY = -3e38f;    // the largest score of no key at all; finite, so that differences are
constexpr int COUNTERS = 4096;      // u32 at the front of work
constexpr int RECORDS = 512;        // i32 behind them: {start, low, high} of every row, then the level
constexpr int LEVEL_AT = 3 * MOST_ROWS;

/* Rows are taken in groups of neighbours; the rows of a group that share a slot are a set, and the first of
 * them leads it. A set reads its keys once for all its rows. */
struct Plan {
    int slot[MOST_ROWS], first[MOST_ROWS], last[MOST_ROWS];  // keys of each row: [first, last)
    int low[MOST_ROWS], high[MOST_ROWS];                     // at a leader: keys that any row of its set sees
    int shared_low[MOST_ROWS], shared_high[MOST_ROWS];       // keys that all of them see
    int leader[MOST_ROWS];                                   // of each row, -1 where it sees nothing
    int start[MOST_ROWS];                                    // units of the leaders before
    int units, level;
    int half;  // the largest power of two below the number of rows, 0 for one row
    int part[4][3];
};

struct Rows {
    const int *slot, *pos, *begin, *end;
    int count, group, window, causal;
};

__device__ __forceinline__ int unit_leaves(int level) {
    return level == 0 ? 1 : level == 1 ? CHAIN : CHAIN * SPAN;
}

/* Units of `leaves` leaves that [low, high) touches. */
__device__ __forceinline__ int count_units(int low, int high, int leaves) {
    int keys = LEAF * leaves;
    return high > low ? (high - 1) / keys - low / keys + 1 : 0;
}

/* All threads of the block. leaf_limit: level 0 is for at most so many units times G; capacity: slots in
 * work. Ends with a barrier. */
__device__ __forceinline__ void make_plan(Plan& plan, const Rows& rows, int G, int leaf_limit, int capacity) {
    int t = threadIdx.x, first = 0, last = 0, slot = -1;
    if (t < rows.count) {
        int pos = rows.pos[t];
        slot = rows.slot[t];
        int begin = rows.begin[t], end = rows.end[t];
        if (pos >= 0) {
            first = rows.window ? min(begin, max(0, pos - rows.window + 1)) : 0;
            last = rows.causal ? pos + 1 : rows.window ? min(end, pos + rows.window) : end;
        }
    }
    plan.slot[t] = slot, plan.first[t] = first, plan.last[t] = last;
    __syncthreads();
    int low = last, high = first, shared_low = first, shared_high = last, leader = -1;
    if (last > first) {
        leader = t;
        int from = t - t % rows.group, to = min(from + rows.group, rows.count);
#pragma unroll 4
        for (int u = from; u < to; ++u) {
            int a = plan.first[u], b = plan.last[u];
            bool is_same = b > a && plan.slot[u] == slot;
            leader = is_same ? min(leader, u) : leader;
            low = is_same ? min(low, a) : low, high = is_same ? max(high, b) : high;
            shared_low = is_same ? max(shared_low, a) : shared_low;
            shared_high = is_same ? min(shared_high, b) : shared_high;
        }
    }
    bool leads = leader == t;
    plan.leader[t] = leader;
    plan.low[t] = low, plan.high[t] = high;
    plan.shared_low[t] = shared_low, plan.shared_high[t] = shared_high;
    int counts[3], before[3];
#pragma unroll
    for (int level = 0; level < 3; ++level) {
        counts[level] = leads ? count_units(low, high, unit_leaves(level)) : 0;
        int sum = counts[level];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(FULL_WARP, sum, step);
            if (lane_index() >= step) sum += other;
        }
        if (lane_index() == 31) plan.part[warp_index()][level] = sum;
        before[level] = sum - counts[level];
    }
    __syncthreads();
    int total[3] = {0, 0, 0};
#pragma unroll
    for (int level = 0; level < 3; ++level)
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) {
            if (w < warp_index()) before[level] += plan.part[w][level];
            total[level] += plan.part[w][level];
        }
    // Spans for long work: fewer partial results. Chains where spans would leave blocks idle.
    int level = total[0] * G <= min(leaf_limit, capacity)                       ? 0
                : total[1] * G <= capacity && total[2] * G < 2 * (int)gridDim.x ? 1
                                                                                : 2;
    plan.start[t] = level == 0 ? before[0] : level == 1 ? before[1] : before[2];
    if (t == 0)
        plan.units = level == 0   ? total[0]
                     : level == 1 ? total[1]
                                  : total[2],
        plan.level = level, plan.half = rows.count > 1 ? 1 << (31 - __clz(rows.count - 1)) : 0;
    __syncthreads();
}

/* The leader whose set has unit `unit`: the last row that starts at it or before. */
__device__ __forceinline__ int find_leader(const Plan& plan, int unit) {
    int at = 0;
    for (int step = plan.half; step > 0; step /= 2)
        if (plan.start[at + step] <= unit) at += step;
    return at;
}

/* Weights of two pieces of one row that meet: the earlier's, the later's; m becomes the larger maximum. */
struct Meeting {
    float earlier, later;
};
__device__ __forceinline__ Meeting meet(float& m, float later_m) {
    float top = fmaxf(m, later_m);
    Meeting w{exp2_fast(__fsub_rn(m, top)), exp2_fast(__fsub_rn(later_m, top))};
    m = top;
    return w;
}
__device__ __forceinline__ float weighted(const Meeting& w, float earlier, float later) {
    return __fmaf_rn(later, w.later, __fmul_rn(earlier, w.earlier));
}

/* A piece of one row: the largest score (times log2 e), the sum of 2^(score - m), one component of sum p * v.
 */
struct Piece {
    float m = NO_KEY, l = 0.f, o = 0.f;

    __device__ __forceinline__ void add(const Piece& later) {
        Meeting w = meet(m, later.m);
        l = weighted(w, l, later.l);
        o = weighted(w, o, later.o);
    }
};

/* Component d of row `row` of a set and kv head: its pieces from the slots of work, met in order, divided.
 * slots: of the set's unit 0. stride: floats from one unit's slot to the next. rows: of a slot. */
template <int Head>
__device__ __forceinline__ float merge(const float* slots, size_t stride, int rows, int row, int d, int low,
                                       int high, int level) {
    constexpr int BATCH = 16;  // slots whose loads are under way together
    int unit = low / LEAF / unit_leaves(level), end = (high - 1) / LEAF / unit_leaves(level) + 1;
    Piece chain, span, all;
    while (unit < end) {
        Piece piece[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (unit + i < end) {
                const float* slot = slots + i * stride;
                piece[i].o = slot[row * Head + d];
                piece[i].m = slot[rows * Head + row];
                piece[i].l = slot[rows * Head + rows + row];
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int next = unit + i + 1;
            if (next > end) continue;
            if (level == 0) {
                chain.add(piece[i]);
                if (next % CHAIN && next < end) continue;
                piece[i] = chain;
                chain = Piece();
                next = (next + CHAIN - 1) / CHAIN;
            }
            if (level < 2) {
                span.add(piece[i]);
                if (next % SPAN && unit + i + 1 < end) continue;
                piece[i] = span;
                span = Piece();
            }
            all.add(piece[i]);
        }
        unit += BATCH;
        slots += BATCH * stride;
    }
    // Minus zero becomes zero: whether pieces without a key met a row must not show.
    return __fadd_rn(__fmul_rn(all.o, __frcp_rn(all.l)), 0.f);
}
