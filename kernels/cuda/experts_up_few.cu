/* experts_up_few: experts_up_fast for up to 8 pairs, with the same bits.
 * Grid:   experts_few.cuh. The pieces of all experts lie in a row; a block takes a stretch of them.
 * Moves:  2*F*D numbers of each expert that has pairs; bound by HBM.
 * Truth:  oracle_moe.py experts_up. */
#include "activate.cuh"
#include "experts_few.cuh"

#ifndef ACT
#define ACT 0
#endif

/* The pieces of a block. */
struct Stretch {
    const Chosen& chosen;
    int tiles, begin, pieces;

    __device__ __forceinline__ Stretch(const Chosen& chosen, int tiles) : chosen(chosen), tiles(tiles) {
        const u32 all = tiles * chosen.count;
        begin = all * blockIdx.x / gridDim.x;
        pieces = all * (blockIdx.x + 1) / gridDim.x - begin;
    }

    __device__ __forceinline__ Piece operator()(int piece) const {
        const int at = begin + piece;
        return Piece{chosen.experts[at / tiles], at % tiles};
    }
};

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2)
    experts_up_few(const u8* w, const bf16* u, const float* bias, const int* expert, bf16* h, float limit,
                   float alpha, int used, int ffn, int cols) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Barriers barriers;
    __shared__ Ring ring;
    __shared__ Chosen chosen;
    const FewPlaces places(dynamic, cols);
    constexpr int rows = TOKEN_ROWS;
    const int tiles = (ffn + 7) / 8, lane = lane_index();
    if (threadIdx.x == 0) ring.init(), barriers.init(Task{});
    __syncthreads();
    griddep_wait();
    griddep_launch();
    Fill fill{0, 0, {0, 0}};
    if (warp_index() == FILLER) {
        chosen.make(expert, rows * used);
        if (lane == 0) fill.run(Stretch(chosen, tiles), w, cols, tiles, ring, places, SLOTS, true);
    } else if (warp_index() < WARPS) {
        bring_few(u, cols, places.tokens);
    }
    __syncthreads();
    const Stretch stretch(chosen, tiles);
    if (warp_index() == FILLER) {
        if (lane == 0) fill.run(stretch, w, cols, tiles, ring, places, 1 << 30, false);
        return;
    }
    if (warp_index() < WARPS) {
        cp_async_wait<0>();
        multiply_few(stretch.pieces, cols, places, ring, barriers);
        return;
    }
    for (int r = blockIdx.x * FINISHERS + warp_index() - WARPS; r < rows * used; r += gridDim.x * FINISHERS)
        if (chosen.of_pair[r] < 0)  // of an inactive row
            for (int f = lane; f < ffn; f += 32) h[(size_t)r * ffn + f] = bf16{0};
    struct Ready {
        Piece at;
        float gate_bias, up_bias;
    };
    const auto prepare = [&](int piece) {
        const Piece at = stretch(piece);
        const int f = 8 * at.tile + lane % 8;
        const float* mine = bias + (size_t)at.expert * 2 * ffn + f;
        const bool has_bias = bias && f < ffn;
        return Ready{at, has_bias ? mine[0] : 0.f, has_bias ? mine[ffn] : 0.f};
    };
    end_few(stretch.pieces, places, barriers, prepare, [&](const Ending& ending, const Ready& ready) {
        const int f = 8 * ready.at.tile + lane % 8;
        ending.wait();
        float2 v[(rows + 3) / 4];
#pragma unroll
        for (int i = 0; i < (rows + 3) / 4; ++i)
            if (const int row = lane / 8 + 4 * i; row < rows)
                v[i] = sum_of_warps(ending.sums + row % 2 * 32 + lane % 8 * 4 + row / 2);
        ending.done();
#pragma unroll
        for (int i = 0; i < (rows + 3) / 4; ++i)
            if (const int row = lane / 8 + 4 * i; row < rows && f < ffn) {
                const bf16 y =
                    to_bf16(activate(ACT, v[i].x + ready.gate_bias, v[i].y + ready.up_bias, limit, alpha));
                for (int r = row * used; r < (row + 1) * used; ++r)
                    if (chosen.of_pair[r] == ready.at.expert) h[(size_t)r * ffn + f] = y;
            }
    });
}
