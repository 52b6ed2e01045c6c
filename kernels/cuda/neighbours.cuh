/* Some neighbours of a row, as one load or store where it is known that all are there and aligned. */
#pragma once
#include "common.cuh"

/* Neighbours in registers, loaded and stored at once (16 bytes at a time) where WHOLE, else one by one, the
 * first `there`. */
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Neighbours {
    T v[Count];

    template <bool WHOLE>
    __device__ __forceinline__ void load(const T* at, int there) {
        if (WHOLE) {
            *this = *(const Neighbours*)at;
        } else {
#pragma unroll
            for (int i = 0; i < Count; ++i) v[i] = i < there ? at[i] : T{};
        }
    }

    /* At once, past L1: what other blocks of this launch wrote. 8 bytes, or a multiple of 16. */
    __device__ __forceinline__ void load_l2(const T* at) {
        if constexpr (sizeof(T) * Count >= 16)
#pragma unroll
            for (int i = 0; i < sizeof(T) * Count / 16; ++i) ((float4*)v)[i] = __ldcg((const float4*)at + i);
        else
            *(float2*)v = __ldcg((const float2*)at);
    }

    template <bool WHOLE>
    __device__ __forceinline__ void store(T* at, int there) const {
        if (WHOLE) {
            *(Neighbours*)at = *this;
        } else {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                if (i < there) at[i] = v[i];
        }
    }
};

/* Whether all rows of `stride` from there on keep `Count` neighbours aligned. */
template <int Count, class T>
__device__ __forceinline__ bool is_aligned(const T* at, int stride) {
    return (size_t)at % (sizeof(T) * Count) == 0 && stride % Count == 0;
}
