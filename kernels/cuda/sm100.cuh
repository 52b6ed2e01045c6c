/* One wrapper an instruction, for sm_100a and sm_103a only: files named NAME_sm100.cu. */
#pragma once
#include "sm90.cuh"

#ifdef MINIDFLASH_EMULATE
#include "emulated_sm100.h"
#else

struct alignas(32) Bytes32 {
    uint4 low, high;
};

/* 32 bytes that are read once, in one instruction: twice the bytes in flight of load_stream. 32-byte aligned.
 */
__device__ __forceinline__ Bytes32 load_stream_32(const void* global) {
    Bytes32 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(v.low.x), "=r"(v.low.y), "=r"(v.low.z), "=r"(v.low.w), "=r"(v.high.x), "=r"(v.high.y),
                   "=r"(v.high.z), "=r"(v.high.w)
                 : "l"(global));
    return v;
}

/* Two e2m1 numbers of one byte, low nibble first, as two f16 of one word. */
__device__ __forceinline__ u32 fp4_to_f16(u8 pair) {
    u32 halves;
    asm("{\n .reg .b8 b;\n cvt.u8.u32 b, %1;\n cvt.rn.f16x2.e2m1x2 %0, b;\n}"
        : "=r"(halves)
        : "r"((u32)pair));
    return halves;
}
#endif
