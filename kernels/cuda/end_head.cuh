/* The end of a head of one token in qkv and inject, from sums in the workspace: slices in order, the root of
 * the row, bias, norm, rotation, one rounding. What skinny_heads.cuh and wide_heads.cu share. */
#pragma once
#include "sm90.cuh"

#ifndef MOST_HEAD_SIZE
#define MOST_HEAD_SIZE 128  // a multiple of 64
#endif
#ifndef SHARED_KV  // 1: the second matrix has k heads alone, and what they are at first is the v heads' too
#define SHARED_KV 0
#endif

/* The heads of one launch: those of the first matrix, then those of the second. Heads past `count` share the
 * second's sums. */
struct Heads {
    int size, count, first_count;

    __device__ __forceinline__ int first_tiles() const { return (opaque(first_count) * size + 15) / 16; }
    __device__ __forceinline__ int tiles() const {
        return first_tiles() + ((count - first_count) * size + 15) / 16;
    }
    __device__ __forceinline__ int ended() const { return SHARED_KV ? 2 * count - first_count : count; }
    __device__ __forceinline__ int source(int head) const {
        return SHARED_KV && head >= count ? head - (count - first_count) : head;
    }
    __device__ __forceinline__ int users(int head) const { return SHARED_KV && head >= first_count ? 2 : 1; }
    __device__ __forceinline__ int base(int head) const {  // tile where the head's matrix starts
        return head < first_count ? 0 : first_tiles();
    }
    __device__ __forceinline__ int row(int head) const {  // its first row in its matrix
        return (head < first_count ? head : head - first_count) * size;
    }
    /* Its counters: many warps ask for them over and over, so each head has a line of its own if there is
     * room, else a sector. */
    __device__ __forceinline__ int counter(int head) const { return head * (count <= 128 ? 32 : 8); }
    __device__ __forceinline__ int tiles_of(int head) const {  // that hold rows of it
        return (row(head) + size - 1) / 16 - row(head) / 16 + 1;
    }
};

/* What becomes of a head of one token: bias, norm may be null. `to` null: nothing. */
struct Finish {
    const float *bias, *norm;
    bf16* to;
    bool is_turned, is_zero;
};

/* Where the sums of a head of a token lie: of[row / 16 * tile_stride + row % 16], in `parts` parts that are
 * `part_stride` apart, row: of the head's matrix; and the squares of the token's row, a slice each. All
 * floats; null: rows that have no norm. */
struct HeadSums {
    const float *of, *squares;
    int parts, part_stride, tile_stride, slices, square_stride, cols;
};

/* One head of one token by one warp. A lane has pairs of components: those that turn with each other, and of
 * those that do not turn two neighbours. Whatever can be is read before turn.begin(), which waits for the
 * sums; turn.end() comes last. */
template <class Turn>
__device__ __forceinline__ void end_head(const HeadSums& sums, const Heads& heads, int head, Turn& turn_of_it,
                                         float eps, const float* cos, const float* sin, int pairs,
                                         const Finish& how) {
    constexpr int LANE_PAIRS = MOST_HEAD_SIZE / 64;
    constexpr bool IS_SMALL = LANE_PAIRS <= 2;  // else registers are too few for what is read ahead
    constexpr int KEPT = IS_SMALL ? LANE_PAIRS : 1;
    float2 y[LANE_PAIRS], norm[KEPT], turn[KEPT];
    if (!how.is_turned) pairs = 0;
    auto low_at = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? p : 2 * p;
    };
    auto high_at = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? p + pairs : 2 * p + 1;
    };
    auto both = [&](const float* from, int m) {
        return make_float2(from && low_at(m) < heads.size ? from[low_at(m)] : 0.f,
                           from && high_at(m) < heads.size ? from[high_at(m)] : 0.f);
    };
    auto turn_of = [&](int m) {
        int p = lane_index() + 32 * m;
        return p < pairs ? make_float2(cos[p], sin[p]) : make_float2(1.f, 0.f);
    };
    if constexpr (IS_SMALL)
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            norm[m] = both(how.norm, m);
            turn[m] = turn_of(m);
        }
    turn_of_it.begin();
    float of_slices[2];  // squares of the row, a slice a lane: at most 64
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        int slice = lane_index() + 32 * m;
        of_slices[m] =
            sums.squares && slice < sums.slices ? __ldcg(sums.squares + sums.square_stride * slice) : 0.f;
    }
    auto sum_at = [&](int n) {
        int row = heads.row(head) + min(n, heads.size - 1);
        return row / 16 * sums.tile_stride + row % 16;
    };
    int from[LANE_PAIRS][2];
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        y[m] = make_float2(0.f, 0.f);
        from[m][0] = sum_at(low_at(m)), from[m][1] = sum_at(high_at(m));
    }
    constexpr int AT_ONCE = IS_SMALL ? 2 : 1;  // parts whose loads are under way together
#pragma unroll 1
    for (int part = 0; part < sums.parts; part += AT_ONCE) {
        float2 first[LANE_PAIRS], second[KEPT];
        const float* at = sums.of + part * sums.part_stride;
        const bool has_second = IS_SMALL && part + 1 < sums.parts;
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            first[m] = make_float2(__ldcg(at + from[m][0]), __ldcg(at + from[m][1]));
            if (m >= KEPT) continue;
            second[m] = make_float2(0.f, 0.f);
            if (has_second)
                second[m] = make_float2(__ldcg(at + sums.part_stride + from[m][0]),
                                        __ldcg(at + sums.part_stride + from[m][1]));
        }
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            y[m].x += first[m].x, y[m].y += first[m].y;
            if (m < KEPT && has_second) y[m].x += second[m].x, y[m].y += second[m].y;
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        if (low_at(m) >= heads.size) y[m].x = 0.f;
        if (high_at(m) >= heads.size) y[m].y = 0.f;
    }
    float root = sums.squares ? rsqrtf(warp_sum(of_slices[0] + of_slices[1]) / sums.cols + eps) : 1.f;
    float squares = 0.f;
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        float2 bias = both(how.bias, m);
        y[m] = make_float2(y[m].x * root + bias.x, y[m].y * root + bias.y);
        squares += y[m].x * y[m].x;
        squares += y[m].y * y[m].y;
    }
    if (how.norm) {
        float r = rsqrtf(warp_sum(squares) / heads.size + eps);
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            const float2 times = IS_SMALL ? norm[m % KEPT] : both(how.norm, m);
            y[m].x = times.x * (y[m].x * r), y[m].y = times.y * (y[m].y * r);
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        if (lane_index() + 32 * m < pairs) {
            const float2 by = IS_SMALL ? turn[m % KEPT] : turn_of(m);
            y[m] = make_float2(y[m].x * by.x - y[m].y * by.y, y[m].y * by.x + y[m].x * by.y);
        }
        if (how.to && low_at(m) < heads.size) how.to[low_at(m)] = to_bf16(how.is_zero ? 0.f : y[m].x);
        if (how.to && high_at(m) < heads.size) how.to[high_at(m)] = to_bf16(how.is_zero ? 0.f : y[m].y);
    }
    turn_of_it.end();
}

struct QkvRule {
    const float *q_bias, *kv_bias, *q_norm, *k_norm, *v_norm;
    const int *slot, *pos, *at;
    bf16 *cache_k, *cache_v, *q;
    int heads, groups, size, cached;

    __device__ __forceinline__ Finish operator()(int head, int token) const {
        bool is_active = pos[token] >= 0;
        if (head < heads) {
            bf16* to = q + ((size_t)token * heads + head) * size;
            return Finish{q_bias ? q_bias + head * size : nullptr, q_norm, to, true, !is_active};
        }
        int kv = head - heads, group = kv % groups;
        bool is_key = kv < groups;
        const float* bias = kv_bias ? kv_bias + (SHARED_KV ? group : kv) * size : nullptr;
        if (!is_active) return Finish{nullptr, nullptr, nullptr, false, false};
        size_t to = (((size_t)slot[token] * groups + group) * cached + row_of_key(at[token], cached)) * size;
        return Finish{bias, is_key ? k_norm : v_norm, (is_key ? cache_k : cache_v) + to, is_key, false};
    }
};

struct InjectRule {
    const float *kv_bias, *k_norm;
    const int *slot, *pos, *at;
    bf16 *cache_k, *cache_v;
    int slots, groups, size, cached;

    __device__ __forceinline__ Finish operator()(int head, int token) const {
        if (pos[token] < 0) return Finish{nullptr, nullptr, nullptr, false, false};
        int layer = head / (2 * groups), group = head % groups;
        bool is_key = head / groups % 2 == 0;
        size_t row =
            (((size_t)layer * slots + slot[token]) * groups + group) * cached + row_of_key(at[token], cached);
        const float* norm = is_key && k_norm ? k_norm + layer * size : nullptr;
        return Finish{kv_bias ? kv_bias + head * size : nullptr, norm,
                      (is_key ? cache_k : cache_v) + row * size, is_key, false};
    }
};
