/* The pieces of attend_fast.cu: which keys a group of rows sees, what a block does with 128 of them, and how
 * the pieces of a row become one.
 *
 * A leaf is 128 keys at an absolute multiple of 128, a unit some leaves at an absolute multiple of its size.
 * How many leaves make a unit is a row's own matter: as few as leave about `splits` units of the keys that it
 * sees. So the units grow with the context and the grid stays full, and still no bit of a row depends on the
 * rows beside it: rows whose units differ are different sets. */
#pragma once
#ifdef WGMMA  // sm_90a: products of four warps at a time, four tiles
#include "wgmma.cuh"
#else
#include "sm90.cuh"
#endif

#ifndef HEAD
#define HEAD 128
#endif
#ifndef TILES  // 16-row tiles of a group: 1, 2 or 4
#define TILES 4
#endif
#ifndef GROUP  // rows a group has at most
#define GROUP 16
#endif
#ifndef TERMS  // bf16 numbers that make one probability: 2 keep 16 bits of it
#define TERMS 2
#endif

constexpr int LEAF = 128, WARPS = 16, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * TILES;
constexpr int PARTS =
    WARPS / TILES;  // warps that share a tile: each scores own keys, then sums own components
constexpr int KEY_TILES = LEAF / 8 / PARTS;            // of 8 keys, of a warp
constexpr int UNITS = HEAD / 8, KEY_UNITS = LEAF / 8;  // 16-byte units of a head; of a row of probabilities
constexpr int N = (UNITS + PARTS - 1) / PARTS;         // tiles of 8 components of a warp, if it has any
constexpr int QUARTERS = HEAD / 32;                    // 32 components: what a warp merges of a row
constexpr int Q_BYTES = ROWS * HEAD * 2, LEAF_BYTES = LEAF * HEAD * 2, P_BYTES = ROWS * LEAF * 2;
constexpr int K_AT = Q_BYTES;  // the probabilities' terms take its place
constexpr int V_AT = K_AT + (LEAF_BYTES > TERMS * P_BYTES ? LEAF_BYTES : TERMS * P_BYTES);
constexpr int MAXIMA_AT = V_AT + LEAF_BYTES;               // f32 [ROWS][PARTS]
constexpr int SUMS_AT = MAXIMA_AT + 4 * ROWS * PARTS;      // f32 [ROWS][KEY_UNITS]
constexpr int TOTALS_AT = SUMS_AT + 4 * ROWS * KEY_UNITS;  // f32 [ROWS]
constexpr int ROWS_AT = TOTALS_AT + 4 * ROWS, SET_AT = ROWS_AT + GROUP * 24, SET_BYTES = 80;
constexpr int WHOLE = 1 << 20;    // leaves of a unit that is never cut
constexpr float NO_KEY = -3e38f;  // the largest score of no key at all; finite: differences are
constexpr float LOG2_E = 1.4426950408889634f;

extern __shared__ __align__(1024) char shared[];  // q, a leaf of K, a leaf of V, statistics, plans

struct Rows {
    const int *slot, *pos, *begin, *end;
    int count, group, window, causal, splits;
};

/* A row of the group: its keys [first, last), where they lie, how they are cut: unit: leaves of one; base:
 * the first one's number; pieces: how many. */
struct Row {
    int slot, first, last, unit, base, pieces;
};

/* What a block is: its kv head, its group's first row, which unit of a set, how manyth group and head. */
struct Place {
    int ratio, g, from, own, index;
};

/* Where a tile row's output lies. */
__device__ __forceinline__ bf16* output_at(bf16* o, int H, const Place& place, int tile_row) {
    int t = place.from + tile_row / place.ratio, head = place.g * place.ratio + tile_row % place.ratio;
    return o + ((size_t)t * H + head) * HEAD;
}

/* Rows of a group that share a slot, the size of a unit and the first one; what this block has of them.
 * In shared memory, for registers are short: a warp makes it, all read it. */
struct Set {
    Place place;
    u32 left, members;            // rows without a set yet; rows of this one
    int only, is_suspect;         // the row that this pass is for, -1: all; whether that will not do
    int slot, most;               // most: pieces of any row of the group
    int low, high;                // keys that any of them sees
    int shared_low, shared_high;  // keys that all of them see
    int leaf_first, leaf_end;     // of this block

    /* One warp, a lane a row; all loads of a row are under way together. Past L1, which may hold what an
     * earlier pass wrote: this may come before the wait for the kernel ahead. */
    __device__ __forceinline__ void start(Row* to, const Rows& rows, const Place& where) {
        const int lane = lane_index(), t = where.from + lane;
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
        u32 seeing = __ballot_sync(FULL_WARP, row.first < row.last);
        int pieces = __reduce_max_sync(FULL_WARP, row.pieces);
        if (lane == 0) left = seeing, members = 0, most = pieces, place = where;
        __syncwarp();
    }

    /* One warp. */
    __device__ __forceinline__ void next(const Row* rows) {
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
        int unit = first.base + place.own;
        left &= ~all, members = all, only = -1, is_suspect = 0, slot = first.slot;
        low = from, high = to, shared_low = last_from, shared_high = first_to;
        leaf_first = max(unit * first.unit, from / LEAF);
        leaf_end = min((unit + 1) * first.unit, (to - 1) / LEAF + 1);
    }

    /* By one warp: whether what is seen of the first leaf was there before this pass: no row of its slot, of
     * all of the launch, lies before the leaf's end. */
    __device__ __forceinline__ bool is_old(const Rows& rows) const {
        int oldest = 0x7fffffff;
        for (int t = lane_index(); t < rows.count; t += 32) {
            int own = __ldcg(rows.slot + t), pos = __ldcg(rows.pos + t);
            if (own == slot && pos >= 0) oldest = min(oldest, pos);
        }
        return min(high, (leaf_first + 1) * LEAF) <= __reduce_min_sync(FULL_WARP, oldest);
    }

    /* Pieces of a tile row, 0 where it is not of this pass or its keys end before this block's unit. */
    __device__ __forceinline__ int pieces_of(const Row* rows, int tile_row) const {
        const int at = tile_row / place.ratio;
        const bool is_member = at < GROUP && (only < 0 ? members : 1u << only) >> at & 1;
        const int pieces = is_member ? rows[at].pieces : 0;
        return place.own < pieces ? pieces : 0;
    }
};

/* The keys that a tile row sees; none where it is not of the set. */
__device__ __forceinline__ int2 keys_of(const Set& set, const Row* rows, int tile_row) {
    int at = tile_row / set.place.ratio;
    bool is_member = at < GROUP && set.members >> at & 1;
    return is_member ? make_int2(rows[at].first, rows[at].last) : make_int2(0, 0);
}

/* Where 16-byte unit `unit` of a row lies in a tile of Rows rows, which has 64 numbers of every row, then the
 * next 64. The exclusive or spreads a column of eight rows over all banks; wgmma.cuh has the same order.
 * Where `unit` is below 2 or 4, a multiple of that more, below 8, is an exclusive or too. */
template <int Rows>
__device__ __forceinline__ int unit_at(int at, int row, int unit) {
    return at + unit / 8 * (Rows * 128) + row * 128 + ((unit % 8 ^ (row & 7)) << 4);
}

/* A leaf of K or V, zeros outside [low, high). cache: of the slot and kv head. */
__device__ __forceinline__ void load_leaf(const bf16* cache, int to, int leaf, int low, int high) {
    const int thread = thread_again(), unit = thread % UNITS;
    int key = leaf * LEAF + thread / UNITS;
    cache += (size_t)key * HEAD + 8 * unit;
    to = unit_at<LEAF>(to, thread / UNITS, unit);
#pragma unroll
    for (int i = 0; i < LEAF * UNITS / THREADS; ++i, key += THREADS / UNITS) {
        bool is_seen = key >= low && key < high;
        cp_async_16_or_zero(shared + to + i * (THREADS / UNITS) * 128, cache + 8 * i * THREADS, is_seen);
    }
}

/* Rows of q as tile rows: query heads of kv head g side by side, row by row. */
__device__ __forceinline__ void load_q(const bf16* q, const Place& place, int T, int H) {
    const int thread = thread_again(), unit = thread % UNITS;
    for (int row = thread / UNITS; row < ROWS; row += THREADS / UNITS) {
        int t = place.from + row / place.ratio, head = place.g * place.ratio + row % place.ratio;
        const bf16* source = q + ((size_t)min(t, T - 1) * H + head) * HEAD + 8 * unit;
        cp_async_16_or_zero(shared + unit_at<ROWS>(0, row, unit), source, t < T);
    }
}

/* s = c q k^T: the tile's 16 rows, the warp's keys from `own` of the leaf on. */
__device__ __forceinline__ void scores(float (&s)[KEY_TILES][4], int tile, int own, float c) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.f;
#ifdef WGMMA
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step)
        wgmma<false>(s, wgmma_columns(shared + step / 4 * ROWS * 128 + step % 4 * 32),
                     wgmma_columns(shared + K_AT + step / 4 * LEAF * 128 + own * 128 + step % 4 * 32));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
#else
    const int lane = thread_again() % 32, i = lane / 8, r = lane % 8;
    const int q = unit_at<ROWS>(0, 16 * tile + i % 2 * 8 + r, i / 2);
    const int k = unit_at<LEAF>(K_AT, own + r, i);
#pragma unroll 1
    for (int step = 0; step < HEAD / 32; ++step) {
        const char* const rows = shared + step / 2 * ROWS * 128;
        uint4 a = ldmatrix_x4(rows + (q ^ step % 2 * 64)),
              later = ldmatrix_x4(rows + (q ^ (step % 2 * 64 + 32)));
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
            uint4 b = ldmatrix_x4(shared + step / 2 * LEAF * 128 + (k ^ step % 2 * 64) + 8 * n * 128);
            mma_bf16(s[n], a, b.x, b.y);
            mma_bf16(s[n], later, b.z, b.w);
        }
    }
#endif
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = __fmul_rn(s[n][e], c);
}

/* s = -infinity where its row does not see the key. key0: the first. */
__device__ __forceinline__ void mask(float (&s)[KEY_TILES][4], const Set& set, const Row* rows, int tile,
                                     int key0) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int2 range = keys_of(set, rows, 16 * tile + 8 * half + lane / 4);
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int key = key0 + 8 * n + 2 * (lane % 4) + e;
                if (key < range.x || key >= range.y) s[n][2 * half + e] = -infinity();
            }
    }
}

/* The largest of a row's scores that this warp has, for the others. */
__device__ __forceinline__ void tell_maxima(const float (&s)[KEY_TILES][4], int tile, int part) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = NO_KEY;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        const int row = 16 * tile + 8 * half + lane / 4;
        if (lane % 4 == 0) ((float*)(shared + MAXIMA_AT))[row * PARTS + part] = top;
    }
}

/* m becomes the row's largest score so far, shrink what earlier sums are to be multiplied by. */
__device__ __forceinline__ void take_maxima(float (&m)[2], float (&shrink)[2], int tile) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + 8 * half + lane / 4;
        const float4* from = (const float4*)(shared + MAXIMA_AT + 4 * row * PARTS);
        float top = m[half];
#pragma unroll
        for (int i = 0; i < PARTS / 4; ++i) {
            float4 four = from[i];
            top = fmaxf(top, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
        }
        shrink[half] = exp2_fast(__fsub_rn(m[half], top));
        m[half] = top;
    }
}

/* p = 2^(s - m) in bf16 terms, and the sum of each 8 keys, to shared memory. */
__device__ __forceinline__ void tell_probabilities(const float (&s)[KEY_TILES][4], const float (&m)[2],
                                                   int tile, int part) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + 8 * half + lane / 4;
        float* const sums = (float*)(shared + SUMS_AT) + row * KEY_UNITS;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
            const int unit = part * KEY_TILES + n;
            float x = exp2_fast(__fsub_rn(s[n][2 * half], m[half]));
            float y = exp2_fast(__fsub_rn(s[n][2 * half + 1], m[half]));
            const u32 high = pack_bf16(x, y);
            char* const to = shared + unit_at<ROWS>(K_AT, row, unit) + 4 * (lane % 4);
            *(u32*)to = high;
            if (TERMS == 2)
                *(u32*)(to + P_BYTES) = pack_bf16(__fsub_rn(x, low_f32(high)), __fsub_rn(y, high_f32(high)));
            else  // divided by what was added up
                x = low_f32(high), y = high_f32(high);
            float sum = __fadd_rn(x, y);
            sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 2));
            if (lane % 4 == 0) sums[unit] = sum;
        }
    }
}

/* A row's sum, which lies in shared memory: times shrink, and the leaf's added. is_first: it is zero. */
__device__ __forceinline__ void take_sums(bool is_first, const float (&shrink)[2], int tile) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * tile + 8 * half + lane / 4;
        const float4* from = (const float4*)(shared + SUMS_AT + 4 * row * KEY_UNITS);
        float* const total = (float*)(shared + TOTALS_AT) + row;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < KEY_UNITS / 4; ++i) {
            float4 four = from[i];
            sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)));
        }
        sum = __fmaf_rn(is_first ? 0.f : *total, shrink[half], sum);
        __syncwarp();  // four lanes have read it
        if (lane % 4 == 0) *total = sum;
    }
    __syncwarp();
}

/* o = o * shrink + p v: the leaf's keys in order, the warp's components, from first_unit on. */
__device__ __forceinline__ void values(float (&o)[N][4], const float (&shrink)[2], int tile, int first_unit) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = __fmul_rn(o[n][e], shrink[e / 2]);
#ifdef WGMMA
    const char* const v = shared + V_AT + first_unit / 8 * LEAF * 128 + first_unit % 8 * 16;
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < LEAF / 16; ++step)
#pragma unroll
        for (int term = 0; term < TERMS; ++term)
            wgmma<true>(o,
                        wgmma_columns(shared + K_AT + term * P_BYTES + step / 4 * ROWS * 128 + step % 4 * 32),
                        wgmma_columns(v + step * 16 * 128));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
#else
    const int lane = thread_again() % 32, i = lane / 8, r = lane % 8;
    const int p = unit_at<ROWS>(K_AT, 16 * tile + i % 2 * 8 + r, i / 2);
#pragma unroll 1
    for (int step = 0; step < LEAF / 32; ++step) {
        uint4 a[2][TERMS];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int term = 0; term < TERMS; ++term)
                a[j][term] = ldmatrix_x4(shared + step / 2 * ROWS * 128 + (p ^ (step % 2 * 64 + 32 * j)) +
                                         term * P_BYTES);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint4 b = ldmatrix_x4_trans(shared + unit_at<LEAF>(V_AT, 32 * step + lane, first_unit + n));
#pragma unroll
            for (int term = 0; term < TERMS; ++term) mma_bf16(o[n], a[0][term], b.x, b.y);
#pragma unroll
            for (int term = 0; term < TERMS; ++term) mma_bf16(o[n], a[1][term], b.z, b.w);
        }
    }
#endif
}

/* A sum of p v divided by that of p. Minus zero becomes zero: whether keys that a row does not see lay in its
 * tile must not show. */
__device__ __forceinline__ u32 divided(float x, float y, float r) {
    return pack_bf16(__fadd_rn(__fmul_rn(x, r), 0.f), __fadd_rn(__fmul_rn(y, r), 0.f));
}

// ---- pieces: a unit's share of every tile row, in memory that holds zeros between two launches ----

/* o [ROWS][HEAD], then m and l [ROWS][QUARTERS]: each word is written once and read once, by a thread that
 * asks until it is not zero and puts the zero back. So what comes is its own sign that it is there: no
 * counter, and no fence that waits for the writes before it. */
constexpr int PIECE = ROWS * (HEAD + 2 * QUARTERS);

/* The same number, and never a word of zeros. */
__device__ __forceinline__ float marked(float x) { return x == 0.f ? -0.f : x; }

__device__ __forceinline__ bool has_come(const float2& v) {
    return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0;
}

__device__ __forceinline__ bool has_come(const float4& v) {
    return has_come(make_float2(v.x, v.y)) && has_come(make_float2(v.z, v.w));
}

__device__ __forceinline__ float2* stats_at(float* piece, int tile_row, int quarter) {
    return (float2*)(piece + ROWS * HEAD) + tile_row * QUARTERS + quarter;
}

/* 32 components of a tile row of `count` pieces, the first at `pieces`, by a warp: 8 lanes a piece, 4
 * components a lane, 16 pieces at a time. Weights are relative to the largest score so far; lanes add up
 * their own pieces in order, then meet. */
__device__ __forceinline__ void merge(float* pieces, int count, int tile_row, int quarter, bf16* o) {
    constexpr int OWN = 5, STEP = 4 * PIECE;  // pieces of a lane, f32 from one to the next
    const int lane = thread_again() % 32;
    float m = NO_KEY, l = 0.f, sum[4] = {};
    pieces += lane / 8 * PIECE;
    float4* data = (float4*)(pieces + tile_row * HEAD + quarter * 32 + lane % 8 * 4);
    float2* stats = stats_at(pieces, tile_row, quarter);
    for (int left = count; left > 0; left -= 4 * OWN) {
        float2 stat[OWN];
        float4 part[OWN];
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            stat[j] = make_float2(NO_KEY, -0.f), part[j] = make_float4(-0.f, -0.f, -0.f, -0.f);
            if (4 * j + lane / 8 >= left) continue;
            stat[j] = load_relaxed(stats + j * (STEP / 2));
            part[j] = load_relaxed(data + j * (STEP / 4));
        }
#pragma unroll
        for (int j = 0; j < OWN; ++j)  // these come first: to ask for the few is easier on the memory
            while (!has_come(stat[j])) stat[j] = load_relaxed(stats + j * (STEP / 2));
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            while (!has_come(part[j])) part[j] = load_relaxed(data + j * (STEP / 4));
        __syncwarp();  // all lanes have the statistics, and the lanes are together again
        float top = m;
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            top = fmaxf(top, stat[j].x);
            if (4 * j + lane / 8 >= left) continue;
            data[j * (STEP / 4)] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (lane % 8 == 0) stats[j * (STEP / 2)] = make_float2(0.f, 0.f);
        }
        data += OWN * STEP / 4, stats += OWN * STEP / 2;
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 8));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 16));
        const float shrink = exp2_fast(__fsub_rn(m, top));
        m = top, l = __fmul_rn(l, shrink);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = __fmul_rn(sum[i], shrink);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const float w = exp2_fast(__fsub_rn(stat[j].x, top));
            const float v[4] = {part[j].x, part[j].y, part[j].z, part[j].w};
            l = __fmaf_rn(stat[j].y, w, l);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = __fmaf_rn(v[i], w, sum[i]);
        }
    }
#pragma unroll
    for (int step = 8; step <= 16; step *= 2) {
        l = __fadd_rn(l, __shfl_xor_sync(FULL_WARP, l, step));
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_WARP, sum[i], step));
    }
    const float r = __frcp_rn(l);
    if (lane < 8)
        *(uint2*)(o + quarter * 32 + lane * 4) =
            uint2{divided(sum[0], sum[1], r), divided(sum[2], sum[3], r)};
}
