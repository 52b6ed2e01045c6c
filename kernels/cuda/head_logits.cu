/* head_logits: scales and caps logits in place, where they are not taken as they are.
 * Grid:   any number of blocks of any size.
 * Moves:  2*count floats, from L2.
 * Truth:  oracle.py head_logits. */
#include "softcap.cuh"

extern "C" __global__ void cap_logits(float* logits, float multiplier, float cap, int count) {
    for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x)
        logits[n] = soft_cap(logits[n], multiplier, cap);
}
