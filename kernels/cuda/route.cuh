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
constexpr int PARTS = 16;  // of a row's squares

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

/* The outputs of route. first null: groups are another kernel's. */
struct Routed {
    int* expert;
    float* share;
    int *first, *order, *touched;
    const float* expert_scale;

    /* The choice and shares of an output row, by a warp. logits: its own. */
    __device__ __forceinline__ void keep(size_t row, const Choice& choice, bool is_active,
                                         const float* logits, int E, int U, bool normalise) const {
        const int lane = lane_index();
        float part = 0.f;
        if (is_active) part = share_of(choice, logits, E, U, normalise);
        if (EXPERT_SCALE && lane < U && choice.id >= 0) part *= expert_scale[choice.id];
        const size_t at = row * U + lane;
        if (lane < U) expert[at] = choice.id, share[at] = part;
    }
};
