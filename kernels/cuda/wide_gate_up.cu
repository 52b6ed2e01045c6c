/* wide_gate_up: what gate_up_fast gives, bit for bit, of one slice: h = act(Wg n(x)) * (Wu n(x)), rounded
 * once. A packed tile holds 8 gate rows and the 8 up rows that go with them, so both numbers of an output are
 * in one thread.
 * Grid:   wide.cuh.
 * Moves:  2*F*D*2 + T*F*2 bytes.
 * Truth:  oracle.py gate_up. */
#include "activate.cuh"
#include "wide.cuh"

#ifndef ACT
#define ACT SILU
#endif

constexpr int AT_ONCE = 8;  // outputs of a lane

struct Gated {
    const float* scale;  // 1 / rms of each row, or null
    bf16* h;
    int rows, ffn;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const int f = unit.group * OUTPUTS / 2 + 8 * warp_index() + lane_index() / 4;
        if (f >= ffn) return;
        const Scales scales(unit, rows, scale);
        const int first = unit.first_token + 2 * (lane_index() % 4), there = rows - first;
        bf16* const to = h + (size_t)first * ffn + f;
#pragma unroll
        for (int k = 0; k < SUMS / 2; k += AT_ONCE) {
            if (offset(k) >= there) return;
            float gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int low = low_of(k + i);
                gate[i] = sums[low] * scales.of[k + i], up[i] = sums[low + 2] * scales.of[k + i];
            }
            activate_all(ACT, gate, up);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (offset(k + i) < there) to[(size_t)offset(k + i) * ffn] = to_bf16(gate[i]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide_gate_up(const u16* w, const bf16* x, const float* scale, bf16* h, u32* counters, float* handed,
                 int rows, int cols, int ffn) {
    const int outputs = (ffn + 7) / 8 * 16;
    const Work work{x, handed, counters, rows, cols, (outputs + OUTPUTS - 1) / OUTPUTS};
    wide(work, OneMatrix{w, outputs, cols}, Gated{scale, h, rows, ffn});
}
