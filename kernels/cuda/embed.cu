/* embed: x[t] = scale * table[ids[t]].
 * Grid:   one block a row (T), 128 threads.
 * Moves:  T*D weights and activations; bound by latency.
 * Source: models.md 1. Truth: oracle.py embed. */
#include "plain.cuh"

extern "C" __global__ void embed(const int* ids, const WEIGHT* table, float scale, ACTIVATION* x, int D) {
    const WEIGHT* row = table + (size_t)ids[blockIdx.x] * D;
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        x[(size_t)blockIdx.x * D + d] = from_f32<ACTIVATION>(scale * to_f32(row[d]));
}
