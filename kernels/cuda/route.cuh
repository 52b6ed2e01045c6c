/* What route_fast and route_few share: a row's squares in parts, and what becomes of its logits. */
#pragma once
#include "choose.cuh"
#include "skinny_tokens.cuh"

#ifndef U_NORM
#define U_NORM 0  // 1: u has a norm of its own
#endif
#ifndef EXPERT_SCALE
#define EXPERT_SCALE 0  // 1: every expert has a scale, that its shares are times
#endif

constexpr int ROUTE_THREADS = 32 * WARPS;
constexpr int MOST_EACH = 32;  // rows of a cluster: a word has a bit for each
constexpr int PARTS = 16;      // of a row's squares

/* Parts 0 and 1, 2 and 3, ..., then pairs of them, ... */
template <int Parts>
__device__ __forceinline__ float folded(const float (&sums)[Parts]) {
    if constexpr (Parts == 1) {
        return sums[0];
    } else {
        float half[Parts / 2];
#pragma unroll
        for (int i = 0; i < Parts / 2; ++i) half[i] = sums[2 * i] + sums[2 * i + 1];
        return folded(half);
    }
}

/* In shared memory. */
struct Groups {
    u32* rows_of;          // [E]: which rows chose an expert
    int *starts, *chosen;  // [E + 1]; [MOST_EACH * 32]

    /* Where the groups of one cluster's rows begin. By a warp. */
    __device__ __forceinline__ void begin(int* first, int* touched, int E) const {
        const int lane = lane_index(), each = (E + 31) / 32, from = min(E, lane * each),
                  end = min(E, from + each);
        int pairs = 0, active = 0;
        for (int e = from; e < end; ++e) pairs += __popc(rows_of[e]), active += rows_of[e] != 0;
        int upto = pairs;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, upto, step);
            if (lane >= step) upto += other;
            active += __shfl_xor_sync(FULL_WARP, active, step);
        }
        int at = upto - pairs;
        for (int e = from; e < end; ++e) {
            starts[e] = first[e] = at;
            at += __popc(rows_of[e]);
        }
        if (lane == 31) first[E] = starts[E] = upto;
        if (lane == 0) atomicAdd(touched, active);
    }

    /* Their pairs. By the block. */
    __device__ __forceinline__ void fill(int* order, int rows, int E, int U) const {
        for (int r = threadIdx.x; r < rows * U; r += ROUTE_THREADS) {
            const int e = chosen[r];
            if (e >= 0) order[starts[e] + __popc(rows_of[e] & ((1u << r / U) - 1))] = r;
            if (r >= starts[E]) order[r] = -1;
        }
    }
};

/* The outputs of route. first null: groups are another kernel's. */
struct Routed {
    int* expert;
    float* share;
    int *first, *order, *touched;
    const float* expert_scale;
};

/* Experts, groups and shares of rows begin .. begin + count - 1, by a block, a warp every so-manyth row.
 * logits: (count, stride). positions: of a warp's rows. */
template <int Each>
__device__ __forceinline__ void choose_and_group(const Groups& groups, const float* logits, int stride,
                                                 const int (&positions)[Each], int begin, int count, int E,
                                                 int U, bool normalise, const Routed& to) {
    const int lane = lane_index();
    Choice choice[Each];
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        const int row = warp_index() + i * WARPS;
        if (row >= count) break;
        choice[i] = Choice{-1, 0.f, 0.f};
        if (positions[i] >= 0) choice[i] = choose(logits + row * stride, E, U);
        if (lane >= U) continue;
        groups.chosen[row * U + lane] = choice[i].id;
        if (choice[i].id >= 0) atomicOr(groups.rows_of + choice[i].id, 1u << row);
    }
    __syncthreads();  // all rows have chosen
    if (to.first && warp_index() == WARPS - 1) groups.begin(to.first, to.touched, E);
#pragma unroll
    for (int i = 0; i < Each; ++i) {  // shares, which are late in use, meanwhile
        const int row = warp_index() + i * WARPS;
        if (row >= count) break;
        float part = 0.f;
        if (positions[i] >= 0) part = share_of(choice[i], logits + row * stride, E, U, normalise);
        if (EXPERT_SCALE && lane < U && choice[i].id >= 0) part *= to.expert_scale[choice[i].id];
        const size_t at = (size_t)(begin + row) * U + lane;
        if (lane < U) to.expert[at] = choice[i].id, to.share[at] = part;
    }
    __syncthreads();
    if (to.first) groups.fill(to.order, count, E, U);
}
