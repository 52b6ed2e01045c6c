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

struct Gated {
    const float* scale;  // 1 / rms of each row, or null
    bf16* h;
    int rows, ffn;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const int f = unit.group * OUTPUTS / 2 + 8 * warp_index() + lane_index() / 4;
        if (f >= ffn) return;
        each_token(unit, rows, scale, ffn, sums, [&](size_t at, float gate, float up) {
            h[at + f] = to_bf16(activate(ACT, gate, up, 0.f, 0.f));
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide_gate_up(const u16* w, const bf16* x, const float* scale, bf16* h, u32* counters, float* handed,
                 int rows, int cols, int ffn) {
    const int outputs = (ffn + 7) / 8 * 16;
    const Work work{x, handed, counters, rows, cols, (outputs + OUTPUTS - 1) / OUTPUTS};
    wide(work, OneMatrix{w, outputs, cols}, Gated{scale, h, rows, ffn});
}
