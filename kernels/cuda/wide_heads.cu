/* end_qkv, end_inject: what qkv_fast and inject_fast make of the heads, from the sums of all slices in f32
 *         (wide_sums.cu): end_head.cuh.
 * Grid:   blocks of 4 warps, a head of a token each.
 * Moves:  T*N*4 bytes a slice from L2, as many of bf16 as there are heads.
 * Truth:  oracle.py qkv, inject. */
#include "end_head.cuh"
#include "tree.cuh"

/* The launches' order says that all sums are there. */
struct NoTurn {
    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void end() const {}
};

/* y: (slices, rows, outputs), the first matrix's outputs, then the second's. squares: (slices, rows) or null.
 */
template <class Rule>
__device__ __forceinline__ void end_heads(const float* y, const float* squares, float eps, const float* cos,
                                          const float* sin, const int* pos, int rows, int cols, int pairs,
                                          const Heads& heads, const Rule& rule) {
    griddep_launch();
    griddep_wait();
    const int item = blockIdx.x * 4 + warp_index();
    if (item >= heads.ended() * rows) return;
    const int head = item % heads.ended(), token = item / heads.ended(), source = heads.source(head);
    const int outputs = heads.count * heads.size, begin = source < heads.first_count ? 0 : heads.first_count;
    const HeadSums sums{y + (size_t)token * outputs + begin * heads.size,
                        squares ? squares + token : nullptr,
                        TREE_SLICES,
                        rows * outputs,
                        16,
                        TREE_SLICES,
                        rows,
                        cols};
    const size_t at = (size_t)max(pos[token], 0) * pairs;
    NoTurn turn;
    end_head(sums, heads, source, turn, eps, cos + at, sin + at, pairs, rule(head, token));
}

extern "C" __global__ void __launch_bounds__(128)
    end_qkv(const float* y, const float* squares, const float* q_bias, const float* kv_bias,
            const float* q_norm, const float* k_norm, const float* v_norm, const float* cos, const float* sin,
            const int* slot, const int* pos, const int* at, bf16* cache_k, bf16* cache_v, bf16* q, float eps,
            int rows, int cols, int heads, int groups, int size, int pairs, int cached) {
    const Heads all{size, heads + (SHARED_KV ? 1 : 2) * groups, heads};
    const QkvRule rule{q_bias,  kv_bias, q_norm, k_norm, v_norm, slot, pos,   at,
                       cache_k, cache_v, q,      heads,  groups, size, cached};
    end_heads(y, squares, eps, cos, sin, pos, rows, cols, pairs, all, rule);
}

extern "C" __global__ void __launch_bounds__(128)
    end_inject(const float* y, const float* kv_bias, const float* k_norm, const float* cos, const float* sin,
               const int* slot, const int* pos, const int* at, bf16* cache_k, bf16* cache_v, float eps,
               int rows, int cols, int layers, int slots, int groups, int size, int pairs, int cached) {
    const int count = layers * 2 * groups;
    const InjectRule rule{kv_bias, k_norm, slot, pos, at, cache_k, cache_v, slots, groups, size, cached};
    end_heads(y, nullptr, eps, cos, sin, pos, rows, cols, pairs, Heads{size, count, count}, rule);
}
