/* CUDA C++ for the host compiler: keywords, built-in variables and functions, on fibers.h.
 * Included before every .cu. Float atomics are absent on purpose: no kernel here may use one. */
#pragma once
#include <math.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fibers.h"

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
/* Thread-local works both as `__shared__ float x[32]` in a function and after `extern`. Its addresses come
 * from our own __tls_get_addr (entry.cpp), which answers with the running block's shared memory. */
#define __shared__ thread_local

#define threadIdx (emulate_self->thread)
#define blockIdx (emulate_self->block_index)
#define blockDim (emulate_grid.block)
#define gridDim (emulate_grid.grid)
constexpr int warpSize = 32;

#define EMULATE_VECTOR(T, name, align2, align4)                \
    struct alignas(align2) name##2 { T x, y; };                \
    struct alignas(align4) name##4 { T x, y, z, w; };          \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATE_VECTOR(float, float, 8, 16)
EMULATE_VECTOR(int, int, 8, 16)
EMULATE_VECTOR(unsigned, uint, 8, 16)
EMULATE_VECTOR(short, short, 4, 8)
EMULATE_VECTOR(unsigned short, ushort, 4, 8)
EMULATE_VECTOR(unsigned char, uchar, 2, 4)
#undef EMULATE_VECTOR
struct alignas(16) longlong2 {
    long long x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

// ---- barriers and fences ----

inline void __syncthreads(EMULATE_SITE) { emulate::block_barrier(0, 0, true, "__syncthreads", site); }
inline int __syncthreads_or(int predicate, EMULATE_SITE) {
    return emulate::block_any(predicate, "__syncthreads_or", site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATE_SITE) {
    emulate::warp_meet(mask, "__syncwarp", nullptr, [](void* const*, unsigned) {}, site);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned, EMULATE_SITE) { emulate::spin("__nanosleep", site); }

// ---- warp shuffles and votes ----

namespace emulate {
template <class T>
struct Shuffle {
    T value, result;
    int source;  // absolute lane
};

/* Reading a lane that takes no part is undefined on the device; here it gives NaN bits. */
template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
    Shuffle<T> mine{value, value, source};
    warp_meet(
        mask, "a warp shuffle", &mine,
        [](void* const* operands, unsigned lanes) {
            for (unsigned lane = 0; lane < 32; ++lane) {
                if (!(lanes >> lane & 1)) continue;
                auto* to = static_cast<Shuffle<T>*>(operands[lane]);
                if (lanes >> to->source & 1)
                    to->result = static_cast<Shuffle<T>*>(operands[to->source])->value;
                else
                    memset(&to->result, 0xff, sizeof(T));
            }
        },
        site);
    return mine.result;
}

struct Vote {
    bool is_true;
    unsigned ballot, lanes;
};

inline Vote vote(unsigned mask, bool is_true, Site site) {
    Vote mine{is_true, 0, 0};
    warp_meet(
        mask, "a warp vote", &mine,
        [](void* const* operands, unsigned lanes) {
            unsigned ballot = 0;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (lanes >> lane & 1)
                    ballot |= (unsigned)static_cast<Vote*>(operands[lane])->is_true << lane;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (lanes >> lane & 1) {
                    static_cast<Vote*>(operands[lane])->ballot = ballot;
                    static_cast<Vote*>(operands[lane])->lanes = lanes;
                }
        },
        site);
    return mine;
}
}  // namespace emulate

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATE_SITE) {
    int lane = emulate_self->lane;
    return emulate::shuffle(mask, value, (lane & -width) | (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATE_SITE) {
    int lane = emulate_self->lane, source = lane ^ bits;
    return emulate::shuffle(mask, value, (source & -width) <= (lane & -width) ? source : lane, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATE_SITE) {
    int lane = emulate_self->lane, source = lane + (int)delta;
    return emulate::shuffle(mask, value, (lane & (width - 1)) + (int)delta < width ? source : lane, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATE_SITE) {
    int lane = emulate_self->lane;
    return emulate::shuffle(mask, value, (lane & (width - 1)) >= (int)delta ? lane - (int)delta : lane, site);
}
inline unsigned __ballot_sync(unsigned mask, int claim, EMULATE_SITE) {
    return emulate::vote(mask, claim != 0, site).ballot;
}
inline int __any_sync(unsigned mask, int claim, EMULATE_SITE) {
    return emulate::vote(mask, claim != 0, site).ballot != 0;
}
inline int __all_sync(unsigned mask, int claim, EMULATE_SITE) {
    emulate::Vote result = emulate::vote(mask, claim != 0, site);
    return result.ballot == result.lanes;
}
inline int __reduce_min_sync(unsigned mask, int value, EMULATE_SITE) {
    for (int step = 16; step > 0; step /= 2) {
        int other = emulate::shuffle(mask, value, emulate_self->lane ^ step, site);
        value = other < value ? other : value;
    }
    return value;
}
inline int __reduce_max_sync(unsigned mask, int value, EMULATE_SITE) {
    return ~__reduce_min_sync(mask, ~value, site);
}
inline unsigned __activemask() { return 1u << emulate_self->lane; }

// ---- integer atomics ----

namespace emulate {
/* An atomic that changed nothing may be a poll: let the others run. */
inline void changed(bool is_new, const char* what, Site site) {
    if (is_new)
        progress();
    else
        spin(what, site);
}
}  // namespace emulate

#define EMULATE_ATOMIC(name, expression)                                                        \
    template <class T>                                                                          \
    T name(T* address, std::type_identity_t<T> value, EMULATE_SITE) {                           \
        static_assert(std::is_integral_v<T>, "no atomics on floats: their order is not fixed"); \
        emulate::counter_acquire(address);                                                      \
        T old = *address, made = (expression);                                                  \
        *address = made;                                                                        \
        emulate::counter_release(address);                                                      \
        emulate::changed(made != old, #name, site);                                             \
        return old;                                                                             \
    }
EMULATE_ATOMIC(atomicAdd, old + value)
EMULATE_ATOMIC(atomicSub, old - value)
EMULATE_ATOMIC(atomicMax, old > value ? old : value)
EMULATE_ATOMIC(atomicMin, old < value ? old : value)
EMULATE_ATOMIC(atomicAnd, (T)(old & value))
EMULATE_ATOMIC(atomicOr, (T)(old | value))
EMULATE_ATOMIC(atomicExch, value)
#undef EMULATE_ATOMIC
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value, EMULATE_SITE) {
    emulate::counter_acquire(address);
    T old = *address;
    if (old == expected) *address = value;
    emulate::counter_release(address);
    emulate::changed(old == expected && old != value, "atomicCAS", site);
    return old;
}

// ---- arithmetic and bits ----

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)b : (C)a;
}

template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcg(const T* address) {
    return *address;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
    *address = value;
}
