/* end_qkv, end_inject: what qkv_fast and inject_fast make of the heads, from the sums of all slices in f32
 *         (wide_sums.cu): end_head.cuh.
 * Grid:   (heads, tokens / 4), a warp a token; what is not the product's is read before the wait for it.
 * Moves:  T*N*4 bytes a slice from L2, as many of bf16 as there are heads; bound by instructions, so sizes
 *         are constants.
 * Truth:  oracle.py qkv, inject. */
#include "end_head.cuh"
#include "tree.cuh"

#ifndef HEAD  // components of a head, and pairs of them that turn
#define HEAD 128
#define HEAD_PAIRS 64
#endif

/* The launches' order says that all sums are there. */
struct AfterProduct {
    __device__ __forceinline__ void begin() const { griddep_wait(); }
    __device__ __forceinline__ void end() const {}
};

/* y: (slices, rows, outputs), the first matrix's outputs, then the second's. squares: (slices, rows) or null.
 * count, first_count: of heads. */
template <class Rule>
__device__ __forceinline__ void end_heads(const float* y, const float* squares, float eps, const float* cos,
                                          const float* sin, const int* pos, int rows, int cols, int count,
                                          int first_count, const Rule& rule) {
    griddep_launch();
    const Heads heads{HEAD, count, first_count};
    const int head = blockIdx.x, token = blockIdx.y * 4 + warp_index();
    if (token >= rows) return;
    const int source = heads.source(head), begin = source < first_count ? 0 : first_count;
    const HeadSums sums{y + ((size_t)token * count + begin) * HEAD,
                        squares ? squares + token : nullptr,
                        TREE_SLICES,
                        rows * count * HEAD,
                        16,
                        TREE_SLICES,
                        rows,
                        cols};
    const size_t at = (size_t)max(pos[token], 0) * HEAD_PAIRS;
    AfterProduct turn;
    end_head(sums, heads, source, turn, eps, cos + at, sin + at, HEAD_PAIRS, rule(head, token));
}

extern "C" __global__ void __launch_bounds__(128)
    end_qkv(const float* y, const float* squares, const float* q_bias, const float* kv_bias,
            const float* q_norm, const float* k_norm, const float* v_norm, const float* cos, const float* sin,
            const int* slot, const int* pos, const int* at, bf16* cache_k, bf16* cache_v, bf16* q, float eps,
            int rows, int cols, int heads, int groups, int cached) {
    const QkvRule rule{q_bias,  kv_bias, q_norm, k_norm, v_norm, slot, pos,   at,
                       cache_k, cache_v, q,      heads,  groups, HEAD, cached};
    end_heads(y, squares, eps, cos, sin, pos, rows, cols, heads + (SHARED_KV ? 1 : 2) * groups, heads, rule);
}

extern "C" __global__ void __launch_bounds__(128)
    end_inject(const float* y, const float* kv_bias, const float* k_norm, const float* cos, const float* sin,
               const int* slot, const int* pos, const int* at, bf16* cache_k, bf16* cache_v, float eps,
               int rows, int cols, int layers, int slots, int groups, int cached) {
    const int count = layers * 2 * groups;
    const InjectRule rule{kv_bias, k_norm, slot, pos, at, cache_k, cache_v, slots, groups, HEAD, cached};
    end_heads(y, nullptr, eps, cos, sin, pos, rows, cols, count, count, rule);
}
