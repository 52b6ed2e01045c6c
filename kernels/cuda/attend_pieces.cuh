/* The pieces of attend_fast.cu: which keys a group of rows sees, and what a warp does with 64 of them.
 *
 * A leaf is 128 keys at an absolute multiple of 128, a unit some leaves at an absolute multiple of its size.
 * How many leaves make a unit is a row's own matter: as few as leave about `splits` units of the keys that it
 * sees. So the units grow with the context and the grid stays full, and still no bit of a row depends on the
 * rows beside it: rows whose units differ are different sets. */
#pragma once
#include "neighbours.cuh"
#include "sm90.cuh"

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
#ifndef COLUMN_TILES  // of 8 keys, between two looks at the largest score
#define COLUMN_TILES 4
#endif

constexpr int LEAF = 128, HALF = LEAF / 2, THREADS = 256;
constexpr int ROWS = 16 * TILES;
constexpr int SPREAD =
    4 / TILES;                   // warps that share a tile and a half: all score it, each has own components
constexpr int UNITS = HEAD / 8;  // 16-byte units of a head
constexpr int COLUMNS = HEAD / SPREAD, N = COLUMNS / 8;      // components of a warp, in tiles of 8
constexpr int PART = 8 * COLUMN_TILES, PARTS = HALF / PART;  // keys of a warp's step
constexpr int Q_BYTES = ROWS * HEAD * 2, LEAF_BYTES = LEAF * HEAD * 2;
constexpr int K_AT = Q_BYTES, V_AT = K_AT + LEAF_BYTES, ROWS_AT = V_AT + LEAF_BYTES,
              SET_AT = ROWS_AT + GROUP * 24, SET_BYTES = 80;  // of shared memory
constexpr int COUNTERS = 4096;                                // u32 at the front of work
constexpr int WHOLE = 1 << 20;                                // leaves of a unit that is never cut
constexpr float NO_KEY = -3e38f;  // the largest score of no key at all; finite: differences are
constexpr float LOG2_E = 1.4426950408889634f;

/* Aligned no more than it needs: two blocks fill a multiprocessor to the last 128 bytes. */
extern __shared__ __align__(16) char shared[];  // q, a leaf of K, a leaf of V, plans

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

    /* One warp, a lane a row; all loads of a row are under way together. */
    __device__ __forceinline__ void start(Row* to, const Rows& rows, const Place& where) {
        const int lane = lane_index(), t = where.from + lane;
        Row row{-1, 0, 0, 1, 0, 0};
        if (lane < rows.group && t < rows.count) {
            int pos = rows.pos[t], begin = rows.begin[t], end = rows.end[t];
            row.slot = rows.slot[t];
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
};

/* The keys that a tile row sees; none where it is not of the set. */
__device__ __forceinline__ int2 keys_of(const Set& set, const Row* rows, int tile_row) {
    int at = tile_row / set.place.ratio;
    bool is_member = at < GROUP && set.members >> at & 1;
    return is_member ? make_int2(rows[at].first, rows[at].last) : make_int2(0, 0);
}

/* 16-byte unit of a row-major tile. The exclusive or spreads a column of eight rows over all banks. */
__device__ __forceinline__ char* unit_at(char* tile, int row, int unit) {
    return tile + row * UNITS * 16 + ((unit ^ (row & 7)) << 4);
}

/* A leaf of K or V, zeros outside [low, high). cache: of the slot and kv head. */
__device__ __forceinline__ void load_leaf(const bf16* cache, char* to, int leaf, int low, int high) {
    const int thread = thread_again(), unit = thread % UNITS;
    int key = leaf * LEAF + thread / UNITS;
    cache += (size_t)key * HEAD + 8 * unit;
    to = unit_at(to, thread / UNITS, unit);
#pragma unroll
    for (int i = 0; i < LEAF * UNITS / THREADS; ++i, key += THREADS / UNITS) {
        bool is_seen = key >= low && key < high;
        cp_async_16_or_zero(to + 16 * i * THREADS, cache + 8 * i * THREADS, is_seen);
    }
}

/* Rows of q as tile rows: query heads of kv head g side by side, row by row. By the threads from
 * first_thread. */
__device__ __forceinline__ void load_q(const bf16* q, char* to, int from, int T, int H, int ratio, int g,
                                       int first_thread) {
    const int thread = thread_again() - first_thread, unit = thread % UNITS;
    for (int row = thread / UNITS; row < ROWS; row += (THREADS - first_thread) / UNITS) {
        int t = from + row / ratio;
        const bf16* source = q + ((size_t)min(t, T - 1) * H + g * ratio + row % ratio) * HEAD + 8 * unit;
        cp_async_16_or_zero(unit_at(to, row, unit), source, t < T);
    }
}

/* Where a lane's row of a tile begins for ldmatrix: with `unit`, and any even unit more is an exclusive or.
 * So a register serves a whole tile. `shared` is what it counts from. */
__device__ __forceinline__ int lane_offset(int at, int row, int unit) {
    return at + row * UNITS * 16 + ((unit ^ (row & 7)) << 4);
}

/* s = c q k^T: the tile's 16 rows, 8 * COLUMN_TILES keys. */
__device__ __forceinline__ void scores(float (&s)[COLUMN_TILES][4], int q, int k, float c) {
    const int lane = thread_again() % 32, i = lane / 8, r = lane % 8;
    q = lane_offset(q, i % 2 * 8 + r, i / 2), k = lane_offset(k, i / 2 * 8 + r, i % 2);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.f;
#pragma unroll 4
    for (int step = 0; step < HEAD / 16; ++step) {
        uint4 a = ldmatrix_x4(shared + (q ^ 32 * step));
#pragma unroll
        for (int n = 0; n < COLUMN_TILES / 2; ++n) {
            uint4 b = ldmatrix_x4(shared + (k ^ 32 * step) + 16 * n * UNITS * 16);
            mma_bf16(s[2 * n], a, b.x, b.y);
            mma_bf16(s[2 * n + 1], a, b.z, b.w);
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = __fmul_rn(s[n][e], c);
}

/* s = -infinity where its row does not see the key. key0: the first. */
__device__ __forceinline__ void mask(float (&s)[COLUMN_TILES][4], const Set& set, const Row* rows, int tile,
                                     int key0) {
    const int lane = thread_again() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int2 range = keys_of(set, rows, 16 * tile + 8 * half + lane / 4);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int key = key0 + 8 * n + 2 * (lane % 4) + e;
                if (key < range.x || key >= range.y) s[n][2 * half + e] = -infinity();
            }
    }
}

/* s becomes p = 2^(s - m), o and l are brought to the new m. l is this thread's share. */
__device__ __forceinline__ void soften(float (&s)[COLUMN_TILES][4], float (&o)[N][4], float (&m)[2],
                                       float (&l)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = m[half];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        float shrink = exp2_fast(__fsub_rn(m[half], top)), sum = 0.f;
        m[half] = top;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            float& x = s[n][2 * half];
            float& y = s[n][2 * half + 1];
            x = exp2_fast(__fsub_rn(x, top)), y = exp2_fast(__fsub_rn(y, top));
            if (TERMS == 1) {  // divided by what was added up
                u32 pair = pack_bf16(x, y);
                x = low_f32(pair), y = high_f32(pair);
            }
            sum = __fadd_rn(sum, __fadd_rn(x, y));
        }
        l[half] = __fmaf_rn(l[half], shrink, sum);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) o[n][e] = __fmul_rn(o[n][e], shrink);
    }
}

/* o += p v: these keys, the warp's components. Two column tiles of p, as `soften` left them, are an A operand
 * as they are. v: the first key's row. first_unit: of the warp's components. */
__device__ __forceinline__ void values(float (&o)[N][4], const float (&p)[COLUMN_TILES][4], int v,
                                       int first_unit) {
    const int lane = thread_again() % 32, i = lane / 8, r = lane % 8;
    v = lane_offset(v, i % 2 * 8 + r, first_unit + i / 2);
#pragma unroll
    for (int step = 0; step < COLUMN_TILES / 2; ++step) {
        u32 high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float x = p[2 * step + j / 2][2 * (j % 2)], y = p[2 * step + j / 2][2 * (j % 2) + 1];
            high[j] = pack_bf16(x, y);
            low[j] = pack_bf16(__fsub_rn(x, low_f32(high[j])), __fsub_rn(y, high_f32(high[j])));
        }
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            uint4 b = ldmatrix_x4_trans(shared + (v ^ 32 * n) + 16 * step * UNITS * 16);
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                const u32* a = term ? low : high;
                mma_bf16(o[2 * n], make_uint4(a[0], a[1], a[2], a[3]), b.x, b.y);
                mma_bf16(o[2 * n + 1], make_uint4(a[0], a[1], a[2], a[3]), b.z, b.w);
            }
        }
    }
}

/* Weights of two pieces of one row that meet: the earlier's, the later's; m becomes the larger maximum. */
struct Meeting {
    float earlier, later;

    __device__ __forceinline__ Meeting(float& m, float later_m) {
        float top = fmaxf(m, later_m);
        earlier = exp2_fast(__fsub_rn(m, top)), later = exp2_fast(__fsub_rn(later_m, top));
        m = top;
    }
    __device__ __forceinline__ float operator()(float a, float b) const {
        return __fmaf_rn(b, later, __fmul_rn(a, earlier));
    }
};

/* A sum of p v divided by that of p. Minus zero becomes zero: whether keys that a row does not see lay in its
 * tile must not show. */
__device__ __forceinline__ u32 divided(float x, float y, float r) {
    return pack_bf16(__fadd_rn(__fmul_rn(x, r), 0.f), __fadd_rn(__fmul_rn(y, r), 0.f));
}

/* The piece of a unit in the workspace: o of every tile row, then m and l. */
constexpr int PIECE = ROWS * (HEAD + 2);
__device__ __forceinline__ float* piece_at(float* work, int index) {
    return work + COUNTERS + (size_t)index * PIECE;
}

/* A tile row of `count` pieces, the first at `pieces`, by a warp: a lane has HEAD / 32 components. Their
 * weights are relative to the largest score of all, the sums run over the pieces in order. */
__device__ __forceinline__ void merge(const float* pieces, int count, int tile_row, bf16* o) {
    constexpr int OWN = HEAD / 32, BATCH = 16;  // pieces whose loads are under way together
    const int lane = thread_again() % 32;
    auto stat = [&](int c) {
        const float* at = pieces + (size_t)min(c, count - 1) * PIECE + ROWS * HEAD + 2 * tile_row;
        return c < count ? __ldcg((const float2*)at) : make_float2(NO_KEY, 0.f);
    };
    Neighbours<float, OWN> part[BATCH];
    auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const float* at =
                pieces + (size_t)min(first + j, count - 1) * PIECE + tile_row * HEAD + OWN * lane;
            part[j].load_l2(at);
        }
    };
    float2 own = stat(lane);
    load(0);
    float top = own.x;
    for (int c = lane + 32; c < count; c += 32) top = fmaxf(top, stat(c).x);
    top = warp_max(top);
    float weight = 0.f, share = 0.f, l = 0.f, sum[OWN] = {};
    for (int first = 0; first < count; first += BATCH) {
        if (first % 32 == 0) {
            if (first) own = stat(first + lane);
            weight = exp2_fast(__fsub_rn(own.x, top)), share = __fmul_rn(own.y, weight);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            float w = __shfl_sync(FULL_WARP, weight, (first + j) % 32);
            float s = __shfl_sync(FULL_WARP, share, (first + j) % 32);
            if (first + j >= count) continue;
            l = __fadd_rn(l, s);
#pragma unroll
            for (int i = 0; i < OWN; ++i) sum[i] = __fmaf_rn(part[j].v[i], w, sum[i]);
        }
        if (first + BATCH < count) load(first + BATCH);
    }
    float r = __frcp_rn(l);
#pragma unroll
    for (int i = 0; i < OWN; i += 2) *(u32*)(o + OWN * lane + i) = divided(sum[i], sum[i + 1], r);
}
