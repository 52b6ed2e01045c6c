/* How token rows lie for wgmma (prefill_wgmma.cuh): what lay_prefill.cu and lay_wide.cu share. */
#pragma once
#include "sm90.cuh"

/* 8 k of a row, times the norm's weights; their squares are added up in order. */
__device__ __forceinline__ uint4 normed(uint4 x, const float4 (&norm)[2], float& sum) {
    x.x = scale_pair(x.x, norm[0].x, norm[0].y, sum);
    x.y = scale_pair(x.y, norm[0].z, norm[0].w, sum);
    x.z = scale_pair(x.z, norm[1].x, norm[1].y, sum);
    x.w = scale_pair(x.w, norm[1].z, norm[1].w, sum);
    return x;
}

/* Four lanes hold a matrix of 4 x 4 words by rows; by columns afterwards. */
__device__ __forceinline__ uint4 transposed(uint4 v) {
    const int lane = lane_index();
    const bool odd = lane & 1, upper = lane & 2;
    u32 a = __shfl_xor_sync(FULL_WARP, odd ? v.x : v.y, 1),
        b = __shfl_xor_sync(FULL_WARP, odd ? v.z : v.w, 1);
    v = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    a = __shfl_xor_sync(FULL_WARP, upper ? v.x : v.z, 2),
    b = __shfl_xor_sync(FULL_WARP, upper ? v.y : v.w, 2);
    return upper ? make_uint4(a, b, v.z, v.w) : make_uint4(v.x, v.y, a, b);
}

/* Where unit `unit` (8 k) of a row lies: rows are padded to a multiple of 8. */
__device__ __forceinline__ uint4* laid_unit(bf16* laid, int padded, int row, int unit) {
    return (uint4*)((char*)laid + ((size_t)(unit / 8) * padded + row) * 128 + 16 * ((unit ^ row) % 8));
}
