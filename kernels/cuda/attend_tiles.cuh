/* The pieces of attend_fast.cu: sizes, the ring of shared memory that keys and values come through, and what
 * a warp does with 64 of them. */
#pragma once
#include "attend_plan.cuh"

#ifndef HEAD
#define HEAD 128
#endif
#ifndef TILES  // 16-row tiles of a set
#define TILES 4
#endif
#ifndef RING  // entries of 64 keys, K or V, in shared memory
#define RING 3
#endif
#ifndef TERMS  // bf16 numbers that make one probability: 2 keep 16 bits of it
#define TERMS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif

constexpr int HALF = LEAF / 2;
constexpr int ROWS = 16 * TILES;
constexpr int UNITS = HEAD / 8;  // 16-byte units of a head
constexpr int ENTRY = HALF * HEAD * 2;
constexpr int Q_BYTES = ROWS * HEAD * 2;
constexpr int P_BYTES = ROWS * HALF * 2;
constexpr int PAIRS = HEAD / 64;         // pairs of 8 components of a warp
constexpr int SLOT = ROWS * (HEAD + 2);  // floats: o, m, l of every row
constexpr float LOG2_E = 1.4426950408889634f;

extern __shared__ __align__(128) char shared[];  // RING entries, q, p

/* 16-byte unit of a row-major tile. The exclusive or spreads a column of eight rows over all banks. */
template <int RowUnits>
__device__ __forceinline__ char* unit_at(char* tile, int row, int unit) {
    return tile + row * RowUnits * 16 + ((unit ^ (row & 7)) << 4);
}

/* Where a block is in its list of units, leaf by leaf. */
struct Cursor {
    int item, leader, g, leaf, leaf_end, low, high;

    __device__ __forceinline__ void locate(const Plan& plan, int G, int only) {
        g = item % G;
        int unit = item / G;
        leader = find_leader(plan, unit);
        low = plan.low[leader], high = plan.high[leader];
        int leaves = unit_leaves(plan.level);
        unit += low / LEAF / leaves - plan.start[leader];
        leaf = max(unit * leaves, low / LEAF);
        leaf_end = min((unit + 1) * leaves, (high - 1) / LEAF + 1);
        if (only >= 0) low = plan.first[only], high = plan.last[only];
    }
};

/* The entries a block's units need, in the order it takes them: leaf by leaf K, K, V, V, 64 keys each. */
struct Feed {
    Cursor at;
    int entry, step, end, only;

    __device__ __forceinline__ void start(const Plan& plan, int G, int item, int step_, int end_, int only_) {
        at.item = item, entry = 0, step = step_, end = end_, only = only_;
        if (item < end) at.locate(plan, G, only);
    }

    /* Order the next entry, zeros where no row sees a key; one group, empty when the work is done.
     * Part: its place in the leaf, 0 to 3, which each caller knows. */
    template <int Part>
    __device__ __forceinline__ void load(const Plan& plan, const bf16* cache, int G, int S) {
        if (at.item < end) {
            const int thread = opaque(threadIdx.x), unit = thread % UNITS;
            int key = at.leaf * LEAF + Part % 2 * HALF + thread / UNITS;
            cache += (((size_t)plan.slot[at.leader] * G + at.g) * S + key) * HEAD + 8 * unit;
            char* to = unit_at<UNITS>(shared + entry * ENTRY, thread / UNITS, unit);
#pragma unroll
            for (int i = 0; i < HALF * UNITS / THREADS; ++i, key += THREADS / UNITS) {
                bool is_seen = key >= at.low && key < at.high;
                cp_async_16_or_zero(to + 16 * i * THREADS, is_seen ? cache + 8 * i * THREADS : cache,
                                    is_seen);
            }
            if (Part == 3 && ++at.leaf == at.leaf_end) {
                at.item += step;
                if (at.item < end) at.locate(plan, G, only);
            }
        }
        entry = entry + 1 == RING ? 0 : entry + 1;
        cp_async_commit();
    }

    /* The next entry to read, after this thread has waited for its copies; orders the one RING - 1 behind it.
     */
    template <int Part>
    __device__ __forceinline__ char* take(const Plan& plan, const bf16* cache_k, const bf16* cache_v, int G,
                                          int S) {
        constexpr int LATER = (Part + RING - 1) % 4;
        int here = entry + 1 == RING ? 0 : entry + 1;  // RING - 1 entries behind the one that is filled next
        __syncthreads();  // the entry is there for all, and the one before has been read by all
        load<LATER>(plan, LATER < 2 ? cache_k : cache_v, G, S);
        return shared + here * ENTRY;
    }
};

/* Rows of q as the set's tile rows: query heads of kv head g side by side, row by row. */
__device__ __forceinline__ void load_q(const bf16* q, char* to, int from, int T, int H, int ratio, int g) {
    int thread = opaque(threadIdx.x), unit = thread % UNITS;
    for (int row = thread / UNITS; row < ROWS; row += THREADS / UNITS) {
        int t = from + row / ratio;
        const bf16* source = q + ((size_t)min(t, T - 1) * H + g * ratio + row % ratio) * HEAD + 8 * unit;
        cp_async_16_or_zero(unit_at<UNITS>(to, row, unit), source, t < T);
    }
}

/* s += q k^T for the warp's 16 keys of an entry: two columns of tiles. */
__device__ __forceinline__ void scores(float (&s)[TILES][2][4], char* q, char* k) {
    int lane = opaque(lane_index()), i = lane / 8, r = lane % 8;
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
        uint4 b = ldmatrix_x4(unit_at<UNITS>(k, 16 * warp_index() + i / 2 * 8 + r, 2 * step + i % 2));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            uint4 a = ldmatrix_x4(unit_at<UNITS>(q, 16 * tile + i % 2 * 8 + r, 2 * step + i / 2));
            mma_bf16(s[tile][0], a, b.x, b.y);
            mma_bf16(s[tile][1], a, b.z, b.w);
        }
    }
}

/* o += p v for the warp's quarter of the components and the 64 keys of an entry. */
__device__ __forceinline__ void values(float (&o)[TILES][2 * PAIRS][4], char* p, char* v) {
    int lane = opaque(lane_index()), i = lane / 8, r = lane % 8;
#pragma unroll
    for (int step = 0; step < HALF / 16; ++step) {
        uint4 b[PAIRS];
#pragma unroll
        for (int n = 0; n < PAIRS; ++n)
            b[n] = ldmatrix_x4_trans(
                unit_at<UNITS>(v, 16 * step + i % 2 * 8 + r, warp_index() * (UNITS / 4) + 2 * n + i / 2));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                uint4 a =
                    ldmatrix_x4(unit_at<8>(p + term * P_BYTES, 16 * tile + i % 2 * 8 + r, 2 * step + i / 2));
#pragma unroll
                for (int n = 0; n < PAIRS; ++n) {
                    mma_bf16(o[tile][2 * n], a, b[n].x, b[n].y);
                    mma_bf16(o[tile][2 * n + 1], a, b[n].z, b[n].w);
                }
            }
    }
}

/* The largest score of a row in a leaf: the warps' maxima. */
__device__ __forceinline__ float top_of(const float (&tops)[4][ROWS], int row) {
    return fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
}

/* s becomes p = 2^(s - m), exactly 0 where s is -infinity; p goes to shared memory as bf16, its sums to
 * `sum`. */
__device__ __forceinline__ void probabilities(float (&s)[TILES][2][4], const float (&tops)[4][ROWS], char* p,
                                              float (&sum)[TILES][2]) {
    const int lane = opaque(lane_index());
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = 16 * tile + 8 * half + lane / 4;
            float m = top_of(tops, row);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float x = exp2_fast(__fsub_rn(s[tile][n][2 * half], m));
                float y = exp2_fast(__fsub_rn(s[tile][n][2 * half + 1], m));
                u32 pair = pack_bf16(x, y);
                char* to = unit_at<8>(p, row, 2 * warp_index() + n) + 4 * (lane % 4);
                *(u32*)to = pair;
                if (TERMS == 2)
                    *(u32*)(to + P_BYTES) =
                        pack_bf16(__fsub_rn(x, low_f32(pair)), __fsub_rn(y, high_f32(pair)));
                else
                    x = low_f32(pair), y = high_f32(pair);  // what is divided by is what was added up
                sum[tile][half] = __fadd_rn(sum[tile][half], __fadd_rn(x, y));
            }
        }
}
