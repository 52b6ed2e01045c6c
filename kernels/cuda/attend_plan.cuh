/* Which keys a group of rows sees, and how they are cut: for attend_fast.cu and attend_whole.cu.
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
#ifndef SIDES  // 1: a group has at most 8 tile rows, so no warp has a second 8
#define SIDES 2
#endif
#ifndef CLUSTER  // blocks of a cluster, in whose shared memory pieces of rows meet; 0: in the workspace
#define CLUSTER 0
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
              SINKS_AT = SET_AT + SET_BYTES, INBOX_AT = SINKS_AT + SINKS * ROWS * 4;  // of shared memory
constexpr int OWNERS = CLUSTER ? CLUSTER : 1;  // blocks among whom the tile rows of a group are dealt out
constexpr int BOX = HEAD + 4;                  // floats of a piece of a row in the inbox: o, m, l
constexpr int COUNTERS = 4096;                 // u32 at the front of work
constexpr int WHOLE = 1 << 20;                 // leaves of a unit that is never cut
constexpr int ALL_UNITS = -1, ALL_KEYS = 0x7fffffff;
constexpr float NO_KEY = -3e38f;  // the largest score of no key at all; finite: differences are
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

/* By a thread a tile row, before the first of them is asked for. */
__device__ __forceinline__ void make_tile_row(int tile_row, const Place& place, const float* sinks) {
    const int at = tile_row / place.ratio;
    const TileRow of{(short)at, (short)(tile_row - at * place.ratio)};
    ((TileRow*)(shared + TILE_ROWS_AT))[tile_row] = of;
    if constexpr (SINKS) *sink_at(tile_row) = __fmul_rn(sinks[place.g * place.ratio + of.head], LOG2_E);
}

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
    int unit;     // leaves of one

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

    /* One warp. own: the block's unit, or ALL_UNITS. */
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
        const int at = first.base + own;
        unit = first.unit, left &= ~all, members = all, only = -1, slot = first.slot;
        old_end = 0, low = from, high = to, shared_low = last_from, shared_high = first_to;
        leaf_first = max(at * first.unit, from / LEAF);
        leaf_end = (to - 1) / LEAF + 1;
        if (own >= 0) leaf_end = min(leaf_end, (at + 1) * first.unit);
        if constexpr (RING) first_row = row_of_key(leaf_first * LEAF, S);
    }

    /* The first leaf of the unit `further` units on, for all rows of the group at once; -1: there is none. */
    __device__ __forceinline__ int leaf_ahead(int further) const {
        const int leaf = (leaf_first / unit + further) * unit;
        return only < 0 && members == seeing && leaf * LEAF < high ? leaf : -1;
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

    /* Whether a key that one row of the set does not see may have made an infinity or NaN for another. */
    __device__ __forceinline__ bool may_spoil() const {
        return only < 0 && (leaf_first * LEAF < shared_low || leaf_end * LEAF > shared_high);
    }

    /* By all threads: the row that the next pass is for; true where there is none. */
    __device__ __forceinline__ bool was_last() {
        __syncthreads();  // all know whose pass this was
        if (thread_again() == 0) {
            u32 later = members >> (only + 1);
            only = later ? only + __ffs(later) : 32;
        }
        __syncthreads();
        return only == 32;
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
