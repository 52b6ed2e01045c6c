/* choose_rows: each row's experts and shares, from its logits. group: the pairs of each expert.
 * Grid:   choose_rows: any number of blocks of 4 warps, a warp a row. group: a block of 256 threads for each
 *         expert, and one for what is behind the last group.
 * Moves:  little; bound by latency.
 * Source: models.md 3, 4.
 * Truth:  oracle_moe.py route. */
#include "choose.cuh"
#include "plain.cuh"
#include "sm90.cuh"

/* logits: (T, E), changed: the bias is added. u: (T, D), zeros where pos < 0. bias, expert_scale: may be
 * null.
 */
extern "C" __global__ void choose_rows(float* logits, const float* bias, const float* expert_scale,
                                       const int* pos, int normalise, ACTIVATION* u, int* expert,
                                       float* share, int T, int E, int U, int D) {
    for (int t = warp_in_grid(); t < T; t += warps_in_grid()) {
        const int lane = lane_index(), at = t * U + lane;
        float* mine = logits + (size_t)t * E;
        if (pos[t] < 0) {
            for (int d = lane; d < D; d += 32) u[(size_t)t * D + d] = from_f32<ACTIVATION>(0.f);
            if (lane < U) expert[at] = -1, share[at] = 0.f;
            continue;
        }
        if (bias)
            for (int e = lane; e < E; e += 32) mine[e] += bias[e];  // each lane reads its own again
        const Choice choice = choose(mine, E, U);
        float part = share_of(choice, mine, E, U, normalise);
        if (lane >= U) continue;
        if (expert_scale) part *= expert_scale[choice.id];
        expert[at] = choice.id, share[at] = part;
    }
}

constexpr int GROUP_THREADS = 256;

/* The sum over the block's threads, and over those before this one. */
__device__ __forceinline__ int2 block_scan(int value) {
    __shared__ int part[GROUP_THREADS / 32];
    int upto = value, before = 0, total = 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane_index() >= step) upto += other;
    }
    __syncthreads();  // the last readers are done
    if (lane_index() == 31) part[warp_index()] = upto;
    __syncthreads();
    for (int w = 0; w < GROUP_THREADS / 32; ++w) {
        if (w < warp_index()) before += part[w];
        total += part[w];
    }
    return make_int2(total, before + upto - value);
}

/* expert: of each pair, -1 for none. order: what is behind the last group is -1. touched += experts with a
 * pair. */
extern "C" __global__ void group(const int* expert, int* first, int* order, int* touched, int pairs) {
    griddep_launch();
    griddep_wait();
    const int e = blockIdx.x, E = gridDim.x - 1, each = (pairs + GROUP_THREADS - 1) / GROUP_THREADS;
    const int begin = min(pairs, (int)threadIdx.x * each), end = min(pairs, begin + each);
    int lower = 0, mine = 0;
    for (int r = begin; r < end; ++r) {
        const int other = expert[r];
        lower += other >= 0 && other < e, mine += other == e;
    }
    const int at = block_scan(lower).x;
    const int2 own = block_scan(mine);
    if (threadIdx.x == 0) {
        first[e] = at;
        if (own.x > 0) atomicAdd(touched, 1);
    }
    if (e == E)
        for (int r = at + threadIdx.x; r < pairs; r += GROUP_THREADS) order[r] = -1;
    int to = at + own.y;
    for (int r = begin; r < end; ++r)
        if (expert[r] == e) order[to++] = r;
}
