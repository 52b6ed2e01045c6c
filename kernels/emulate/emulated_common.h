/* The wrappers of common.cuh that are PTX on the device. */
#pragma once

inline u32 pack_bf16(float low, float high) {
    auto round = [](float x) -> u32 {
        u32 bits = __float_as_uint(x);
        if (x != x) return 0x7fff;  // what cvt.rn gives for every NaN
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(high) << 16 | round(low);
}

inline float rcp_fast(float x) { return 1.f / x; }
inline float exp2_fast(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.f : y;
}

inline int opaque(int x) { return x; }
inline int thread_again() { return threadIdx.x; }

inline u32 atomic_add_acq_rel(u32* counter, u32 amount) { return atomicAdd(counter, amount); }
inline void red_add_release(u32* counter, u32 amount) { atomicAdd(counter, amount); }

inline u32 load_acquire(const u32* counter, EMULATE_SITE) {
    emulate::spin("a counter (load_acquire)", site);
    emulate::counter_acquire(counter);
    return *counter;
}
