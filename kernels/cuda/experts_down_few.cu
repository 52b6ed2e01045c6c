/* experts_down_few: experts_down_fast for up to 8 pairs, with the same bits.
 * Grid:   experts_few.cuh, clusters of two blocks. A cluster takes row tiles, each of all experts that have
 *         pairs, its two blocks every second one. The pairs' products of a tile meet in the shared memory of
 *         one of them, the blocks taking turns, and the filling warp adds them up: nothing meets in memory.
 * Moves:  D*F numbers of each expert that has pairs; bound by HBM.
 * Bits:   a row adds up its own pairs in router order.
 * Truth:  oracle_moe.py experts_down. */
#include "experts_few.cuh"

#ifndef ADDS
#define ADDS 1  // as in experts_down_fast.cu
#endif
#ifndef MOST_TURNS
#define MOST_TURNS 16  // row tiles of a cluster
#endif

/* The pieces of a block: of the cluster's `turn`-th row tile every second expert, from this block on in even
 * turns, from the other's in odd ones. */
struct Halves {
    const Chosen& chosen;
    int rank, first, step, turns;
    int even, pieces;  // of a turn that begins with this block, of the block

    __device__ __forceinline__ Halves(const Chosen& chosen, int tiles)
        : chosen(chosen), rank(cluster_rank()), first(blockIdx.x / 2), step(gridDim.x / 2) {
        turns = first < tiles ? (tiles - first + step - 1) / step : 0;
        even = (chosen.count + 1 - rank) / 2;
        pieces = turns / 2 * chosen.count + (turns % 2 ? even : 0);
    }

    __device__ __forceinline__ int turn_of(int piece) const {
        return piece / chosen.count * 2 + (piece % chosen.count >= even);
    }

    __device__ __forceinline__ Piece operator()(int piece) const {
        const int rest = piece % chosen.count;
        const int which = rest < even ? rank + 2 * rest : 1 - rank + 2 * (rest - even);
        return Piece{chosen.experts[which], first + turn_of(piece) * step};
    }
};

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2)
    experts_down_few(const u8* w, const bf16* h, const float* bias, const int* expert, const float* share,
                     const int* tap_row, bf16* x, bf16* taps, int rows, int used, int outputs, int cols,
                     int tap_at, int tap_cols) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Barriers barriers;
    __shared__ Ring ring;
    __shared__ Chosen chosen;
    __shared__ u64 arrived[MOST_TURNS];  // a row tile's products
    constexpr int pairs = TOKEN_ROWS;
    const int tiles = (outputs + 15) / 16, lane = lane_index();
    const FewPlaces places(dynamic, cols);
    float* products = places.rest;  // [turn][pair][16]
    Fill fill{0, 0, {0, 0}};
    if (warp_index() == FILLER) {
        chosen.make(expert, pairs);
        const Halves halves(chosen, tiles);
        if (lane == 0) {
            for (int turn = 0; turn < halves.turns; ++turn) mbarrier_init(&arrived[turn], 1);
            ring.init(), barriers.init(Task{});
            for (int turn = halves.rank; turn < halves.turns; turn += 2)
                mbarrier_arrive_expect(&arrived[turn], chosen.pairs * 64);
            fill.run(halves, w, cols, tiles, ring, places, SLOTS, true);
        }
    }
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();  // the other block's barriers are there
    griddep_wait();
    griddep_launch();
    const Halves halves(chosen, tiles);
    if (warp_index() < WARPS) {
        bring_few(h, cols, places.tokens);
        cp_async_wait<0>();
        multiply_few(halves.pieces, cols, places, ring, barriers);
        return;
    }
    if (warp_index() < FILLER) {
        const int pair = lane / 4, part = lane % 4;  // 16 rows of a pair by four lanes
        const int of_pair = chosen.of_pair[pair];
        const float times = of_pair >= 0 ? __ldcg(share + pair) : 0.f;
        struct Ready {
            bool is_mine;
            float add[4];
        };
        const auto prepare = [&](int piece) {
            const Piece at = halves(piece);
            const int from = 16 * at.tile + 4 * part;
            const float* mine = bias + (size_t)at.expert * outputs + from;
            Ready ready{of_pair == at.expert};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                ready.add[i] = bias && ready.is_mine && from + i < outputs ? mine[i] : 0.f;
            return ready;
        };
        end_few(halves.pieces, places, barriers, prepare, [&](const Ending& ending, const Ready& ready) {
            const int turn = halves.turn_of(ending.piece);
            const bool is_mine = ready.is_mine;
            float v[4];
            ending.wait();
            if (is_mine) {
                const float* own =
                    (const float*)(ending.sums + pair % 2 * 32 + part % 2 * 16 + pair / 2) + part / 2;
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = times * (sum_of_warps(own + 8 * i) + ready.add[i]);
            }
            ending.done();
            if (is_mine)
                store_async(cluster_address(products + (turn * MOST_PAIRS + pair) * 16 + 4 * part, turn % 2),
                            make_float4(v[0], v[1], v[2], v[3]), cluster_address(&arrived[turn], turn % 2));
        });
        return;
    }
    if (lane == 0) fill.run(halves, w, cols, tiles, ring, places, 1 << 30, false);
    __syncwarp();
    if (ADDS && chosen.pairs == 0) return;
    for (int turn = halves.rank; turn < halves.turns; turn += 2) {
        const int n = 16 * (halves.first + turn * halves.step) + lane % 16;
        constexpr int MOST = MOST_PAIRS / 2;  // rows of half a warp
        float old[MOST];
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int row = lane / 16 + 2 * i;
            old[i] = ADDS && row < rows && n < outputs ? to_f32(x[(size_t)row * outputs + n]) : 0.f;
        }
        if (ADDS || chosen.pairs) mbarrier_wait_cluster(&arrived[turn], 0);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int row = lane / 16 + 2 * i;
            if (row >= rows || n >= outputs) continue;
            const bool is_active = chosen.of_pair[row * used] >= 0;
            if (ADDS && !is_active) continue;
            float sum = 0.f;
            for (int k = 0; is_active && k < used; ++k)
                sum += products[(turn * MOST_PAIRS + row * used + k) * 16 + lane % 16];
            const bf16 y = to_bf16(old[i] + sum);
            x[(size_t)row * outputs + n] = y;
            const int to = taps ? tap_row[row] : -1;
            if (to >= 0) taps[(size_t)to * tap_cols + tap_at + n] = y;
        }
    }
}
