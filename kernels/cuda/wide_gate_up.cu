/* wide_gate_up: what gate_up_fast gives, bit for bit, of one slice: h = act(Wg n(x)) * (Wu n(x)), rounded
 * once. A packed tile holds 8 gate rows and the 8 up rows that go with them, so both numbers of an output are
 * in one thread. With LAID_WARPS h lies as the tokens of the wide product that comes next, and not in h:
 * the tree of that product, whose cols are F, a multiple of 32.
 * Grid:   wide.cuh.
 * Moves:  2*F*D*2 + T*F*2 bytes.
 * Truth:  oracle.py gate_up. */
#include "activate.cuh"
#include "lay.cuh"
#include "wide_sinks.cuh"

#ifndef ACT
#define ACT SILU
#endif

constexpr int AT_ONCE = 8;  // outputs of a lane

/* Where a lane's outputs go: f of its tokens, from `first` on. put(offset, low, high): of the tokens so many
 * behind the first, a multiple of 8, and of the one behind. */
#ifdef LAID_WARPS
/* A lane and its neighbour of the next output have one token each, and both outputs of it, which lie side by
 * side in the laid row. */
struct Target {
    char* at;   // of this lane's first token
    int there;  // tokens from it on

    __device__ __forceinline__ Target(bf16* laid, int f, int first, int rows, int ffn) {
        const int odd = lane_index() / 4 % 2, row = first + odd;
        const int place = TreeWalk<LAID_SLICES, LAID_WARPS, LAID_SPAN>::place(f / 32, f % 8 / 2, ffn);
        at = (char*)laid_unit(laid, (rows + 7) / 8 * 8, row, place) + 4 * (f / 8 % 4), there = rows - row;
    }

    __device__ __forceinline__ void put(int offset, float low, float high) const {
        const bool is_odd = lane_index() / 4 % 2;
        const float other = __shfl_xor_sync(FULL_WARP, is_odd ? low : high, 4);
        const u32 pair = is_odd ? pack_bf16(other, high) : pack_bf16(low, other);
        if (offset < there) *(u32*)(at + offset * COLUMN_BYTES) = pair;
    }
};
#else
struct Target {
    bf16* at;
    int there, ffn;

    __device__ __forceinline__ Target(bf16* h, int f, int first, int rows, int ffn_)
        : at(h + (size_t)first * ffn_ + f), there(rows - first), ffn(ffn_) {}

    __device__ __forceinline__ void put(int offset, float low, float high) const {
        if (offset < there) at[(size_t)offset * ffn] = to_bf16(low);
        if (offset + 1 < there) at[(size_t)(offset + 1) * ffn] = to_bf16(high);
    }
};
#endif

struct Gated {
    const float* scale;  // 1 / rms of each row, or null
    bf16* h;
    int rows, ffn;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const int f = unit.group * OUTPUTS / 2 + 8 * warp_index() + lane_index() / 4;
        if (f >= ffn) return;
        const Scales scales(unit, rows, scale);
        const Target to(h, f, unit.first_token + 2 * (lane_index() % 4), rows, ffn);
#pragma unroll
        for (int k = 0; k < SUMS / 2; k += AT_ONCE) {
            if (unit.first_token + offset(k) >= rows) return;  // all lanes
            float gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int low = low_of(k + i);
                gate[i] = sums[low] * scales.of[k + i], up[i] = sums[low + 2] * scales.of[k + i];
            }
            activate_all(ACT, gate, up);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += 2) to.put(offset(k + i), gate[i], gate[i + 1]);
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
