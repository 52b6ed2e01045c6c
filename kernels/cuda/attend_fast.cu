/* attend for bf16 and heads of 64 to 512: softmax(scale q k^T) v on tensor cores, in one launch.
 * Grid:   a block for a unit of keys, or for several, each gridDim.z further, a kv head and a group of rows;
 *         units past the keys have none, so one grid serves every context. Four warps: 64 tile rows, a row's
 *         query heads side by side, 16 a warp, times the keys of a leaf; scores and sums stay in registers.
 *         A row of several units has a piece of each in the workspace; once all are there they are merged:
 *         by all blocks of the group and head, a row a warp, where the card holds the whole grid at once
 *         (`waits`), else by the last to come. A sink joins a row once: where o is divided.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; a piece of the rows a unit
 *         through L2. With `early`, keys that this pass did not write are asked for before the kernel ahead,
 *         which writes q and the newest keys, has ended.
 *         Key n lies in row n % S: where S is less than the keys (a ring), it is a multiple of LEAF.
 * Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (3: wgmma), Flash-Decoding 2023; the cut at absolute
 *         keys: attend_pieces.cuh.
 * Truth:  oracle.py attend. */
#include "attend_merge.cuh"

/* o is A[T,H,HEAD]; group * (H/G) <= 64, group <= GROUP. splits: units a row is cut into at most, or one
 * more; 0: none. units: of a group and kv head. work: COUNTERS, 32 of them a group and kv head that has
 * several blocks, zero before and after; then a piece a unit. waits: blocks may wait for each other. early:
 * the kernel ahead let this one start when all before it had ended. ratio: H/G. The grid: G, groups, blocks.
 */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, const float* sinks,
                float* work, bf16* o, int T, int H, int G, int S, int ratio, int group, int splits, int units,
                int waits, int early) {
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    static_assert(sizeof(Set) <= SET_BYTES);

    // In the grid, units come last: those with keys start first.
    const int lane = lane_index(), warp = warp_index();
    const int first_row = 16 * (TEAMS > 1 ? warp % 4 : warp) + lane / 4;  // the other: 8 on
    Place place{ratio, (int)blockIdx.x, (int)blockIdx.y * group, (int)blockIdx.z,
                (int)(blockIdx.y * G + blockIdx.x)};
    if (!early) griddep_wait();
    if (warp == 0) {
        const Rows all{slot, pos, begin, end, T, group, window, causal, splits};
        const int own_slot = lane < T ? __ldcg(slot + lane) : -1,
                  own_pos = lane < T ? __ldcg(pos + lane) : -1;
        set.start(rows, all, place);
        if (set.left) {
            set.next(rows, place.own, S);
            __syncwarp();
            if (early) set.find_old(all, own_slot, own_pos);
        }
    } else if (warp >= WARPS - 2) {
        make_tile_row(threadIdx.x - 32 * (WARPS - 2), place, sinks);
    }
    __syncthreads();
    auto load = [&](const bf16* cache, int to, int leaf, int first, int last) {  // addresses are made here
        const int low = set.only < 0 ? set.low : rows[set.only].first,
                  high = set.only < 0 ? set.high : rows[set.only].last;
        cache += ((size_t)set.slot * G + place.g) * S * HEAD;
        load_leaf(cache, set.row_of_leaf(leaf, S), to, leaf, low, high, first, last);
    };
    int old_end = 0;  // keys of the first set's first leaf before that are under way already
    int ahead = -1;   // the first leaf of the next unit, where it is under way
    if (set.leaf_first < set.leaf_end) {
        old_end = set.old_end;
        load(cache_k, K_AT, set.leaf_first, 0, old_end);
        load(cache_v, V_AT, set.leaf_first, 0, old_end);
    }
    if (early) griddep_wait();
    if (set.members) load_q(q, place, T, H);

    while (set.members) {
        // Once for all rows with only = -1. Where a key that one row of a set does not see makes an infinity
        // or NaN for another, zero times it would spoil the first: then again, row by row, over what was
        // kept.
        while (set.leaf_first < set.leaf_end) {
            const bool is_there = old_end >= (set.leaf_first + 1) * LEAF;
            if (set.leaf_first != ahead) {
                if (!is_there) load(cache_k, K_AT, set.leaf_first, old_end, ALL_KEYS);
                cp_async_commit();
                if (!is_there) load(cache_v, V_AT, set.leaf_first, old_end, ALL_KEYS);
                cp_async_commit();
            }
            old_end = 0;
            ahead = HEAD <= 128 && place.own + (int)gridDim.z < units ? set.leaf_ahead(gridDim.z) : -1;
            griddep_launch();

            float* const piece = piece_at(work, place.index * units + place.own);
            // Of large heads no address is kept through the loop: registers are too few.
            auto made_again = [](int x) { return HEAD > 128 ? opaque(x) : x; };
            auto own_piece = [&] {
                return HEAD > 128 ? piece_at(work, opaque(place.index) * units + place.own) : piece;
            };
            const int leaf_end = set.leaf_end;
            Sums out = {};
            float m[2] = {NO_KEY, NO_KEY}, l[2] = {};
            int count[2];  // pieces of the two rows; 0: not of this pass
            for (int e = 0; e < SIDES; ++e) count[e] = set.pieces_of(rows, place.own, first_row + 8 * e);
            for (int leaf = set.leaf_first; leaf < leaf_end; ++leaf) {
                const int key0 = leaf * LEAF;
                const bool masks = set.only >= 0 || key0 < set.shared_low || key0 + LEAF > set.shared_high;
                const bool is_last = leaf + 1 == leaf_end;
                float s[KEY_TILES][4];
                uint4 terms[KEY_TILES / 2][2];
                wait_for_older();
                __syncthreads();  // K is there, and q
                scores(s);
                scores_done(s);
                const int later = is_last ? ahead : leaf + 1;
                if (later >= 0) {
                    __syncthreads();  // K has been read
                    load(cache_k, K_AT, later, 0, ALL_KEYS);
                }
                cp_async_commit();
                if (masks) mask(s, set, rows, key0);
                soften(s, out, m, l, __fmul_rn(scale, LOG2_E));
                wait_for_older();
                __syncthreads();  // V is there
                values(out, s, terms);
                if (is_last)
#pragma unroll
                    for (int e = 0; e < SIDES; ++e) {
                        l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 1));
                        l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 2));
                        if (count[e] > 1 && set.only < 0 && lane % 4 == 0 && (TEAMS == 1 || warp < 4))
                            __stcg(stats_at(own_piece(), made_again(first_row + 8 * e)),
                                   make_float2(m[e], l[e]));
                    }
                auto keep = [&](int half) {  // while the other half is under way
#pragma unroll
                    for (int e = 0; e < SIDES; ++e) {
                        const int tile_row = made_again(first_row + 8 * e);
                        const int d = 64 * (first_half() + half) + 2 * (lane % 4);
                        if (!is_last || !count[e]) continue;
                        float* const to = own_piece();
                        const float r = one_over(l[e], m[e], tile_row);
#pragma unroll
                        for (int n = 0; n < 8; ++n) {
                            const float x = out[half][n][2 * e], y = out[half][n][2 * e + 1];
                            if (count[e] > 1)
                                __stcg((float2*)(to + tile_row * HEAD + d + 8 * n), make_float2(x, y));
                            else
                                *(u32*)(o + head_at(H, place, tile_row) + d + 8 * n) = divided(x, y, r);
                        }
                    }
                };
                values_done<0>(out);
                keep(0);
                if constexpr (HALVES > 1) {
                    values_done<1>(out);
                    keep(1);
                }
                if constexpr (HALVES > 2) {
                    values_done<2>(out);
                    keep(2);
                    values_done<3>(out);
                    keep(3);
                }
                if (later >= 0) {
                    __syncthreads();  // V has been read
                    load(cache_v, V_AT, later, 0, ALL_KEYS);
                }
                cp_async_commit();
            }

            const bool is_suspect = set.may_spoil() && are_spoilt(out, set, rows, first_row);
            if (!is_suspect && set.only < 0) break;
            if (ahead >= 0) cp_async_wait<0>();  // was_last() is a barrier: then the buffers are free
            ahead = -1;
            if (set.was_last()) break;
        }
        if (!set.left) {
            if (place.own + (int)gridDim.z >= units) break;
            place.own += gridDim.z;
        }
        __syncthreads();  // the plan has been read
        if (warp == 0) {
            if (!set.left) set.again();
            set.next(rows, place.own, S);
        }
        __syncthreads();
    }
    auto clear_some = [&](int first, int step) {
        if (blockIdx.z == 0) clear(rows, place, group, T, H, o, first, step);
    };
    if (!waits || set.most < 2) clear_some(thread_again(), THREADS);
    if (set.most < 2) return;

    u32* const counter = (u32*)work + 32 * place.index;  // a line of its own: all blocks ask for it
    u32 waited = 0;                                      // blocks that had waited before this one
    int first = 0, step = 1;
    griddep_launch();
    if (waits) {
        __syncthreads();
        if (warp == 0) {
            if (lane == 0) red_add_release(counter, 1);
            warp_wait_for(counter, gridDim.z);
        } else {
            clear_some(thread_again() - 32, THREADS - 32);
        }
        __syncthreads();
        if (threadIdx.x == 0) waited = atomicAdd(counter + 1, 1u);  // under way while rows are merged
        first = blockIdx.z, step = gridDim.z;
    } else if (gridDim.z == 1) {
        __syncthreads();  // all pieces are this block's
    } else if (!last_to_arrive(counter, gridDim.z)) {
        return;
    }
    for (int tile_row = first + step * warp; tile_row < ROWS; tile_row += step * WARPS) {
        const int at = tile_row_of(tile_row).at, count = at < group ? rows[at].pieces : 0;
        if (count > 1)
            merge(piece_at(work, place.index * units), count, tile_row, o + head_at(H, place, tile_row));
    }
    if (waits && threadIdx.x == 0 && waited == gridDim.z - 1)
        counter[0] = counter[1] = 0;  // nobody waits any more
}
