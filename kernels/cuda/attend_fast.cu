/* attend for bf16 and heads of 64 to 512: softmax(scale q k^T) v on tensor cores, in one launch.
 * Grid:   a block for a unit of keys, or for several, each gridDim.z further, a kv head and a group of rows;
 *         units past the keys have none, so one grid serves every context. Four warps: 64 tile rows, a row's
 *         query heads side by side, 16 a warp, times the keys of a leaf; scores and sums stay in registers.
 *         A row of several units has a piece of each; once all are there they are merged, a row a warp. With
 *         CLUSTER they meet in the shared memory of a cluster, each row's in one block's, without a fence.
 *         Else in the workspace: merged by all blocks of the group and head, where the card holds the whole
 *         grid at once (`waits`), or by the last to come. A sink joins a row once: where o is divided.
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
 * the kernel ahead let this one start when all before it had ended. ratio: H/G. The grid: G, groups, blocks;
 * with CLUSTER blocks, G, groups.
 */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, const float* sinks,
                float* work, bf16* o, int T, int H, int G, int S, int ratio, int group, int splits, int units,
                int waits, int early) {
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    static_assert(sizeof(Set) <= SET_BYTES);

    // In the grid, units come last: those with keys start first. A cluster's blocks are the first of it.
    const int lane = lane_index(), warp = warp_index();
    const int first_row = 16 * (TEAMS > 1 ? warp % 4 : warp) + lane / 4;  // the other: 8 on
    const int me = CLUSTER ? blockIdx.x : blockIdx.z, blocks = CLUSTER ? CLUSTER : gridDim.z,
              own_g = CLUSTER ? blockIdx.y : blockIdx.x, own_group = CLUSTER ? blockIdx.z : blockIdx.y;
    Place place{ratio, own_g, own_group * group, me, own_group * G + own_g};
    __shared__ u64 arrived;  // of a cluster: the pieces of this block's rows
    if (CLUSTER && threadIdx.x == 0) {
        mbarrier_init(&arrived, 1);
        mbarrier_fence_init();
    }
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
    if (CLUSTER) {
        cluster_arrive_relaxed();
        if (threadIdx.x == 0) mbarrier_arrive_expect(&arrived, bytes_to_come(rows, group, me));
    }
    int old_end = 0;  // keys of the first set's first leaf before that are under way already
    int ahead = -1;   // the first leaf of the next unit, where it is under way
    if (set.leaf_first < set.leaf_end) {
        old_end = set.old_end;
        load(cache_k, K_AT, set.leaf_first, 0, old_end);
        load(cache_v, V_AT, set.leaf_first, 0, old_end);
    }
    if (CLUSTER) cluster_wait();  // all blocks' barriers are there
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
            ahead = HEAD <= 128 && place.own + blocks < units ? set.leaf_ahead(blocks) : -1;
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
                        if (!CLUSTER && count[e] > 1 && set.only < 0 && lane % 4 == 0 &&
                            (TEAMS == 1 || warp < 4))
                            __stcg(stats_at(own_piece(), made_again(first_row + 8 * e)),
                                   make_float2(m[e], l[e]));
                    }
                auto keep = [&](int half) {  // while the other half is under way
#pragma unroll
                    for (int e = 0; e < SIDES; ++e) {
                        const int tile_row = made_again(first_row + 8 * e);
                        const int d = 64 * (first_half() + half) + 2 * (lane % 4);
                        if (!is_last || !count[e] || (CLUSTER && count[e] > 1)) continue;
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
            if (CLUSTER && !(is_suspect && set.only < 0))  // each piece once: its receiver counts bytes
#pragma unroll
                for (int e = 0; e < SIDES; ++e)
                    if (count[e] > 1) send(out, m[e], l[e], e, first_row + 8 * e, place.own, units, &arrived);
            if (!is_suspect && set.only < 0) break;
            if (ahead >= 0) cp_async_wait<0>();  // was_last() is a barrier: then the buffers are free
            ahead = -1;
            if (set.was_last()) break;
        }
        if (!set.left) {
            if (place.own + blocks >= units) break;
            place.own += blocks;
        }
        __syncthreads();  // the plan has been read
        if (warp == 0) {
            if (!set.left) set.again();
            set.next(rows, place.own, S);
        }
        __syncthreads();
    }
    auto clear_some = [&](int first, int step) {
        if (me == 0) clear(rows, place, group, T, H, o, first, step);
    };
    if (CLUSTER || !waits || set.most < 2) clear_some(thread_again(), THREADS);
    if (set.most < 2) return;

    u32* const counter = (u32*)work + 32 * place.index;  // a line of its own: all blocks ask for it
    u32 waited = 0;                                      // blocks that had waited before this one
    int first = 0, step = 1;
    griddep_launch();
    if (CLUSTER) {
        mbarrier_wait_cluster(&arrived, 0);
        __syncwarp();
        first = me, step = OWNERS;
    } else if (waits) {
        __syncthreads();
        if (warp == 0) {
            if (lane == 0) red_add_release(counter, 1);
            warp_wait_for(counter, blocks);
        } else {
            clear_some(thread_again() - 32, THREADS - 32);
        }
        __syncthreads();
        if (threadIdx.x == 0) waited = atomicAdd(counter + 1, 1u);  // under way while rows are merged
        first = me, step = blocks;
    } else if (blocks == 1) {
        __syncthreads();  // all pieces are this block's
    } else if (!last_to_arrive(counter, blocks)) {
        return;
    }
    float* const first_piece = piece_at(work, place.index * units);
    for (int tile_row = first + step * warp; tile_row < ROWS; tile_row += step * WARPS) {
        const int count = pieces_to_join(rows, group, tile_row);
        if (count < 2) continue;
        float* const sums = CLUSTER ? box_of(tile_row, units) : first_piece + tile_row * HEAD;
        const float2* const stats = CLUSTER ? (float2*)(sums + HEAD) : stats_at(first_piece, tile_row);
        merge(sums, stats, count, tile_row, o + head_at(H, place, tile_row));
    }
    if (!CLUSTER && waits && threadIdx.x == 0 && waited == blocks - 1)
        counter[0] = counter[1] = 0;  // nobody waits any more
}
