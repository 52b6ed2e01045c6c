/* end_linear, end_linear_add, end_gate_up: what linear_fast, linear_add_fast and gate_up_fast make of a row's
 *         sums, from those of all slices in f32 (wide_sums.cu): slices in order, then the
 *         bias, rounded once. end_and_lay: end_linear_add, and its rows laid for the product that comes next,
 *         whose tree is TREE_* then.
 * Grid:   (pieces of 1,024 outputs, rows), 256 threads, each of them PER neighbours; end_and_lay: a block a
 *         row.
 * Moves:  T*N*4 bytes a slice from L2, as many of bf16 in and out; end_and_lay: and laid.
 * Truth:  oracle.py linear, linear_add, gate_up. */
#include "activate.cuh"
#include "lay_rows.cuh"
#include "neighbours.cuh"

#ifndef ACT
#define ACT SILU
#endif

#ifndef SUMMED_SLICES  // of the sums that are here
#define SUMMED_SLICES TREE_SLICES
#endif

constexpr int PER = 4, END_THREADS = 256;
static_assert(END_THREADS == LAY_THREADS);  // end_and_lay does both

using Sums = Neighbours<float, PER>;

/* Sums of outputs n .. n + there - 1 of a row. y: (slices, rows, outputs). */
__device__ __forceinline__ Sums sums_of(const float* y, int row, int rows, int outputs, int n, int there) {
    const bool is_whole = is_aligned<PER>(y, outputs) && there >= PER;
    Sums sum, part;
#pragma unroll
    for (int slice = 0; slice < SUMMED_SLICES; ++slice) {
        const float* from = y + ((size_t)slice * rows + row) * outputs + n;
        if (is_whole)
            part.load<true>(from, PER);
        else
            part.load<false>(from, there);
#pragma unroll
        for (int i = 0; i < PER; ++i) sum.v[i] = slice ? sum.v[i] + part.v[i] : part.v[i];
    }
    return sum;
}

__device__ __forceinline__ int first_output() { return PER * (blockIdx.x * END_THREADS + threadIdx.x); }

/* x: y's, or null: out is what there was, plus the sums. bias, tap_row, taps: may be null. */
template <bool ADDS>
__device__ __forceinline__ void end_row(const float* y, const float* bias, const int* tap_row, bf16* out,
                                        bf16* taps, int outputs, int tap_at, int tap_cols) {
    griddep_launch();
    const int row = blockIdx.y, rows = gridDim.y, n = first_output(), there = min(PER, outputs - n);
    if (there <= 0) return;
    bf16* to = out + (size_t)row * outputs + n;
    const bool is_whole = is_aligned<PER>(out, outputs);
    Neighbours<bf16, PER> v{};
    Neighbours<float, PER> more{};
    if (bias) more.load<false>(bias + n, there);
    if (ADDS && is_whole) v.load_l2(to);  // the product, which let this start, had waited for what writes it
    griddep_wait();
    if (ADDS && !is_whole) v.load<false>(to, there);
    const int tap = ADDS && taps ? tap_row[row] : -1;
    const Sums sums = sums_of(y, row, rows, outputs, n, there);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const float sum = sums.v[i] + more.v[i];
        v.v[i] = to_bf16(ADDS ? to_f32(v.v[i]) + sum : sum);
    }
    is_whole ? v.store<true>(to, PER) : v.store<false>(to, there);
    if (tap >= 0) v.store<false>(taps + (size_t)tap * tap_cols + tap_at + n, there);
}

extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_linear(const float* y, const float* bias, bf16* out, int outputs) {
    end_row<false>(y, bias, nullptr, out, nullptr, outputs, 0, 0);
}

extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_linear_add(const float* y, const float* bias, const int* tap_row, bf16* x, bf16* taps, int outputs,
                   int tap_at, int tap_cols) {
    end_row<true>(y, bias, tap_row, x, taps, outputs, tap_at, tap_cols);
}

/* y's slices are SUMMED_SLICES; outputs is a multiple of 8. norm, eps, laid, squares, scale:
 * lay_wide_normed's, of x as it is then. */
extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_and_lay(const float* y, const float* bias, const int* tap_row, bf16* x, bf16* taps, int outputs,
                int tap_at, int tap_cols, const float* norm, float eps, bf16* laid, float* squares,
                float* scale) {
    extern __shared__ __align__(16) bf16 shared_row[];
    constexpr int EARLY = 4;  // pieces of a thread that are asked for before the wait
    griddep_launch();
    const int row = blockIdx.x, rows = gridDim.x;
    bf16* const to = x + (size_t)row * outputs;
    auto at = [&](int piece) { return PER * ((int)threadIdx.x + piece * END_THREADS); };
    const NormWeights weights(norm, outputs);
    Neighbours<bf16, PER> old[EARLY];
#pragma unroll
    for (int i = 0; i < EARLY; ++i)
        if (at(i) < outputs) old[i].load_l2(to + at(i));
    griddep_wait();
    const int tap = taps ? tap_row[row] : -1;
    auto end = [&](int n, Neighbours<bf16, PER> v, const Sums& sums) {
        Neighbours<float, PER> more{};
        if (bias) more.load<false>(bias + n, PER);
#pragma unroll
        for (int i = 0; i < PER; ++i) v.v[i] = to_bf16(to_f32(v.v[i]) + (sums.v[i] + more.v[i]));
        v.store<true>(to + n, PER), v.store<true>(shared_row + n, PER);
        if (tap >= 0) v.store<false>(taps + (size_t)tap * tap_cols + tap_at + n, PER);
    };
    Sums sums[EARLY];  // all loads are under way together
#pragma unroll
    for (int i = 0; i < EARLY; ++i)
        if (at(i) < outputs) sums[i] = sums_of(y, row, rows, outputs, at(i), PER);
#pragma unroll
    for (int i = 0; i < EARLY; ++i)
        if (at(i) < outputs) end(at(i), old[i], sums[i]);
    for (int n = at(EARLY); n < outputs; n += PER * END_THREADS) {
        Neighbours<bf16, PER> v;
        v.load_l2(to + n);
        end(n, v, sums_of(y, row, rows, outputs, n, PER));
    }
    lay_row(LaidRows{norm, eps, laid, squares, scale, rows, outputs}, row, shared_row, weights);
}

/* y: (slices, rows, 2 ffn, to a multiple of 16): 8 gate rows and the 8 up rows that go with them in turn.
 * scale: 1 / rms of each row, or null. */
extern "C" __global__ void __launch_bounds__(END_THREADS)
    end_gate_up(const float* y, const float* scale, bf16* h, int ffn) {
    griddep_launch();
    griddep_wait();
    const int row = blockIdx.y, rows = gridDim.y, outputs = (ffn + 7) / 8 * 16, f = first_output();
    const int there = min(PER, ffn - f), n = f / 8 * 16 + f % 8;
    if (there <= 0) return;
    const Sums gate = sums_of(y, row, rows, outputs, n, PER), up = sums_of(y, row, rows, outputs, n + 8, PER);
    const float r = scale ? scale[row] : 1.f;
    Neighbours<bf16, PER> out;
#pragma unroll
    for (int i = 0; i < PER; ++i) out.v[i] = to_bf16(activate(ACT, gate.v[i] * r, up.v[i] * r, 0.f, 0.f));
    out.store<false>(h + (size_t)row * ffn + f, there);
}
