/* What four warps do with a leaf of keys (attend_plan.cuh): load it, score it, add its values. */
#pragma once
#include "attend_plan.cuh"

/* Where a 16-byte unit of a row lies in a tile of Rows rows. The exclusive or spreads a column of 8 rows over
 * all banks, as in wgmma.cuh. Where `unit` is below 2, any even number below 8 more is an exclusive or too.
 */
template <int Rows>
__device__ __forceinline__ int unit_at(int at, int row, int unit) {
    return at + unit / 8 * (Rows * 128) + row * 128 + ((unit % 8 ^ (row & 7)) << 4);
}

/* The same unit `step` times Rows on, of a row below Rows: 4, or a multiple of 8. */
template <int Rows>
__device__ __forceinline__ char* steps_on(char* at, int step) {
    if constexpr (Rows % 8) at = (char*)((size_t)at ^ (step & 1) << 6);
    return at + step * Rows * 128;
}

/* The keys [first, last) of a leaf of K or V, zeros outside [low, high). cache: of the slot and kv head, in
 * which the leaf begins at `row`. */
__device__ __forceinline__ void load_leaf(const bf16* cache, int row, int to, int leaf, int low, int high,
                                          int first, int last) {
    constexpr int STEP = THREADS / UNITS;
    const int thread = thread_again(), unit = thread % UNITS, key0 = leaf * LEAF, key = key0 + thread / UNITS;
    const bf16* const from = cache + (size_t)(row + thread / UNITS) * HEAD + 8 * unit;
    char* const at = shared + unit_at<LEAF>(to, thread / UNITS, unit);
    if (max(low, first) <= key0 && min(high, last) >= key0 + LEAF) {  // most leaves: no question a key
#pragma unroll
        for (int i = 0; i < LEAF / STEP; ++i) cp_async_16(steps_on<STEP>(at, i), from + i * STEP * HEAD);
        return;
    }
    low -= key, high -= key, first -= key, last -= key;
#pragma unroll
    for (int i = 0; i < LEAF / STEP; ++i)
        if (i * STEP >= first && i * STEP < last)
            cp_async_16_or_zero(steps_on<STEP>(at, i), from + i * STEP * HEAD,
                                i * STEP >= low && i * STEP < high);
}

/* Until all of this thread's copies but the newest group are there, for the products to come. */
__device__ __forceinline__ void wait_for_older() {
    cp_async_wait<1>();
#ifdef WGMMA
    fence_async_shared();
#endif
}

/* Rows of q as tile rows: query heads of kv head g side by side, row by row. */
__device__ __forceinline__ void load_q(const bf16* q, const Place& place, int T, int H) {
    constexpr int STEP = THREADS / UNITS;
    const int thread = thread_again(), unit = thread % UNITS, row = thread / UNITS;
    char* const to = shared + unit_at<ROWS>(0, row, unit);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        const bool is_there = place.from + tile_row_of(row + i * STEP).at < T;
        const size_t at = is_there ? head_at(H, place, row + i * STEP) : 0;
        cp_async_16_or_zero(steps_on<STEP>(to, i), q + at + 8 * unit, is_there);
    }
}

/* s = q k^T: the warp's 16 rows, all keys of the leaf. With WGMMA it is under way until
 * scores_done(). */
__device__ __forceinline__ void scores(float (&s)[KEY_TILES][4]) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.f;
#ifdef WGMMA
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step)
        wgmma(s, wgmma_columns(shared + step / 4 * ROWS * 128 + step % 4 * 32),
              wgmma_columns(shared + K_AT + step / 4 * LEAF * 128 + step % 4 * 32));
    wgmma_commit();
#else
    const int lane = thread_again() % 32, i = lane / 8, r = lane % 8;
    const int q = unit_at<ROWS>(0, team_warp() * 16 + i % 2 * 8 + r, i / 2);
    const int k = unit_at<LEAF>(K_AT, i / 2 * 8 + r, i % 2);
#pragma unroll 1
    for (int step = 0; step < HEAD / 16; ++step) {
        uint4 a = ldmatrix_x4(shared + step / 4 * ROWS * 128 + (q ^ step % 4 * 32));
#pragma unroll
        for (int n = 0; n < KEY_TILES / 2; ++n) {
            uint4 b = ldmatrix_x4(shared + step / 4 * LEAF * 128 + (k ^ step % 4 * 32) + 16 * n * 128);
            mma_bf16(s[2 * n], a, b.x, b.y);
            mma_bf16(s[2 * n + 1], a, b.z, b.w);
        }
    }
#endif
}

__device__ __forceinline__ void scores_done(float (&s)[KEY_TILES][4]) {
#ifdef WGMMA
    wgmma_wait<0>();
    wgmma_pin(s);
#endif
}

/* s = -infinity where its row does not see the key. key0: the first. */
__device__ __forceinline__ void mask(float (&s)[KEY_TILES][4], const Set& set, const Row* rows, int key0) {
    const int lane = thread_again() % 32, first = key0 + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < SIDES; ++half) {
        const Row* row = set.row_of(rows, team_warp() * 16 + 8 * half + lane / 4);
        const int2 range = row ? make_int2(row->first - first, row->last - first) : make_int2(0, 0);
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + e < range.x || 8 * n + e >= range.y) s[n][2 * half + e] = -infinity();
    }
}

typedef float Sums[HALVES][8][4];  // tiles of 8 components

/* By all threads: whether any row of the set has sums that are no numbers. */
__device__ __forceinline__ bool are_spoilt(const Sums& sums, const Set& set, const Row* rows, int first_row) {
    bool is_suspect = false;
#pragma unroll
    for (int e = 0; e < SIDES; ++e) {
        float zero = 0.f;
#pragma unroll
        for (int n = 0; n < 8 * HALVES; ++n)
            zero = __fmaf_rn(sums[n / 8][n % 8][2 * e], 0.f,
                             __fmaf_rn(sums[n / 8][n % 8][2 * e + 1], 0.f, zero));
        is_suspect |= zero != 0.f && set.row_of(rows, first_row + 8 * e);
    }
    return __syncthreads_or(is_suspect);
}

/* Zeros for rows of the group that see nothing, by threads first, first + step ... */
__device__ __forceinline__ void clear(const Row* rows, const Place& place, int group, int T, int H, bf16* o,
                                      int first, int step) {
    for (int i = first; i < ROWS * UNITS; i += step) {
        const int tile_row = i / UNITS, at = tile_row_of(tile_row).at;
        if (at < group && place.from + at < T && !rows[at].pieces)
            *(uint4*)(o + head_at(H, place, tile_row) + i % UNITS * 8) = uint4{0, 0, 0, 0};
    }
}

/* s becomes p = 2^(c s - m), o and l are brought to the new m. c: over zero. l is this thread's share. */
__device__ __forceinline__ void soften(float (&s)[KEY_TILES][4], Sums& o, float (&m)[2], float (&l)[2],
                                       float c) {
#pragma unroll
    for (int half = 0; half < SIDES; ++half) {
        float top = s[0][2 * half];
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        top = fmaxf(m[half], __fmul_rn(top, c));
        const float shrink = exp2_fast(__fsub_rn(m[half], top));
        float sum = 0.f;
        m[half] = top;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
            float& x = s[n][2 * half];
            float& y = s[n][2 * half + 1];
            x = exp2_fast(__fmaf_rn(x, c, -top)), y = exp2_fast(__fmaf_rn(y, c, -top));
            sum = __fadd_rn(sum, __fadd_rn(x, y));
        }
        l[half] = __fmaf_rn(l[half], shrink, sum);
#pragma unroll
        for (int i = 0; i < HALVES; ++i)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) o[i][n][e] = __fmul_rn(o[i][n][e], shrink);
    }
}

/* The A operands of two tiles of p: two bf16 terms keep 16 bits of a probability. */
__device__ __forceinline__ void terms_of(const float (&p)[KEY_TILES][4], int step, uint4 (&terms)[2]) {
    u32 high[4] = {}, low[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j += 3 - SIDES) {
        float x = p[2 * step + j / 2][2 * (j % 2)], y = p[2 * step + j / 2][2 * (j % 2) + 1];
        high[j] = pack_bf16(x, y);
        low[j] = pack_bf16(__fsub_rn(x, low_f32(high[j])), __fsub_rn(y, high_f32(high[j])));
    }
    terms[0] = make_uint4(high[0], high[1], high[2], high[3]);
    terms[1] = make_uint4(low[0], low[1], low[2], low[3]);
}

/* o += p v: the leaf's keys in order. Two tiles of p are an A operand as they are. With WGMMA it is under
 * way: the terms, which it reads meanwhile, take p's place. */
__device__ __forceinline__ void values(Sums& o, const float (&p)[KEY_TILES][4],
                                       uint4 (&terms)[KEY_TILES / 2][2]) {
    const int first = first_half();
#ifdef WGMMA
#pragma unroll
    for (int step = 0; step < KEY_TILES / 2; ++step) terms_of(p, step, terms[step]);
#pragma unroll
    for (int i = 0; i < HALVES; ++i) wgmma_pin(o[i]);
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_TILES / 2; ++step)
#pragma unroll
            for (int term = 0; term < 2; ++term)
                wgmma_turned(o[i], terms[step][term],
                             wgmma_columns(shared + V_AT + (first + i) * LEAF * 128 + step * 16 * 128));
        wgmma_commit();
    }
#else
    const int lane = thread_again() % 32, i = lane / 8;
    const int v = unit_at<LEAF>(V_AT + first * LEAF * 128, i % 2 * 8 + lane % 8, i / 2);
#pragma unroll
    for (int step = 0; step < KEY_TILES / 2; ++step) {
        uint4(&own)[2] = terms[step];
        terms_of(p, step, own);
#pragma unroll
        for (int n = 0; n < 4 * HALVES; ++n) {
            uint4 b = ldmatrix_x4_trans(shared + n / 4 * LEAF * 128 + (v ^ n % 4 * 32) + 16 * step * 128);
#pragma unroll
            for (int term = 0; term < 2; ++term) {
                mma_bf16(o[n / 4][2 * n % 8], own[term], b.x, b.y);
                mma_bf16(o[n / 4][2 * n % 8 + 1], own[term], b.z, b.w);
            }
        }
    }
#endif
}

/* The half `Half` of o is whole, and those before it. */
template <int Half>
__device__ __forceinline__ void values_done(Sums& o) {
#ifdef WGMMA
    wgmma_wait<HALVES - 1 - Half>();
    wgmma_pin(o[Half]);
#endif
}
