/* The end of qkv_fast and inject_fast: a cluster has whole heads, its blocks neighbouring tiles of them.
 * A finishing warp sends its tile's sums, token by token, to the block of the cluster that ends the token,
 * and ends the tokens of its own block once the likes of it in the other blocks have sent theirs: the root of
 * the row, bias, norm, rotation, one rounding. HEAD_CLUSTER is the fewest tiles that hold whole heads.
 * Nothing goes through memory, and a head is ended while the next ones' weights travel. */
#pragma once
#include "skinny.cuh"

constexpr int UNIT_ROWS = 16 * HEAD_CLUSTER;  // of the heads that a cluster ends together
constexpr int OWN_TOKENS = (MOST_ROWS + HEAD_CLUSTER - 1) / HEAD_CLUSTER;  // that a block ends
constexpr int BOX = OWN_TOKENS * UNIT_ROWS;                                // floats, [token][row]
constexpr int MOST_HEAD_SIZE = 128;

/* One packed matrix, or two that follow each other; each is rounded up to whole units, whose missing tiles
 * read the last one's weights: nobody looks at their sums. */
struct HeadWeights {
    int cols;
    const u16 *first, *second;
    int first_rows, second_rows;

    __device__ __forceinline__ static int span(int rows) {
        return (rows + UNIT_ROWS - 1) / UNIT_ROWS * HEAD_CLUSTER;
    }
    __device__ __forceinline__ int tiles() const { return span(first_rows) + span(second_rows); }

    __device__ __forceinline__ const char* at(int tile) const {
        int first_span = span(opaque(first_rows));
        bool is_first = tile < first_span;
        tile =
            min(is_first ? tile : tile - first_span, ((is_first ? first_rows : second_rows) + 15) / 16 - 1);
        return (const char*)(is_first ? first : second) +
               (size_t)tile * ((opaque(cols) + 31) / 32) * CHUNK_BYTES;
    }
};

/* What becomes of a head of one token: bias, norm, rotation may be null. `to` null: nothing. */
struct Finish {
    const float *bias, *norm;
    bf16* to;
    bool is_turned, is_zero;
};

/* One head of one token by one warp. A lane has pairs of components: those that turn with each other, and of
 * those that do not turn two neighbours. */
__device__ __forceinline__ void finish_head(const float* sums, int size, float root, float eps,
                                            const float* cos, const float* sin, int pairs,
                                            const Finish& how) {
    constexpr int LANE_PAIRS = MOST_HEAD_SIZE / 64;
    float low[LANE_PAIRS], high[LANE_PAIRS], squares = 0.f;
    if (!how.is_turned) pairs = 0;
    auto low_at = [&](int p) { return p < pairs ? p : 2 * p; };
    auto high_at = [&](int p) { return p < pairs ? p + pairs : 2 * p + 1; };
    auto value = [&](int i) { return i < size ? sums[i] * root + (how.bias ? how.bias[i] : 0.f) : 0.f; };
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        int p = lane_index() + 32 * m;
        low[m] = value(low_at(p)), high[m] = value(high_at(p));
        squares += low[m] * low[m];
        squares += high[m] * high[m];
    }
    if (how.norm) {
        float r = rsqrtf(warp_sum(squares) / size + eps);
#pragma unroll
        for (int m = 0; m < LANE_PAIRS; ++m) {
            int p = lane_index() + 32 * m;
            if (low_at(p) < size) low[m] = how.norm[low_at(p)] * (low[m] * r);
            if (high_at(p) < size) high[m] = how.norm[high_at(p)] * (high[m] * r);
        }
    }
#pragma unroll
    for (int m = 0; m < LANE_PAIRS; ++m) {
        int p = lane_index() + 32 * m;
        if (p < pairs) {
            float x = low[m], y = high[m];
            low[m] = x * cos[p] - y * sin[p];
            high[m] = y * cos[p] + x * sin[p];
        }
        if (low_at(p) < size) how.to[low_at(p)] = to_bf16(how.is_zero ? 0.f : low[m]);
        if (high_at(p) < size) how.to[high_at(p)] = to_bf16(how.is_zero ? 0.f : high[m]);
    }
}

/* The sink. rule(head, token) says what becomes of it; pos: of each token. */
template <class Rule>
struct EndHeads {
    const Task& task;
    const Rule& rule;
    const float *cos, *sin;
    const int* pos;
    float eps;
    int pairs, size, first_rows, second_rows;
    RowScale* scale;       // null: the token rows were not normed
    float* box = nullptr;  // two of this warp, and when each is full
    u64* full = nullptr;
    int turn = 0;

    __device__ __forceinline__ void receive(float* boxes, u64* arrived) {
        int me = warp_index() - WARPS;
        box = boxes + 2 * me * BOX, full = arrived + 2 * me;
    }

    __device__ __forceinline__ void use_squares(float sum) { scale->make(task, sum, eps); }
    __device__ __forceinline__ void end() const {}

    __device__ __forceinline__ int first_token() const {
        return (int)(blockIdx.x % HEAD_CLUSTER) * OWN_TOKENS;
    }

    /* The turns of this block's tokens, into L1 before they are needed. */
    __device__ __forceinline__ void prepare(int) const {
        if (turn > 0) return;
        for (int token = first_token(); token < min(task.rows, first_token() + OWN_TOKENS); ++token) {
            size_t at = (size_t)max(pos[token], 0) * pairs;
            if (32 * lane_index() >= pairs) continue;
            prefetch_l1(cos + at + 32 * lane_index());
            prefetch_l1(sin + at + 32 * lane_index());
        }
    }

    __device__ __forceinline__ void operator()(int tile, float2 (&v)[UNITS]) {
        int set = turn & 1;
        float* from = box + set * BOX;
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            int token = token_of(q);
            if (token >= task.rows) continue;
            float* to = map_shared(from, token / OWN_TOKENS) + token % OWN_TOKENS * UNIT_ROWS +
                        16 * (int)(blockIdx.x % HEAD_CLUSTER) + row_of();
            to[0] = v[q].x;
            to[8] = v[q].y;
        }
        __syncwarp();
        if (lane_index() < HEAD_CLUSTER) mbarrier_arrive_at(full + set, lane_index());
        mbarrier_wait_cluster(full + set, turn >> 1 & 1);
        ++turn;

        int first_span = HeadWeights::span(first_rows);
        bool is_first = tile < first_span;
        int row = (is_first ? tile : tile - first_span) / HEAD_CLUSTER * UNIT_ROWS;
        int rows = min(UNIT_ROWS, (is_first ? first_rows : second_rows) - row);
        int head = row / size + (is_first ? 0 : first_rows / size);
        for (int token = first_token(); token < min(task.rows, first_token() + OWN_TOKENS); ++token) {
            size_t at = (size_t)max(pos[token], 0) * pairs;
            for (int i = 0; i * size < rows; ++i) {
                Finish how = rule(head + i, token);
                if (!how.to) continue;
                finish_head(from + (token - first_token()) * UNIT_ROWS + i * size, size,
                            scale ? scale->of[token] : 1.f, eps, cos + at, sin + at, pairs, how);
            }
        }
    }
};
