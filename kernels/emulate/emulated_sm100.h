/* The wrappers of sm100.cuh as C++. */
#pragma once

struct alignas(32) Bytes32 {
    uint4 low, high;
};

inline Bytes32 load_stream_32(const void* global) {
    emulate::aligned(global, 32, "load_stream_32");
    return *(const Bytes32*)global;
}

inline u32 fp4_to_f16(u8 pair) {
    // 0 0.5 1 1.5 2 3 4 6 as f16
    static constexpr u16 magnitude[8] = {0, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600};
    auto one = [](u32 nibble) -> u32 { return magnitude[nibble & 7] | (nibble & 8) << 12; };
    return one(pair >> 4) << 16 | one(pair & 15);
}
