/* Types, conversions, warp and block reductions, device-wide counters: what every kernel here builds on.
 * No CUDA header is needed, so a machine with NVRTC and a driver alone can compile every kernel.
 * Under MINIDFLASH_EMULATE (kernels/emulate) the few wrappers with PTX come from emulated.h instead. */
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(2) bf16 {
    u16 bits;
};

constexpr u32 FULL_WARP = 0xffffffffu;

#ifdef MINIDFLASH_EMULATE
#include "emulated_common.h"
#else

/* Round two floats to nearest even; the first lands in the low half, as memory order wants. */
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* 2^x to about 2 ulp; denormal results become zero. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, to a unit in the last place or two. */
__device__ __forceinline__ float rcp_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Add at GPU scope and return the old value. What this thread (and, after a barrier, its block) wrote before
 * is visible to whoever sees the sum; what the others wrote before their adds is visible here. */
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* counter, u32 amount) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(counter), "r"(amount)
                 : "memory");
    return old;
}

__device__ __forceinline__ void red_add_release(u32* counter, u32 amount) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
}

/* The same number, but the compiler does not know: what is computed from it is computed where it is used, and
 * not once before a loop, in registers that the loop then lacks. */
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* threadIdx.x, asked for where it is used: no register keeps it meanwhile. */
__device__ __forceinline__ int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* The loads to spin on: under the emulator each gives the other threads a turn. */
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
#endif

__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ bf16 to_bf16(float x) { return bf16{(u16)pack_bf16(x, 0.f)}; }

/* The activation type is a template or macro parameter: from_f32<A>(x) rounds once, or not at all. */
template <class A>
__device__ __forceinline__ A from_f32(float x);
template <>
__device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    return to_bf16(x);
}
template <>
__device__ __forceinline__ float from_f32<float>(float x) {
    return x;
}

/* NVRTC knows no INFINITY. */
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float low_f32(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_f32(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void add_squares(u32 pair, float& sum) {
    sum += low_f32(pair) * low_f32(pair);
    sum += high_f32(pair) * high_f32(pair);
}

/* Two activations times their scales; their squares are added to sum. */
__device__ __forceinline__ u32 scale_pair(u32 pair, float scale_low, float scale_high, float& sum) {
    add_squares(pair, sum);
    return pack_bf16(low_f32(pair) * scale_low, high_f32(pair) * scale_high);
}

/* Butterflies: every lane gets the same bits, since each step adds the same two numbers on both sides. */
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

struct Best {
    float value;
    int index;
};

/* The row of a cache of S rows in which a key lies. Full caches, where no key is past the last row, need no
 * division. */
__device__ __forceinline__ int row_of_key(int key, int S) { return key < S ? key : (u32)key % (u32)S; }

/* What competes for the best: a value that is NaN or infinite beats all numbers, and its index is -1. */
__device__ __forceinline__ Best candidate(float value, int index) {
    return fabsf(value) <= 3.40282347e38f ? Best{value, index} : Best{infinity(), -1};
}

/* The larger value; of equal values the smaller index. A NaN as b changes nothing. */
__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        Best other{__shfl_xor_sync(FULL_WARP, best.value, step),
                   __shfl_xor_sync(FULL_WARP, best.index, step)};
        best = better(best, other);
    }
    return best;
}

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }

/* Block reductions: blocks are one-dimensional and a multiple of 32 wide. Warps meet in warp order, the same
 * for every thread, so each thread has the same bits. The first barrier guards the array's last readers. */
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float part[32];
    x = warp_sum(x);
    __syncthreads();
    if (lane_index() == 0) part[warp_index()] = x;
    __syncthreads();
    float total = 0.f;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) total += part[w];
    return total;
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float part[32];
    x = warp_max(x);
    __syncthreads();
    if (lane_index() == 0) part[warp_index()] = x;
    __syncthreads();
    float largest = part[0];
    for (int w = 1; w < (int)blockDim.x / 32; ++w) largest = fmaxf(largest, part[w]);
    return largest;
}

__device__ __forceinline__ Best block_best(Best best) {
    __shared__ Best part[32];
    best = warp_best(best);
    __syncthreads();
    if (lane_index() == 0) part[warp_index()] = best;
    __syncthreads();
    best = part[0];
    for (int w = 1; w < (int)blockDim.x / 32; ++w) best = better(best, part[w]);
    return best;
}

/* True in every thread of the block that arrives last of `total`; that block sees what all wrote before.
 * The counter starts at zero and is left at zero, ready for the next launch. */
__device__ __forceinline__ bool last_to_arrive(u32* counter, u32 total) {
    bool is_last = false;
    __syncthreads();  // the whole block's writes come before thread 0's release
    if (threadIdx.x == 0) {
        is_last = atomic_add_acq_rel(counter, 1) == total - 1;
        if (is_last) *counter = 0;  // nobody asks again in this launch: no release, which costs a fence
    }
    // Said by the barrier itself: a shared variable is something that racecheck does not follow behind
    // mbarriers.
    return __syncthreads_or(is_last);
}

/* By a warp, until so many have arrived at the counter (red_add_release); it then sees what they wrote
 * before. Blocks that wait for each other must be on the card together. */
__device__ __forceinline__ void warp_wait_for(const u32* counter, u32 count) {
    while (load_acquire(counter) != count) {
    }
    __syncwarp();
}
