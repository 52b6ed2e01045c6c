/* attend for bf16 and heads of 64 or 128: softmax(scale q k^T) v on tensor cores, in one launch.
 * Grid:   a block for a unit of keys, a kv head and a group of rows; those past the keys have none, so one
 *         grid serves every context. 16 warps: each scores some of a leaf's keys for a tile of 16 rows, a
 * row's query heads side by side, then sums some of its components over all of them: the probabilities lie in
 *         shared memory between. A row of several units has a piece of each in the workspace; they are merged
 *         by all blocks of the group and head, 32 components a warp, as the pieces come, where the card holds
 *         the whole grid at once (`waits`), else by the last block to come.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; a piece of ROWS rows a unit
 *         through L2. With `early`, keys that this pass did not write are asked for before the kernel ahead,
 *         which writes q and the newest keys, has ended.
 * Source: Dao 2023 (FlashAttention-2), Flash-Decoding 2023; the cut at absolute keys: attend_pieces.cuh.
 * Truth:  oracle.py attend. */
#include "attend_pieces.cuh"

/* o is A[T,H,HEAD]; group * (H/G) <= 16 * TILES, group <= GROUP. splits: units a row is cut into at most, or
 * one more; 0: none. units: blocks of a group and kv head. counters: one a group and kv head, zero before and
 * after. pieces: one a block, zeros before and after. early: the kernel ahead let this one start when all
 * before it had ended. */
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, u32* counters,
                float* pieces, bf16* o, int T, int H, int G, int S, int group, int splits, int units,
                int spread, int waits, int early) {
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    static_assert(sizeof(Set) <= SET_BYTES);

    // Of two neighbours, which come to one multiprocessor, the second is from the later half: units are in
    // order.
    const int item = spread ? blockIdx.x / 2 + blockIdx.x % 2 * spread : blockIdx.x;
    if (item >= (T + group - 1) / group * G * units) return;
    if (!early) griddep_wait();
    bool is_old = false;
    if (warp_index() == 0) {
        const int g = item % G, groups = (T + group - 1) / group;
        // In the grid, units come last: those with keys start first.
        const int from = item / G % groups * group, own = item / G / groups;
        const Rows all{slot, pos, begin, end, T, group, window, causal, splits};
        set.start(rows, all, {H / G, g, from, own, from / group * G + g});
        if (set.left) {
            set.next(rows);
            __syncwarp();
            is_old = early && set.leaf_first < set.leaf_end && set.is_old(all);
        }
    }
    is_old = __syncthreads_or(is_old);
    auto load = [&](const bf16* cache, int to, int leaf) {  // addresses are made here, not kept
        cache += ((size_t)set.slot * G + set.place.g) * S * HEAD;
        load_leaf(cache, to, leaf, set.only < 0 ? set.low : rows[set.only].first,
                  set.only < 0 ? set.high : rows[set.only].last);
    };
    if (is_old) {
        load(cache_k, K_AT, set.leaf_first);
        load(cache_v, V_AT, set.leaf_first);
    }
    if (early) griddep_wait();
    if (set.members) load_q(q, set.place, T, H);

    while (set.members) {
        // Once for all rows with only = -1. Where a key that one row of a set does not see makes an infinity
        // or NaN for another, zero times it would spoil the first: then again, row by row.
        while (set.leaf_first < set.leaf_end) {
            if (!is_old) load(cache_k, K_AT, set.leaf_first);
            cp_async_commit();
            if (!is_old) load(cache_v, V_AT, set.leaf_first);
            cp_async_commit();
            is_old = false;
            griddep_launch();

            auto piece = [&] { return pieces + (size_t)(set.place.index * units + set.place.own) * PIECE; };
            float out[N][4] = {}, m[2] = {NO_KEY, NO_KEY};
            const int leaf_first = set.leaf_first, leaf_end = set.leaf_end;
            for (int leaf = leaf_first; leaf < leaf_end; ++leaf) {
                const int warp = thread_again() / 32, tile = warp % TILES, part = warp / TILES;
                const int own = part * KEY_TILES * 8, key0 = leaf * LEAF;
                const bool masks = set.only >= 0 || key0 < set.shared_low || key0 + LEAF > set.shared_high;
                float shrink[2];
                {
                    float s[KEY_TILES][4];
                    cp_async_wait<1>();
                    fence_async_shared();
                    __syncthreads();  // K is there, and q
                    scores(s, tile, own, __fmul_rn(scale, LOG2_E));
                    if (masks) mask(s, set, rows, tile, key0 + own);
                    tell_maxima(s, tile, part);
                    cp_async_wait<0>();
                    __syncthreads();  // the maxima are there, and V; K has been read
                    take_maxima(m, shrink, tile);
                    tell_probabilities(s, m, tile, part);
                }
                fence_async_shared();
                __syncthreads();
                if (part == 0) {
                    take_sums(leaf == leaf_first, shrink, tile);
                    const int quarter = thread_again() % 4;
                    if (leaf + 1 == leaf_end && set.only < 0 && quarter < QUARTERS)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int tile_row = 16 * tile + 8 * half + thread_again() % 32 / 4;
                            if (set.pieces_of(rows, tile_row) > 1)
                                store_relaxed(
                                    stats_at(piece(), tile_row, quarter),
                                    make_float2(marked(m[half]),
                                                marked(((const float*)(shared + TOTALS_AT))[tile_row])));
                        }
                }
                if (PARTS * N == UNITS || part * N < UNITS) values(out, shrink, tile, part * N);
                if (leaf + 1 == leaf_end) break;
                __syncthreads();  // probabilities and V have been read
                load(cache_k, K_AT, leaf + 1);
                cp_async_commit();
                load(cache_v, V_AT, leaf + 1);
                cp_async_commit();
            }

            const int lane = thread_again() % 32, warp = thread_again() / 32, tile = warp % TILES;
            const int d = warp / TILES * N * 8 + lane % 4 * 2;  // the first of this lane's components
            const bool is_masked =
                set.leaf_first * LEAF < set.shared_low || set.leaf_end * LEAF > set.shared_high;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int tile_row = 16 * tile + 8 * e + lane / 4;
                float zero = 0.f;
#pragma unroll
                for (int n = 0; n < N; ++n)
                    zero = __fmaf_rn(out[n][2 * e], 0.f, __fmaf_rn(out[n][2 * e + 1], 0.f, zero));
                int2 seen = keys_of(set, rows, tile_row);
                if (set.only < 0 && is_masked && zero != 0.f && seen.x < seen.y) atomicOr(&set.is_suspect, 1);
            }
            __syncthreads();
            if (!(set.only < 0 && set.is_suspect) && d < HEAD) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int tile_row = 16 * tile + 8 * e + lane / 4;
                    const int count = set.pieces_of(rows, tile_row);
                    const float r = __frcp_rn(((const float*)(shared + TOTALS_AT))[tile_row]);
                    float* const to = piece() + tile_row * HEAD + d;
                    bf16* const whole = output_at(o, H, set.place, tile_row) + d;
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const float x = out[n][2 * e], y = out[n][2 * e + 1];
                        if (count > 1)
                            store_relaxed((float2*)(to + 8 * n), make_float2(marked(x), marked(y)));
                        else if (count)
                            *(u32*)(whole + 8 * n) = divided(x, y, r);
                    }
                }
            }
            if (!set.is_suspect) break;
            __syncthreads();  // the totals have been read
            if (thread_again() == 0) {
                u32 later = set.members >> (set.only + 1);
                set.only = later ? set.only + __ffs(later) : 32;
            }
            __syncthreads();
            if (set.only == 32) break;
        }
        if (!set.left) break;
        __syncthreads();  // the plan has been read
        if (thread_again() / 32 == 0) set.next(rows);
        __syncthreads();
        is_old = false;
    }
    if (set.place.own == 0) {  // rows that see nothing
        for (int i = thread_again(); i < ROWS * HEAD / 4; i += THREADS) {
            int tile_row = i / (HEAD / 4), at = tile_row / set.place.ratio;
            if (at < group && set.place.from + at < T && !rows[at].pieces)
                *(uint2*)(output_at(o, H, set.place, tile_row) + i % (HEAD / 4) * 4) = uint2{0, 0};
        }
    }
    if (set.most < 2) return;

    griddep_launch();
    if (!waits && !last_to_arrive(counters + set.place.index, units)) return;
    const int first = waits ? set.place.own : 0, step = waits ? units : 1;
    for (int i = first + step * (thread_again() / 32); i < ROWS * QUARTERS; i += step * WARPS) {
        const int tile_row = i / QUARTERS, at = tile_row / set.place.ratio;
        const int count = at < group ? rows[at].pieces : 0;
        if (count > 1)
            merge(pieces + (size_t)set.place.index * units * PIECE, count, tile_row, i % QUARTERS,
                  output_at(o, H, set.place, tile_row));
    }
}
