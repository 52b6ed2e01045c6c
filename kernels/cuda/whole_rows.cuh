/* A row by a block of 256 threads, in pieces of 4 numbers that stay in registers: what normed ends share. */
#pragma once
#include "neighbours.cuh"
#include "sm90.cuh"

constexpr int ROW_THREADS = 256, PER = 4, MOST_PIECES = 8;  // of a thread: rows of up to 8,192 numbers

using Piece = float[PER];

/* Four bf16 or f32 of a row as floats; width is a multiple of 4. */
template <class T>
__device__ __forceinline__ void load_piece(Piece& to, const T* from) {
    const auto raw = *(const Neighbours<T, PER>*)from;
#pragma unroll
    for (int i = 0; i < PER; ++i) to[i] = to_f32(raw.v[i]);
}

/* f(piece number, first column) for each of this thread's pieces. */
template <class F>
__device__ __forceinline__ void each_piece(int width, const F& f) {
#pragma unroll
    for (int k = 0; k < MOST_PIECES; ++k) {
        const int n = PER * (threadIdx.x + k * ROW_THREADS);
        if (n < width) f(k, n);
    }
}

__device__ __forceinline__ float squares_of(const Piece& v) {
    return fmaf(v[0], v[0], v[1] * v[1]) + fmaf(v[2], v[2], v[3] * v[3]);
}

/* x = scale (x + v), and the same among the taps. scale, taps: may be null. */
struct NewRow {
    bf16 *x, *tap;
    float scale;

    __device__ __forceinline__ NewRow(bf16* x_, const float* scale_, const int* tap_row, bf16* taps,
                                      int tap_at, int tap_cols, int row, int width) {
        const int to = taps ? tap_row[row] : -1;
        x = x_ + (size_t)row * width, scale = scale_ ? scale_[0] : 1.f;
        tap = to >= 0 ? taps + (size_t)to * tap_cols + tap_at : nullptr;
    }

    __device__ __forceinline__ void add(int n, const Piece& v) const {
        Piece old;
        load_piece(old, x + n);
        Neighbours<bf16, PER> next;
#pragma unroll
        for (int i = 0; i < PER; ++i) next.v[i] = to_bf16(scale * (old[i] + v[i]));
        next.template store<true>(x + n, PER);
        if (!tap) return;
#pragma unroll
        for (int i = 0; i < PER; ++i) tap[n + i] = next.v[i];
    }
};
