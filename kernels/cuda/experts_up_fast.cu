/* experts_up_fast: h[r] = act(gate, up) of pair r's expert on its token, rounded once. A packed tile holds 8
 *         gate rows and the 8 up rows that go with them, so both numbers of an output are in one thread.
 * Grid:   experts.cuh.
 * Moves:  2*F*D numbers of each expert that has pairs; bound by HBM.
 * Truth:  oracle_moe.py experts_up. */
#include "activate.cuh"
#include "experts.cuh"

#ifndef ACT
#define ACT 0
#endif

struct Activate {
    const Shape& shape;
    const float* bias;
    const int* expert;
    bf16* h;
    int ffn;
    float limit, alpha;
    const int* order;
    int runs;

    struct Ready {
        float gate_bias, up_bias;
        int pair;  // of the run's row lane_index()
    };

    /* Pairs of inactive rows get zeros. */
    __device__ __forceinline__ void begin() const {
        const int me = blockIdx.x * FINISHERS + warp_index() - WARPS;
        for (int r = me; r < shape.pairs; r += gridDim.x * FINISHERS)
            if (__ldcg(expert + r) < 0)
                for (int f = lane_index(); f < ffn; f += 32) h[(size_t)r * ffn + f] = bf16{0};
    }

    __device__ __forceinline__ Ready prepare(const Run& run, int of_expert, int tile) const {
        const int f = 8 * tile + row_of();
        const float* mine = bias + (size_t)of_expert * 2 * ffn + f;
        const bool has_bias = bias && f < ffn;
        return {has_bias ? mine[0] : 0.f, has_bias ? mine[ffn] : 0.f,
                lane_index() < run.count ? order[run.begin + lane_index()] : -1};
    }

    __device__ __forceinline__ void operator()(const Run& run, int tile, const float2 (&v)[UNITS],
                                               const Ready& ready) const {
        const int f = 8 * tile + row_of();
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            if (q > 1 && 8 * (q / 2) >= run.count) break;
            const int to = __shfl_sync(FULL_WARP, ready.pair, token_of(q));
            if (to >= 0 && f < ffn)
                h[(size_t)to * ffn + f] =
                    to_bf16(activate(ACT, v[q].x + ready.gate_bias, v[q].y + ready.up_bias, limit, alpha));
        }
    }
};

extern "C" __global__ void __launch_bounds__(EXPERTS_THREADS, 1)
    experts_up_fast(const u8* w, const bf16* u, const float* bias, const int* expert, const int* first,
                    const int* order, bf16* h, float limit, float alpha, int pairs, int used, int experts_,
                    int ffn, int cols, int range, int span, int room) {
    const Shape shape{experts_, (ffn + 7) / 8, cols, pairs, range, span, room};
    Activate sink{shape, bias, expert, h, ffn, limit, alpha, nullptr, 0};
    experts<false>(shape, w, Tokens{u, used}, first, order, sink);
}
