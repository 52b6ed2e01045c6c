/* The pieces of attend_fast.cu: which keys a group of rows sees, and what four warps do with 144 of them.
 *
 * A leaf is 144 keys at an absolute multiple of 144 (48 where heads are large), a unit some leaves at an
 * absolute multiple of its size. How many leaves make a unit is a row's own matter: as few as leave about
 * `splits` units of the keys that it sees. So the units grow with the context and the grid stays full, and
 * still no bit of a row depends on the rows beside it: rows whose units differ are different sets. */
#pragma once
#ifdef WGMMA  // sm_90a: products of the four warps together
#include "wgmma.cuh"
#else
#include "sm90.cuh"
#endif

#ifndef HEAD
#define HEAD 128
#endif
#ifndef RING  // 1: there is a window, so the caches may be rings; without one no key is ever let go
#define RING 0
#endif
#ifndef SINKS  // 1: every query head has one
#define SINKS 0
#endif
#ifndef GROUP  // rows a group has at most
#define GROUP 16
#endif

constexpr int LEAF = HEAD > 128 ? 48 : 144;  // what registers and shared memory hold
constexpr int TEAMS = HEAD > 256 ? 2 : 1;    // of four warps: each all scores, and its part of the components
constexpr int WARPS = 4 * TEAMS, THREADS = 32 * WARPS;
constexpr int BLOCKS = HEAD > 256 ? 1 : 2;  // a multiprocessor
constexpr int ROWS = 64;                    // of a tile: a warp of a team has 16
constexpr int KEY_TILES = LEAF / 8;         // of 8 keys
constexpr int UNITS = HEAD / 8;             // 16-byte units of a head
constexpr int HALVES = HEAD / 64 / TEAMS;   // a tile has 64 numbers of every row, then the next 64; a team's
constexpr int LEAF_BYTES = LEAF * HEAD * 2;
constexpr int K_AT = ROWS * HEAD * 2, V_AT = K_AT + LEAF_BYTES, ROWS_AT = V_AT + LEAF_BYTES,
              TILE_ROWS_AT = ROWS_AT + GROUP * 24, SET_AT = TILE_ROWS_AT + ROWS * 4, SET_BYTES = 64,
              SINKS_AT = SET_AT + SET_BYTES;  // of shared memory
constexpr int COUNTERS = 4096;                // u32 at the front of work
constexpr int WHOLE = 1 << 20;                // leaves of a unit that is never cut
constexpr float NO_KEY = -3e38f;              // the largest score of no key at all; finite: differences are
constexpr float LOG2_E = 1.4426950408889634f;

extern __shared__ __align__(1024) char shared[];  // q, a leaf of K, a leaf of V, plans

/* The warp of a team, and the first of its halves: asked for where they are used. */
__device__ __forceinline__ int team_warp() {
    return TEAMS > 1 ? thread_again() / 32 % 4 : thread_again() / 32;
}
__device__ __forceinline__ int first_half() { return TEAMS > 1 ? thread_again() / 128 * HALVES : 0; }

struct Rows {
    const int *slot, *pos, *begin, *end;
    int count, group, window, causal, splits;
};

/* A row of the group: its keys [first, last), in `pieces` units of `unit` leaves from number base on. */
struct Row {
    int slot, first, last, unit, base, pieces;
};

/* What a block is: its kv head, its group's first row, which unit of a set now, how manyth group and head. */
struct Place {
    int ratio, g, from, own, index;
};

/* A tile row's row of the group and its query head among the kv head's: a division, made once. */
struct TileRow {
    short at, head;
};

__device__ __forceinline__ TileRow tile_row_of(int tile_row) {
    return ((const TileRow*)(shared + TILE_ROWS_AT))[tile_row];
}

/* The sink of a tile row's query head; an exponent of two, as m is. */
__device__ __forceinline__ float* sink_at(int tile_row) { return (float*)(shared + SINKS_AT) + tile_row; }

/* Where a tile row's q and output lie. */
__device__ __forceinline__ size_t head_at(int H, const Place& place, int tile_row) {
    const TileRow of = tile_row_of(tile_row);
    return ((size_t)(place.from + of.at) * H + place.g * place.ratio + of.head) * HEAD;
}

/* Rows of a group that share slot, size of a unit and first one; what this block has. A warp makes it. */
struct Set {
    u32 seeing, left, members;    // rows that see keys; those without a set yet; rows of this one
    int only;                     // the row that this pass is for, -1: all
    int slot, most;               // most: pieces of any row of the group
    int low, high;                // keys that any of them sees
    int shared_low, shared_high;  // keys that all of them see
    int leaf_first, leaf_end;     // of this block's unit
    int first_row;                // of the caches: where the first leaf begins
    int old_end;  // keys of the first leaf before that are there before the kernel ahead has ended

    /* One warp, a lane a row; all loads of a row are under way together. Past L1, which may hold what an
     * earlier pass wrote: this may come before the wait for the kernel ahead. */
    __device__ __forceinline__ void start(Row* to, const Rows& rows, const Place& place) {
        const int lane = lane_index(), t = place.from + lane;
        Row row{-1, 0, 0, 1, 0, 0};
        if (lane < rows.group && t < rows.count) {
            int pos = __ldcg(rows.pos + t), begin = __ldcg(rows.begin + t), end = __ldcg(rows.end + t);
            row.slot = __ldcg(rows.slot + t);
            if (pos >= 0) {
                row.first = rows.window ? min(begin, max(0, pos - rows.window + 1)) : 0;
                row.last = rows.causal ? pos + 1 : rows.window ? min(end, pos + rows.window) : end;
            }
            int leaves = (row.last - 1) / LEAF - row.first / LEAF + 1;
            row.unit = rows.splits ? max(1, (leaves + rows.splits - 1) / rows.splits) : WHOLE;
            row.base = row.first / LEAF / row.unit;
            if (row.first < row.last) row.pieces = (row.last - 1) / LEAF / row.unit - row.base + 1;
        }
        if (lane < GROUP) to[lane] = row;
        u32 sees = __ballot_sync(FULL_WARP, row.first < row.last);
        int pieces = __reduce_max_sync(FULL_WARP, row.pieces);
        if (lane == 0) {
            seeing = left = sees, members = 0, most = pieces;
            leaf_first = leaf_end = old_end = 0;
        }
        __syncwarp();
    }

    /* One warp: the sets once more, for another unit. */
    __device__ __forceinline__ void again() {
        __syncwarp();
        if (lane_index() == 0) left = seeing;
        __syncwarp();
    }

    /* One warp. */
    __device__ __forceinline__ void next(const Row* rows, int own, int S) {
        const int lane = thread_again() % 32, leader = __ffs(left) - 1;
        Row row = rows[lane % GROUP], first = rows[leader];
        bool is_mine =
            (left >> lane & 1) && row.slot == first.slot && row.unit == first.unit && row.base == first.base;
        u32 all = __ballot_sync(FULL_WARP, is_mine);
        int from = __reduce_min_sync(FULL_WARP, is_mine ? row.first : 0x7fffffff);
        int to = __reduce_max_sync(FULL_WARP, is_mine ? row.last : 0);
        int last_from = __reduce_max_sync(FULL_WARP, is_mine ? row.first : 0);
        int first_to = __reduce_min_sync(FULL_WARP, is_mine ? row.last : 0x7fffffff);
        __syncwarp();  // a shuffle alone orders no memory
        if (lane) return;
        int unit = first.base + own;
        left &= ~all, members = all, only = -1, slot = first.slot;
        old_end = 0, low = from, high = to, shared_low = last_from, shared_high = first_to;
        leaf_first = max(unit * first.unit, from / LEAF);
        leaf_end = min((unit + 1) * first.unit, (to - 1) / LEAF + 1);
        if constexpr (RING) first_row = row_of_key(leaf_first * LEAF, S);
    }

    /* The row of the caches where a leaf of this block begins; a set's keys go around a ring once at most. */
    __device__ __forceinline__ int row_of_leaf(int leaf, int S) const {
        if constexpr (!RING) return leaf * LEAF;
        const int row = first_row + (leaf - leaf_first) * LEAF;
        return row < S ? row : row - S;
    }

    /* By one warp: keys before the first that this pass writes, of all rows of the launch, are old. own_slot,
     * own_pos: of row lane_index(), read with the rest. */
    __device__ __forceinline__ void find_old(const Rows& rows, int own_slot, int own_pos) {
        int first = 0x7fffffff;
        for (int t = lane_index(); t < rows.count; t += 32) {
            if (t >= 32) own_slot = __ldcg(rows.slot + t), own_pos = __ldcg(rows.pos + t);
            if (own_slot == slot && own_pos >= 0) first = min(first, own_pos);
        }
        first = __reduce_min_sync(FULL_WARP, first);
        if (lane_index() == 0) old_end = first;
    }

    /* The row of a tile row, null where it is not of this set. */
    __device__ __forceinline__ const Row* row_of(const Row* rows, int tile_row) const {
        const int at = tile_row_of(tile_row).at;
        return at < GROUP && members >> at & 1 ? rows + at : nullptr;
    }

    /* Pieces of a tile row, 0 where it is not of this pass or its keys end before this block's unit. */
    __device__ __forceinline__ int pieces_of(const Row* rows, int own, int tile_row) const {
        const Row* row = row_of(rows, tile_row);
        const bool is_here = row && (only < 0 || row == rows + only) && own < row->pieces;
        return is_here ? row->pieces : 0;
    }
};

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
    const int thread = thread_again(), unit = thread % UNITS, key = leaf * LEAF + thread / UNITS;
    const bf16* const from = cache + (size_t)(row + thread / UNITS) * HEAD + 8 * unit;
    char* const at = shared + unit_at<LEAF>(to, thread / UNITS, unit);
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

/* s = q k^T: the warp's 16 rows, all keys of the leaf. */
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
    wgmma_wait<0>();
    wgmma_pin(s);
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

/* s = -infinity where its row does not see the key. key0: the first. */
__device__ __forceinline__ void mask(float (&s)[KEY_TILES][4], const Set& set, const Row* rows, int key0) {
    const int lane = thread_again() % 32, first = key0 + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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

/* s becomes p = 2^(c s - m), o and l are brought to the new m. c: over zero. l is this thread's share. */
__device__ __forceinline__ void soften(float (&s)[KEY_TILES][4], Sums& o, float (&m)[2], float (&l)[2],
                                       float c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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
    u32 high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
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
