/* embed: x[t] = scale * table[ids[t]].
 * Grid:   one block a row (T), 128 threads.
 * Moves:  T*D weights and activations; bound by latency.
 * Source: models.md 1.
 * Truth:  oracle.py embed. */
#include "plain.cuh"

extern "C" __global__ void embed(const int* ids, const WEIGHT* table, float scale, ACTIVATION* x, int V,
                                 int D) {
    WeightRow row(table, ids[blockIdx.x], V, D);
    for (int d = threadIdx.x; d < D; d += blockDim.x)
        x[(size_t)blockIdx.x * D + d] = from_f32<ACTIVATION>(scale * row[d]);
}
