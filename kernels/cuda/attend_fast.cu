/* attend for bf16 and heads of 64 or 128: softmax(scale q k^T) v on tensor cores, in one launch.
 * Grid:   a cluster of CLUSTER blocks for CLUSTER neighbouring units of keys, a kv head and a group of rows;
 *         those past the keys end at once, so one grid serves every context. 8 warps: 16 tile rows x 64 keys
 *         of each leaf, a row's query heads side by side; few rows share a tile among warps by components.
 *         Blocks send each other their rows (st.async to distributed shared memory), so a cluster leaves one
 *         partial result; where a row has more, the last to arrive of the same rank merges them.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; a partial of 64 rows a
 *         cluster through L2.
 * Source: Dao 2023 (FlashAttention-2), Flash-Decoding 2023; the cut at absolute keys: attend_pieces.cuh.
 * Truth:  oracle.py attend. */
#include "attend_pieces.cuh"

/* A tile row's sums to the block of the cluster that finishes it, 16 bytes at a time: of two neighbouring
 * lanes, which have two pairs of components of two rows each, the even one takes the first row, the odd one
 * the other. */
__device__ __forceinline__ void send(const Set& set, const float2* stats, const float4* exchange,
                                     const float (&out)[N][4], u64* sent) {
    const int lane = thread_again() % 32, warp = thread_again() / 32;
    const int tile = warp / SPREAD % TILES, half = warp / 4, own = lane % 2;
    const int first = 16 * tile + lane / 4;
    float2 joint[2] = {stats[first], stats[first + 8]};
    const float2 later[2] = {stats[ROWS + first], stats[ROWS + first + 8]};
    const Meeting meet[2] = {{joint[0].x, later[0].x}, {joint[1].x, later[1].x}};
#pragma unroll
    for (int e = 0; e < 2; ++e) joint[e].y = meet[e](joint[e].y, later[e].y);

    const int tile_row = first + 8 * own, row = tile_row / set.place.ratio, rank = blockIdx.x % CLUSTER;
    const bool is_sent = row < GROUP && (set.only < 0 ? set.members : 1u << set.only) >> row & 1;
    const int slot = rank * RANK_ROWS + tile_row % RANK_ROWS, to_rank = tile_row / RANK_ROWS;
    float2* const letter = (float2*)(shared + LETTERS_AT) + slot;
    float* const box = (float*)(shared + INBOX_AT) + slot * HEAD + warp % SPREAD * COLUMNS +
                       half * (COLUMNS / 2) + lane % 4 / 2 * 4;
    u32 there = 0, letter_there = 0, box_there = 0;
    if (CLUSTER > 1)
        there = cluster_address(sent, to_rank), letter_there = cluster_address(letter, to_rank),
        box_there = cluster_address(box, to_rank);
    if (warp % SPREAD == 0 && half == 0 && lane % 4 < 2 && is_sent) {
        const float2 v = own ? joint[1] : joint[0];
        if (CLUSTER > 1)
            store_async(letter_there, v, there);
        else
            *letter = v;
    }
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
        if (!is_sent) continue;
        if (CLUSTER > 1)
            store_async(box_there + 32 * n, v, there);
        else
            *(float4*)(box + 8 * n) = v;
    }
}

/* Bytes of a set that the blocks of the cluster send here. */
__device__ __forceinline__ int coming(const Set& set) {
    const int rank = blockIdx.x % CLUSTER, ratio = set.place.ratio;
    int count = 0;  // tile rows
    for (int i = 0; i < RANK_ROWS; ++i) {
        int row = (rank * RANK_ROWS + i) / ratio;
        count += row < GROUP && set.members >> row & 1;
    }
    const int senders = set.place.own < set.clusters ? set.last_source - set.first_source + 1 : 0;
    return count * max(senders, 0) * (HEAD * 4 + 8);
}

__device__ __forceinline__ void await(const Set& set, u64* sent) {
    const int bytes = coming(set);
    if (!bytes) return;
    if (thread_again() == 0) mbarrier_arrive_expect(sent, bytes);
    mbarrier_wait_cluster(sent, set.phase);
}

/* o is A[T,H,HEAD]; group * (H/G) <= 16 * TILES, group <= GROUP. splits: units a row is cut into at most, a
 * multiple of CLUSTER; 0: none. clusters: of a group and kv head. work: COUNTERS, then a slot a cluster. */
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, float* work, bf16* o,
                int T, int H, int G, int S, int group, int splits, int clusters) {
    const float2* const letters = (const float2*)(shared + LETTERS_AT);  // m and l beside the inbox's o
    Row* const rows = (Row*)(shared + ROWS_AT);
    Set& set = *(Set*)(shared + SET_AT);
    u64* const sent = (u64*)(shared + SENT_AT);
    static_assert(sizeof(Set) <= SENT_AT - SET_AT);
    const int rank = blockIdx.x % CLUSTER, g = blockIdx.x / CLUSTER % G;
    const int groups =
        (T + group - 1) / group;  // in the grid, clusters come last: those with keys start first
    const int from = blockIdx.x / CLUSTER / G % groups * group, own = blockIdx.x / CLUSTER / G / groups;

    if (CLUSTER > 1 && threadIdx.x == 0) mbarrier_init(sent, 1), mbarrier_fence_init();
    if (CLUSTER > 1) cluster_arrive_relaxed();  // waited for before anything is sent: who gets it is there
    griddep_wait();
    if (warp_index() == 0) {
        set.start(rows, {slot, pos, begin, end, T, group, window, causal, splits},
                  {H / G, g, from, own, from / group * G + g});
        if (set.left) set.next(rows, rank);
    } else {
        load_q(q, shared, from, T, H, H / G, g, 32);
    }
    __syncthreads();
    auto load = [&](const bf16* cache, int to, int leaf) {  // addresses are made here, not kept
        cache += ((size_t)set.slot * G + set.place.g) * S * HEAD;
        load_leaf(cache, shared + to, leaf, set.only < 0 ? set.low : rows[set.only].first,
                  set.only < 0 ? set.high : rows[set.only].last);
    };

    if (CLUSTER > 1) cluster_wait();
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
            if (!(set.only < 0 && set.is_suspect)) send(set, stats, exchange, out, sent);
            if (!set.is_suspect) break;
            __syncthreads();  // the exchange has been read: the ring may be filled
            if (thread_again() == 0) {
                u32 later = set.members >> (set.only + 1);
                set.only = later ? set.only + __ffs(later) : 32;
            }
            __syncthreads();
            if (set.only == 32) break;
        }
        if (CLUSTER == 1)
            __syncthreads();
        else
            await(set, sent);

        for (int i = thread_again(); set.place.own < set.clusters && i < RANK_ROWS * HEAD / 4; i += THREADS) {
            int tile_row = (int)(blockIdx.x % CLUSTER) * RANK_ROWS + i / (HEAD / 4),
                at = tile_row / set.place.ratio, d = i % (HEAD / 4) * 4;
            if (at >= group || !(set.members >> at & 1)) continue;
            Piece all;
#pragma unroll
            for (int source = 0; source < CLUSTER; ++source)
                if (source >= set.first_source && source <= set.last_source)
                    all.add(letters[source * RANK_ROWS + tile_row % RANK_ROWS],
                            *(const float4*)((float*)(shared + INBOX_AT) +
                                             (source * RANK_ROWS + tile_row % RANK_ROWS) * HEAD + d));
            if (set.clusters == 1) {
                size_t to = ((size_t)(set.place.from + at) * H + set.place.g * set.place.ratio +
                             tile_row % set.place.ratio) *
                                HEAD +
                            d;
                *(uint2*)(o + to) = all.divided();
            } else {
                float* to = slot_at(work, set.place.index * clusters + set.place.own);
                *(float4*)(to + tile_row * HEAD + d) = all.o;
                if (d == 0) *(float2*)(to + ROWS * HEAD + 2 * tile_row) = make_float2(all.m, all.l);
            }
        }
        if (!set.left) break;
        if (CLUSTER > 1)  // the letters have been read
            cluster_sync();
        else
            __syncthreads();
        if (thread_again() / 32 == 0) {
            if (CLUSTER > 1 && thread_again() == 0 && coming(set)) set.phase ^= 1;
            set.next(rows, (int)(blockIdx.x % CLUSTER));
        }
        __syncthreads();
    }
    if (set.place.own == 0) {  // rows that see nothing
        for (int i = thread_again(); i < RANK_ROWS * HEAD / 4; i += THREADS) {
            int tile_row = (int)(blockIdx.x % CLUSTER) * RANK_ROWS + i / (HEAD / 4),
                at = tile_row / set.place.ratio, t = set.place.from + at;
            if (at < group && t < T && rows[at].first >= rows[at].last)
                *(uint2*)(o +
                          ((size_t)t * H + set.place.g * set.place.ratio + tile_row % set.place.ratio) *
                              HEAD +
                          i % (HEAD / 4) * 4) = uint2{0, 0};
        }
    }
    if (set.place.own >= set.most) return;

    if (!last_to_arrive((u32*)work + set.place.index * CLUSTER + (int)(blockIdx.x % CLUSTER), set.most))
        return;
    for (int i = thread_again(); i < RANK_ROWS * HEAD / 4; i += THREADS) {
        constexpr int BATCH = 4;  // partial results whose loads are under way together
        int tile_row = (int)(blockIdx.x % CLUSTER) * RANK_ROWS + i / (HEAD / 4),
            at = tile_row / set.place.ratio, d = i % (HEAD / 4) * 4;
        int count = at < group ? rows[at].clusters : 0;
        if (count < 2) continue;
        Piece all;
        for (int c = 0; c < count; c += BATCH) {
            float4 part[BATCH];
            float2 weight[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const float* piece = slot_at(work, set.place.index * clusters + min(c + j, count - 1));
                part[j] = *(const float4*)(piece + tile_row * HEAD + d);
                weight[j] = *(const float2*)(piece + ROWS * HEAD + 2 * tile_row);
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                if (c + j < count) all.add(weight[j], part[j]);
        }
        *(uint2*)(o +
                  ((size_t)(set.place.from + at) * H + set.place.g * set.place.ratio +
                   tile_row % set.place.ratio) *
                      HEAD +
                  d) = all.divided();
    }
}
