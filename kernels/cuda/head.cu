/* head: ids[pick[i]] = the smallest argmax of the first `limit` logits of row i; -1 where one is not finite.
 *         margin[pick[i]], where it is not null: how far the largest other one lies below.
 * Grid:   one block a picked row, 256 threads.
 * Moves:  M*limit floats that linear wrote; bound by L2.
 * Source: playbook 3.
 * Truth:  oracle.py head. */
#include "common.cuh"

/* logits: rows that begin `stride` floats apart. */
extern "C" __global__ void head(const float* logits, const int* pick, int* ids, float* margin, int limit,
                                int stride) {
    Best best{-infinity(), 0};
    for (int n = threadIdx.x; n < limit; n += blockDim.x)
        best = better(best, candidate(logits[(size_t)blockIdx.x * stride + n], n));
    best = block_best(best);
    if (threadIdx.x == 0) ids[pick[blockIdx.x]] = best.index;
    if (!margin) return;
    float second = -infinity();
    for (int n = threadIdx.x; n < limit; n += blockDim.x)
        if (n != best.index) second = fmaxf(second, logits[(size_t)blockIdx.x * stride + n]);
    second = block_max(second);
    if (threadIdx.x == 0) margin[pick[blockIdx.x]] = best.index < 0 ? infinity() : best.value - second;
}
