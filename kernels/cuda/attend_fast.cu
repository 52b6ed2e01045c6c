/* attend for bf16 and heads of 64 or 128: softmax(scale q k^T) v on tensor cores, in one launch.
 * Grid:   a block for a unit of keys, a kv head and a group of rows; those past the keys have none, so one
 *         grid serves every context. 8 warps: 16 tile rows x 64 keys of each leaf, a row's query heads side
 *         by side; few rows share a tile among warps by components. A row of several units has a piece of
 *         each in the workspace. Once all are there they are merged: by all blocks of the group and head, a
 *         warp a row, where the card holds the whole grid at once (`waits`), else by the last to come.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; a piece of ROWS rows a unit
 *         through L2.
 * Source: Dao 2023 (FlashAttention-2), Flash-Decoding 2023; the cut at absolute keys: attend_pieces.cuh.
 * Truth:  oracle.py attend. */
#include "attend_pieces.cuh"

/* A unit's sums of the tile rows: a piece, or the output where the row has no other. 16 bytes at a time: of
 * two neighbouring lanes, which have two pairs of components of two rows each, the even one takes the first
 * row, the odd one the other. */
__device__ __forceinline__ void keep(const Set& set, const Row* rows, const float2* stats,
                                     const float4* exchange, const float (&out)[N][4], float* piece, bf16* o,
                                     int H) {
    const int lane = thread_again() % 32, warp = thread_again() / 32;
    const int tile = warp / SPREAD % TILES, half = warp / 4, own = lane % 2;
    const int first = 16 * tile + lane / 4;
    float2 joint[2] = {stats[first], stats[first + 8]};
    const float2 later[2] = {stats[ROWS + first], stats[ROWS + first + 8]};
    const Meeting meet[2] = {{joint[0].x, later[0].x}, {joint[1].x, later[1].x}};
#pragma unroll
    for (int e = 0; e < 2; ++e) joint[e].y = meet[e](joint[e].y, later[e].y);

    const int tile_row = first + 8 * own, row = tile_row / set.place.ratio;
    const bool is_member = row < GROUP && (set.only < 0 ? set.members : 1u << set.only) >> row & 1;
    const int pieces = is_member ? rows[row].pieces : 0;  // this unit may lie behind the row's keys
    const int d = warp % SPREAD * COLUMNS + half * (COLUMNS / 2) + lane % 4 / 2 * 4;
    const float2 sums = own ? joint[1] : joint[0];
    if (pieces > 1 && set.place.own < pieces && warp % SPREAD == 0 && half == 0 && lane % 4 < 2)
        __stcg((float2*)(piece + ROWS * HEAD) + tile_row, sums);
    float* const to = piece + tile_row * HEAD + d;
    bf16* const whole = output_at(o, H, set.place, tile_row) + d;
    const float r = __frcp_rn(sums.y);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        const float4 other = exchange[((warp ^ 4) * (N / 2) + n) * 32 + lane];
        const float2 theirs[2] = {{other.x, other.y}, {other.z, other.w}};
        float2 mine[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float x = out[n][2 * e], y = out[n][2 * e + 1];
            mine[e] = half ? make_float2(meet[e](theirs[e].x, x), meet[e](theirs[e].y, y))
                           : make_float2(meet[e](x, theirs[e].x), meet[e](y, theirs[e].y));
        }
        const float2 keep = own ? mine[1] : mine[0], give = own ? mine[0] : mine[1];
        const float x = __shfl_xor_sync(FULL_WARP, give.x, 1), y = __shfl_xor_sync(FULL_WARP, give.y, 1);
        const float4 v = own ? make_float4(x, y, keep.x, keep.y) : make_float4(keep.x, keep.y, x, y);
        if (set.place.own >= pieces) continue;
        if (pieces > 1)
            __stcg((float4*)(to + 8 * n), v);
        else
            *(uint2*)(whole + 8 * n) = uint2{divided(v.x, v.y, r), divided(v.z, v.w, r)};
    }
}

/* o is A[T,H,HEAD]; group * (H/G) <= 16 * TILES, group <= GROUP. splits: units a row is cut into at most, or
 * one more; 0: none. units: blocks of a group and kv head. work: COUNTERS, two of them a group and kv head,
 * zero before and after; then a piece a block. */
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, float* work, bf16* o,
                int T, int H, int G, int S, int group, int splits, int units, int waits) {
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    static_assert(sizeof(Set) <= SET_BYTES);
    const int g = blockIdx.x % G, groups = (T + group - 1) / group;
    // In the grid, units come last: those with keys start first.
    const int from = blockIdx.x / G % groups * group, own = blockIdx.x / G / groups;

    griddep_wait();
    if (warp_index() == 0) {
        set.start(rows, {slot, pos, begin, end, T, group, window, causal, splits},
                  {H / G, g, from, own, from / group * G + g});
        if (set.left) set.next(rows);
    } else {
        load_q(q, shared, from, T, H, H / G, g, 32);
    }
    __syncthreads();
    auto load = [&](const bf16* cache, int to, int leaf) {  // addresses are made here, not kept
        cache += ((size_t)set.slot * G + set.place.g) * S * HEAD;
        load_leaf(cache, shared + to, leaf, set.only < 0 ? set.low : rows[set.only].first,
                  set.only < 0 ? set.high : rows[set.only].last);
    };

    while (set.members) {
        // Once for all rows with only = -1. Where a key that one row of a set does not see makes an infinity
        // or NaN for another, zero times it would spoil the first: then again, row by row.
        while (set.leaf_first < set.leaf_end) {
            load(cache_k, K_AT, set.leaf_first);
            cp_async_commit();
            load(cache_v, V_AT, set.leaf_first);
            cp_async_commit();
            griddep_launch();

            float out[N][4] = {}, m[2] = {NO_KEY, NO_KEY}, l[2] = {};
            for (int leaf = set.leaf_first; leaf < set.leaf_end; ++leaf) {
                const int key0 = leaf * LEAF;
                const bool masks = set.only >= 0 || key0 < set.shared_low || key0 + LEAF > set.shared_high;
                cp_async_wait<1>();
                __syncthreads();
#pragma unroll 1
                for (int part = 0; part < PARTS; ++part) {
                    const int warp = thread_again() / 32, tile = warp / SPREAD % TILES, half = warp / 4;
                    const int row = half * HALF + part * PART;
                    float p[COLUMN_TILES][4];
                    scores(p, tile * 16 * HEAD * 2, K_AT + row * HEAD * 2, __fmul_rn(scale, LOG2_E));
                    if (masks) mask(p, set, rows, tile, key0 + row);
                    soften(p, out, m, l);
                    if (part == 0) cp_async_wait<0>();
                    if (part == 0 || part == PARTS - 1)
                        __syncthreads();  // in the first, V is there; in the last, K has been read
                    if (part == PARTS - 1) {
                        if (leaf + 1 < set.leaf_end) load(cache_k, K_AT, leaf + 1);
                        cp_async_commit();
                    }
                    values(out, p, V_AT + row * HEAD * 2, warp % SPREAD * (UNITS / SPREAD));
                }
                __syncthreads();  // V has been read
                if (leaf + 1 < set.leaf_end) load(cache_v, V_AT, leaf + 1);
                cp_async_commit();
            }

            // The halves of the keys meet: a warp keeps half of its components and hands over the others.
            const int lane = thread_again() % 32, warp = thread_again() / 32;
            const int tile = warp / SPREAD % TILES, half = warp / 4;
            const bool is_masked =
                set.leaf_first * LEAF < set.shared_low || set.leaf_end * LEAF > set.shared_high;
            float2* const stats = (float2*)(shared + V_AT);
            float4* const exchange = (float4*)(shared + K_AT);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int tile_row = 16 * tile + 8 * e + lane / 4;
                l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 1));
                l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 2));
                float zero = 0.f;
#pragma unroll
                for (int n = 0; n < N; ++n)
                    zero = __fmaf_rn(out[n][2 * e], 0.f, __fmaf_rn(out[n][2 * e + 1], 0.f, zero));
                int2 seen = keys_of(set, rows, tile_row);
                if (set.only < 0 && is_masked && zero != 0.f && seen.x < seen.y) atomicOr(&set.is_suspect, 1);
                if (warp % SPREAD == 0 && lane % 4 == 0)
                    stats[half * ROWS + tile_row] = make_float2(m[e], l[e]);
            }
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                float give[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    give[e] = half ? out[n][e] : out[N / 2 + n][e];
                    if (half) out[n][e] = out[N / 2 + n][e];
                }
                exchange[(warp * (N / 2) + n) * 32 + lane] = make_float4(give[0], give[1], give[2], give[3]);
            }
            __syncthreads();
            if (!(set.only < 0 && set.is_suspect))
                keep(set, rows, stats, exchange, out, piece_at(work, set.place.index * units + set.place.own),
                     o, H);
            if (!set.is_suspect) break;
            __syncthreads();  // the exchange has been read: the ring may be filled
            if (thread_again() == 0) {
                u32 later = set.members >> (set.only + 1);
                set.only = later ? set.only + __ffs(later) : 32;
            }
            __syncthreads();
            if (set.only == 32) break;
        }
        if (!set.left) break;
        __syncthreads();  // the plan and the exchange have been read
        if (thread_again() / 32 == 0) set.next(rows);
        __syncthreads();
    }
    if (set.place.own == 0) {  // rows that see nothing
        for (int i = thread_again(); i < ROWS * HEAD / 4; i += THREADS) {
            int tile_row = i / (HEAD / 4), at = tile_row / set.place.ratio;
            if (at < group && set.place.from + at < T && !rows[at].pieces)
                *(uint2*)(output_at(o, H, set.place, tile_row) + i % (HEAD / 4) * 4) = uint2{0, 0};
        }
    }
    if (set.most < 2) return;

    u32* const counter = (u32*)work + 2 * set.place.index;
    int first = 0, step = 1;
    if (waits) {
        griddep_launch();
        __syncthreads();
        if (thread_again() / 32 == 0) {
            if (lane_index() == 0) red_add_release(counter, 1);
            warp_wait_for(counter, units);
            // Nobody waits any more once all have come here.
            if (lane_index() == 0 && atomicAdd(counter + 1, 1u) == units - 1) counter[0] = counter[1] = 0;
        }
        __syncthreads();
        first = set.place.own, step = units;
    } else if (!last_to_arrive(counter, units)) {
        return;
    }
    for (int i = thread_again() / 32; first + step * i < ROWS; i += THREADS / 32) {
        int tile_row = first + step * i, at = tile_row / set.place.ratio;
        int count = at < group ? rows[at].pieces : 0;
        if (count > 1)
            merge(piece_at(work, set.place.index * units), count, tile_row,
                  output_at(o, H, set.place, tile_row));
    }
}
