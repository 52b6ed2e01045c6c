/* What only sm_100 has: 32-byte loads and the fp4 conversion. n: bytes, a multiple of 32; one thread 32
 * bytes. */
#include "sm100.cuh"

extern "C" __global__ void unpack_fp4(const u8* packed, u32* halves, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (32 * i >= n) return;
    Bytes32 v = load_stream_32(packed + 32 * i);
    u32 words[8] = {v.low.x, v.low.y, v.low.z, v.low.w, v.high.x, v.high.y, v.high.z, v.high.w};
#pragma unroll
    for (int w = 0; w < 8; ++w)
#pragma unroll
        for (int b = 0; b < 4; ++b) halves[32 * i + 4 * w + b] = fp4_to_f16((u8)(words[w] >> 8 * b));
}
