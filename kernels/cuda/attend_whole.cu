/* attend of many sequences, for heads of 64 and 128: a block has all keys of its rows, so no piece of a row
 * leaves the multiprocessor. The bits are those of attend_fast.cu.
 * Grid:   a block for a kv head and a group of rows. Four warps: 64 tile rows, a row's query heads side by
 *         side, 16 a warp. A set's keys come leaf by leaf; where a unit ends, its sums join those of the
 *         units before it as merge() of attend_merge.cuh joins pieces: both stay in registers.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; the next leaf of K is on its
 *         way while scores become values, the next of V behind them, unit or not.
 * Source: as attend_fast.cu.
 * Truth:  oracle.py attend. */
#include "attend_merge.cuh"

// Whether the next leaf's scores are under way while sums join: mma.sync has no registers for both.
#ifdef WGMMA
constexpr bool SCORES_AHEAD = true;
#else
constexpr bool SCORES_AHEAD = false;
#endif

static_assert(HEAD <= 128);  // of larger ones two rows' sums have no room in registers

/* o is A[T,H,HEAD]; group * ratio <= 64, group <= GROUP, ratio: H/G. splits: units a row is cut into at most,
 * or one more; 0: none. The grid: G, groups. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_whole(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                 const int* begin, const int* end, int window, int causal, float scale, const float* sinks,
                 bf16* o, int T, int H, int G, int S, int ratio, int group, int splits) {
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    const int lane = lane_index(), warp = warp_index(), first_row = 16 * warp + lane / 4;  // the other: 8 on
    const Place place{ratio, (int)blockIdx.x, (int)blockIdx.y * group, 0, 0};
    griddep_wait();
    if (warp == 0) {
        set.start(rows, Rows{slot, pos, begin, end, T, group, window, causal, splits}, place);
        if (set.left) set.next(rows, ALL_UNITS, S);
    } else if (warp >= WARPS - 2) {
        make_tile_row(threadIdx.x - 32 * (WARPS - 2), place, sinks);
    }
    __syncthreads();
    auto load = [&](const bf16* cache, int to, int leaf) {
        const int low = set.only < 0 ? set.low : rows[set.only].first,
                  high = set.only < 0 ? set.high : rows[set.only].last;
        cache += ((size_t)set.slot * G + place.g) * S * HEAD;
        load_leaf(cache, set.row_of_leaf(leaf, S), to, leaf, low, high, 0, ALL_KEYS);
    };
    if (set.members) load_q(q, place, T, H);

    while (set.members) {
        // Once for all rows with only = -1; then, where attend_fast.cu says why, row by row.
        while (true) {
            load(cache_k, K_AT, set.leaf_first);
            cp_async_commit();
            load(cache_v, V_AT, set.leaf_first);
            cp_async_commit();
            griddep_launch();

            Sums all = {}, out = {};  // of the units before, of this one
            float all_m[2] = {NO_KEY, NO_KEY}, all_l[2] = {}, m[2] = {NO_KEY, NO_KEY}, l[2] = {};
            int count[2];  // units of the two rows; 0: not of this pass
            for (int e = 0; e < 2; ++e) count[e] = set.pieces_of(rows, 0, first_row + 8 * e);
            const bool has_rows = __any_sync(FULL_WARP, count[0] || count[1]);
            const int leaf_end = set.leaf_end, unit = set.unit;
            int own = 0, unit_end = (set.leaf_first / unit + 1) * unit;
            float s[KEY_TILES][4];
            auto score = [&] {
                wait_for_older();
                __syncthreads();  // K is there, and q
                scores(s);
            };
            if (SCORES_AHEAD) score();
            for (int leaf = set.leaf_first; leaf < leaf_end; ++leaf) {
                const int key0 = leaf * LEAF;
                const bool masks = set.only >= 0 || key0 < set.shared_low || key0 + LEAF > set.shared_high;
                const bool is_last = leaf + 1 == leaf_end;
                uint4 terms[KEY_TILES / 2][2];
                if (!SCORES_AHEAD) score();
                scores_done(s);
                if (!is_last) {
                    __syncthreads();  // K has been read
                    load(cache_k, K_AT, leaf + 1);
                }
                cp_async_commit();
                if (has_rows) {  // a sequence's rows may be few warps'
                    if (masks) mask(s, set, rows, key0);
                    soften(s, out, m, l, __fmul_rn(scale, LOG2_E));
                }
                wait_for_older();
                __syncthreads();  // V is there
                values(out, s, terms);
                values_done<HALVES - 1>(out);
                if (!is_last) {
                    __syncthreads();  // V has been read
                    load(cache_v, V_AT, leaf + 1);
                }
                cp_async_commit();
                if (SCORES_AHEAD) score();  // behind the last leaf of no one's: no product stands in a branch
                if (is_last || leaf + 1 == unit_end) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 1));
                        l[e] = __fadd_rn(l[e], __shfl_xor_sync(FULL_WARP, l[e], 2));
                        if (own < count[e]) join(all, all_m[e], all_l[e], out, m[e], l[e], e);
                        m[e] = NO_KEY, l[e] = 0.f;
                    }
#pragma unroll
                    for (int i = 0; i < 32 * HALVES; ++i) out[i / 32][i / 4 % 8][i % 4] = 0.f;
                    ++own, unit_end += unit;
                }
            }
            scores_done(s);

            const bool is_suspect = set.may_spoil() && are_spoilt(all, set, rows, first_row);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int tile_row = first_row + 8 * e;
                if (is_suspect || !count[e]) continue;
                bf16* const to = o + head_at(H, place, tile_row) + 2 * (lane % 4);
                const float r = one_over(all_l[e], all_m[e], tile_row);
#pragma unroll
                for (int n = 0; n < 8 * HALVES; ++n)
                    *(u32*)(to + 8 * n) = divided(all[n / 8][n % 8][2 * e], all[n / 8][n % 8][2 * e + 1], r);
            }
            if (!is_suspect && set.only < 0) break;
            if (set.was_last()) break;
        }
        if (!set.left) break;
        __syncthreads();  // the plan has been read
        if (warp == 0) set.next(rows, ALL_UNITS, S);
        __syncthreads();
    }
    clear(rows, place, group, T, H, o, threadIdx.x, THREADS);
}
