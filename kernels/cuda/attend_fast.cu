/* attend for bf16 and heads of 64 or 128: softmax(scale q k^T) v on tensor cores, keys split over the grid.
 * Grid:   persistent, BLOCKS blocks an SM of 4 warps, striding over units: a set of rows, a kv head, a piece
 *         of the keys. Tile rows are the set's rows times the H/G query heads of the kv head. For the scores
 *         a warp takes 16 of 64 keys, for the values a quarter of the components: one query row keeps four
 *         warps busy too, and K and V are read from shared memory once for all rows.
 *         attend_merge: a block a row and 128 / HEAD query heads, a thread a component.
 * Moves:  K and V of the keys that a set sees, once: keys * G * HEAD * 4 bytes; partial results through L2.
 * Source: Dao et al. 2022 (FlashAttention), Flash-Decoding 2023; the cut at absolute keys: attend_plan.cuh.
 * Truth:  oracle.py attend. */
#include "attend_tiles.cuh"

/* o is A[T,H,HEAD]; rows_a_group * (H/G) <= 16 * TILES. work: COUNTERS, RECORDS, then `capacity` slots. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_fast(const bf16* q, const bf16* cache_k, const bf16* cache_v, const int* slot, const int* pos,
                const int* begin, const int* end, int window, int causal, float scale, float* work, bf16* o,
                int T, int H, int G, int S, int rows_a_group, int leaf_limit, int capacity, int merges_here) {
    __shared__ Plan plan;
    __shared__ float tops[4][ROWS], sums[4][ROWS];
    __shared__ float2 chains[4][ROWS], spans[4][ROWS];  // m and l: each warp has its own, registers are short
    __shared__ int2
        seen[ROWS];  // keys of each tile row of the unit at hand; none where the row is not the set's
    __shared__ int is_suspect;
    char* const q_tile = shared + RING * ENTRY;
    char* const p_tile = q_tile + Q_BYTES;
    const int warp = warp_index(), ratio = H / G;
    float* const slots = work + COUNTERS + RECORDS;
    if (threadIdx.x == 0) is_suspect = 0;

    griddep_wait();
    make_plan(plan, {slot, pos, begin, end, T, rows_a_group, window, causal}, G, leaf_limit, capacity);
    const int items = plan.units * G;
    for (int t = blockIdx.x; t < T; t += gridDim.x)
        if (plan.leader[t] < 0)
            for (int i = threadIdx.x; i < H * HEAD; i += THREADS) o[(size_t)t * H * HEAD + i] = to_bf16(0.f);
    if (blockIdx.x == 0 && !merges_here) {
        int* record = (int*)work + COUNTERS;
        int leader = plan.leader[threadIdx.x];
        record[3 * threadIdx.x] = leader < 0 ? 0 : plan.start[leader];
        record[3 * threadIdx.x + 1] = leader < 0 ? 0 : plan.low[leader];
        record[3 * threadIdx.x + 2] = leader < 0 ? 0 : plan.high[leader];
        if (threadIdx.x == 0) record[LEVEL_AT] = plan.level;
    }

    // Once over all units of this block with only = -1. Where a key that one row of a set does not see makes
    // an infinity or NaN for another, zero times it would spoil the first: then again, row by row.
    int first = blockIdx.x, step = gridDim.x, stop = items, only = -1;
    while (true) {
        Cursor at;
        at.item = first;
        Feed feed;
        feed.start(plan, G, first, step, stop, only);
        if (first < stop) {
            load_q(q, q_tile, feed.at.leader - feed.at.leader % rows_a_group, T, H, ratio, feed.at.g);
        }
        feed.load<0>(plan, cache_k, G, S);
        feed.load<1>(plan, cache_k, G, S);
        if (RING > 3) feed.load<2>(plan, cache_v, G, S);
        if (RING > 4) feed.load<3>(plan, cache_v, G, S);
        if (RING > 5) feed.load<0>(plan, cache_k, G, S);
        griddep_launch();
        for (; at.item < stop; at.item += step) {
            at.locate(plan, G, only);
            __syncthreads();  // the unit before has been stored
            if (threadIdx.x < ROWS) {
                int row = threadIdx.x / ratio, t = at.leader - at.leader % rows_a_group + row;
                bool is_own =
                    row < rows_a_group && t < T && plan.leader[t] == at.leader && (only < 0 || only == t);
                seen[threadIdx.x] = is_own ? make_int2(plan.first[t], plan.last[t]) : make_int2(0, 0);
            }
            const int shared_low = plan.shared_low[at.leader], shared_high = plan.shared_high[at.leader];
            float* const slot_at = slots + (size_t)at.item * SLOT;
            float chain[TILES][2 * PAIRS][4];
            bool is_new_chain = true, is_new_span = true, is_masked = false;
            for (bool is_first = true; at.leaf < at.leaf_end; ++at.leaf, is_first = false) {
                const int lane = opaque(lane_index());
                const int key0 = at.leaf * LEAF;
                const bool masks = only >= 0 || key0 < shared_low || key0 + LEAF > shared_high;
                is_masked |= masks;
                float s[2][TILES][2][4] = {};
                if (is_first)
                    cp_async_wait<1>();  // q came with the second entry after the one before this
                else
                    cp_async_wait<RING - 2>();
                scores(s[0], q_tile, feed.take<0>(plan, cache_k, cache_v, G, S));
                cp_async_wait<RING - 2>();
                scores(s[1], q_tile, feed.take<1>(plan, cache_k, cache_v, G, S));

#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int row = 16 * tile + 8 * half + lane / 4;
                        int2 range = masks ? seen[row] : make_int2(0, 0);
                        float top = NO_KEY;
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            int key =
                                key0 + i / 4 * HALF + 16 * warp + i / 2 % 2 * 8 + 2 * (lane % 4) + i % 2;
                            float& x = s[i / 4][tile][i / 2 % 2][2 * half + i % 2];
                            x = __fmul_rn(x, __fmul_rn(scale, LOG2_E));
                            if (masks && (key < range.x || key >= range.y)) x = -infinity();
                            top = fmaxf(top, x);
                        }
                        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
                        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
                        if (lane % 4 == 0) tops[warp][row] = top;
                    }
                __syncthreads();
                float sum[TILES][2] = {};
                float leaf[TILES][2 * PAIRS][4] = {};
                char* const second_p = p_tile + TERMS * P_BYTES;
                probabilities(s[0], tops, p_tile, sum);
                probabilities(s[1], tops, second_p, sum);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float x = sum[tile][half];
                        x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 1));
                        x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 2));
                        if (lane % 4 == 0) sums[warp][16 * tile + 8 * half + lane / 4] = x;
                    }
                if (at.leaf + 1 == at.leaf_end) {  // q has been read: the next unit's may come
                    int next = at.item + step;
                    if (next < stop) {
                        int leader = find_leader(plan, next / G);
                        load_q(q, q_tile, leader - leader % rows_a_group, T, H, ratio, next % G);
                    }
                }
                cp_async_wait<RING - 2>();
                values(leaf, p_tile, feed.take<2>(plan, cache_k, cache_v, G, S));
                cp_async_wait<RING - 2>();
                values(leaf, second_p, feed.take<3>(plan, cache_k, cache_v, G, S));

                // the leaf joins its chain
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int row = 16 * tile + 8 * half + lane / 4;
                        float l = __fadd_rn(__fadd_rn(sums[0][row], sums[1][row]),
                                            __fadd_rn(sums[2][row], sums[3][row]));
                        float2 joint = is_new_chain ? make_float2(NO_KEY, 0.f) : chains[warp][row];
                        Meeting w = meet(joint.x, top_of(tops, row));
                        joint.y = weighted(w, joint.y, l);
                        __syncwarp();
                        if (lane % 4 == 0) chains[warp][row] = joint;
#pragma unroll
                        for (int n = 0; n < 2 * PAIRS; ++n)
#pragma unroll
                            for (int e = 2 * half; e < 2 * half + 2; ++e)
                                chain[tile][n][e] =
                                    weighted(w, is_new_chain ? 0.f : chain[tile][n][e], leaf[tile][n][e]);
                    }
                __syncwarp();
                is_new_chain = (at.leaf + 1) % CHAIN == 0 || at.leaf + 1 == at.leaf_end;
                if (!is_new_chain) continue;

                // the chain joins what the unit's slot holds: there is no room for a third sum in registers
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int row = 16 * tile + 8 * half + lane / 4;
                        float2 span = is_new_span ? make_float2(NO_KEY, 0.f) : spans[warp][row];
                        Meeting w = meet(span.x, chains[warp][row].x);
                        span.y = weighted(w, span.y, chains[warp][row].y);
                        __syncwarp();
                        if (lane % 4 == 0) spans[warp][row] = span;
                        __syncwarp();
                        if (seen[row].x == seen[row].y) continue;
                        if (warp == 0 && lane % 4 == 0) {
                            slot_at[ROWS * HEAD + row] = span.x;
                            slot_at[ROWS * HEAD + ROWS + row] = span.y;
                        }
                        float zero = 0.f;
#pragma unroll
                        for (int n = 0; n < 2 * PAIRS; ++n) {
                            float2* to =
                                (float2*)(slot_at + row * HEAD + warp * (HEAD / 4) + 8 * n) + lane % 4;
                            float2 before = is_new_span ? make_float2(0.f, 0.f) : *to;
                            float x = weighted(w, before.x, chain[tile][n][2 * half]);
                            float y = weighted(w, before.y, chain[tile][n][2 * half + 1]);
                            *to = make_float2(x, y);
                            zero = __fmaf_rn(x, 0.f, __fmaf_rn(y, 0.f, zero));
                        }
                        if (is_masked && zero != 0.f) is_suspect = 1;
                    }
                is_new_span = false;
            }
        }
        cp_async_wait<0>();
        __syncthreads();
        if (only < 0 && !is_suspect) break;
        do {  // the next row of this block's units whose set does not see the same keys
            if (only < 0 || ++only >= min(T, at.leader + rows_a_group)) {
                first = only < 0 ? blockIdx.x : first + gridDim.x;
                if (first >= items) break;
                at.item = first;
                at.locate(plan, G, -1);
                only = at.leader;
            }
        } while (plan.leader[only] != at.leader);
        if (first >= items) break;
        step = 1, stop = first + 1;
    }
    if (!merges_here) return;

    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        int leader = find_leader(plan, item / G), g = item % G, from = leader - leader % rows_a_group;
        int low = plan.low[leader], high = plan.high[leader];
        u32 units = count_units(low, high, unit_leaves(plan.level));
        if (!last_to_arrive((u32*)work + leader * G + g, units)) continue;
        const float* own = slots + ((size_t)plan.start[leader] * G + g) * SLOT;
        for (int i = threadIdx.x; i < rows_a_group * ratio * HEAD; i += THREADS) {
            int row = i / HEAD, d = i % HEAD, t = from + row / ratio;
            if (t >= T || plan.leader[t] != leader) continue;
            float x = merge<HEAD>(own, (size_t)G * SLOT, ROWS, row, d, low, high, plan.level);
            o[((size_t)t * H + g * ratio + row % ratio) * HEAD + d] = to_bf16(x);
        }
    }
}

/* What attend_fast leaves to do where a single block would be long about it. Same arguments for both. */
extern "C" __global__ void __launch_bounds__(THREADS)
    attend_merge(const float* work, bf16* o, int H, int G, int rows_a_group) {
    griddep_launch();
    int t = blockIdx.x, h = blockIdx.y * (THREADS / HEAD) + threadIdx.x / HEAD, d = threadIdx.x % HEAD;
    if (h >= H) return;
    int ratio = H / G, g = h / ratio, row = t % rows_a_group * ratio + h % ratio;
    griddep_wait();
    const int* record = (const int*)work + COUNTERS;
    int start = record[3 * t], low = record[3 * t + 1], high = record[3 * t + 2];
    if (high == low) return;  // sees no key: attend_fast wrote its zeros
    const float* slots = work + COUNTERS + RECORDS + ((size_t)start * G + g) * SLOT;
    float x = merge<HEAD>(slots, (size_t)G * SLOT, ROWS, row, d, low, high, record[LEVEL_AT]);
    o[((size_t)t * H + h) * HEAD + d] = to_bf16(x);
}
