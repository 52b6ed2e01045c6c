/* The frame of the wide_* kernels: tokens (rows x K) times packed weights (N x K) transposed for 17 to 1,024
 * rows, with the sums of skinny.cuh. Tokens come from lay_wide.cu.
 * Grid:   at most as many blocks as the card holds together, or clusters of two that share weights, of
 *         which each brings half to both. A unit of work is a tile of TOKENS tokens, a group of 16 *
 *         WEIGHT_TILES outputs and a slice of K; units in a row are dealt out to blocks by warps of the
 *         tree, so that all blocks end together: a block's share may begin and end within a unit. It first
 *         sums what it has of the last one, from that unit's first warp on, and hands it over in the
 *         workspace; what it has of its first unit comes last, upon what the block before it has handed
 *         over. A warpgroup for 64 outputs x TOKENS tokens each, and one that copies. Packed weights are
 *         the A operand of wgmma, or without WGMMA of mma.sync, in registers as they lie in memory; tokens
 *         its B operand.
 * Moves:  each unit its weights and tokens once from L2, through a ring of bulk copies of 64 k. Of 512 rows
 *         tensor cores have three quarters of the time, ends of units and waits the rest (bench/NOTES.md);
 *         two sets of sums, of the tree's warp and of all before, leave registers for 128 x 192 outputs.
 * Bits:   an output's sum runs over a warp's chunks, then warps, then slices, each ascending, whoever sums
 *         them. wgmma and mma.sync round alike (tests/kernels/test_wide.py, bench/wide.py).
 * Source: kernel-playbook 7; shares that end together as in Stream-K (Osama et al. 2023). */
#pragma once
#ifndef TOKENS
#define TOKENS 64
#define WEIGHT_TILES 8
#define STAGES 8
#endif
#ifndef CLUSTER  // 1, or 2 blocks that share weights, each with tokens of its own
#define CLUSTER 1
#endif
#include "tree.cuh"
#include "wgmma_stage.cuh"

// Warps: to order a stage's 17 or more copies takes one longer than to multiply it.
constexpr int COPIERS = 4;
static_assert(CLUSTER <= 2);  // a step has two chunks
static_assert(!FP8 || (TREE_SPAN == SPAN && SPAN == 4));
constexpr int THREADS = CONSUMERS + 32 * COPIERS;
#ifdef WGMMA  // registers of a thread that computes, and of one that copies
constexpr int LEFT = TOKENS == 128 && WEIGHT_TILES == 12 ? 32 : 56;
constexpr int TAKEN = WEIGHT_TILES == 12 ? (512 - LEFT) / 3 / 8 * 8 : 224;
constexpr bool TAKES_MORE = WEIGHT_TILES == 12 || (TOKENS == 128 && WEIGHT_TILES == 8);
#endif
constexpr int RING = STAGES * STAGE;
constexpr int TOGETHER = CLUSTER * TOKENS;  // tokens that share a copy of weights
constexpr int SUMS = TOKENS / 2;            // of a lane

/* The work of a launch. */
struct Work {
    const bf16* x;  // [steps of two chunks][padded rows][64 k], as lay_wide.cu lays it
    float* handed;  // a block's sums of a unit that it does not end: [block][warp][SUMS / 4][lane][4]
    u32* counters;  // [block][warp]: whether they are there
    int rows, cols, groups;

    __device__ __forceinline__ int padded() const { return (rows + 7) / 8 * 8; }
    __device__ __forceinline__ int token_tiles() const { return (rows + TOGETHER - 1) / TOGETHER; }
    __device__ __forceinline__ int units() const { return token_tiles() * groups * TREE_SLICES; }
};

/* Tiles of tokens come last: blocks that have the same weights of other tokens are on the card together, and
 * share them in L2. */
struct Unit {
    int first_token, group, slice;

    __device__ __forceinline__ Unit(const Work& work, int index) {
        const int rest = index / work.groups;
        group = index % work.groups, slice = rest % TREE_SLICES;
        first_token = rest / TREE_SLICES * TOGETHER + blockIdx.x % CLUSTER * TOKENS;
    }
};

/* Warps from .. to - 1 of a unit. */
struct Piece {
    int unit, from, to;
};

/* A block's share. There are at least as many units as blocks, so each has no more than one unit that it does
 * not end, and one that it does not begin. */
struct Share {
    int begin, end;

    __device__ __forceinline__ explicit Share(const Work& work) {
        const i64 all = (i64)work.units() * TREE_WARPS;
        const int own = blockIdx.x / CLUSTER, others = gridDim.x / CLUSTER;
        begin = (int)(all * own / others), end = (int)(all * (own + 1) / others);
    }

    __device__ __forceinline__ bool has_open() const { return end % TREE_WARPS > 0; }
    __device__ __forceinline__ int pieces() const {
        return (end + TREE_WARPS - 1) / TREE_WARPS - begin / TREE_WARPS;
    }

    /* In the order of work: the open unit, whole ones, the one that another block began. */
    __device__ __forceinline__ Piece piece(int i) const {
        const int last = end / TREE_WARPS;
        if (has_open() && i == 0) return Piece{last, 0, end % TREE_WARPS};
        const int unit = last - 1 - (i - has_open());
        return Piece{unit, max(begin - unit * TREE_WARPS, 0), TREE_WARPS};
    }
};

/* Row tiles of a matrix from a group's first on. */
struct RowTiles {
    const char* first;
    int count;
};

/* f(i, tiles, unit, step, chunk, halves) for the steps of a block's share in order, until it gives false.
 * step: of tokens; chunk: the first of its two, Walk::GAP before the other; halves: how many there are. */
template <class Matrix, class F>
__device__ __forceinline__ void each_step(const Work& work, const Share& share, const Matrix& matrix,
                                          const F& f) {
    int i = 0;
    for (int index = 0; index < share.pieces(); ++index) {
        const Piece piece = share.piece(index);
        const Unit unit(work, piece.unit);
        const Walk walk(work.cols, unit.slice);
        const RowTiles tiles = matrix(unit.group);
        int step = walk.first(piece.from);
        for (int warp = piece.from; warp < piece.to; ++warp) {
            const int own = walk.own(warp);
            for (int turn = 0; 2 * turn < own; ++turn)
                if (!f(i++, tiles, unit, step++, walk.chunk(warp, 2 * turn), min(2, own - 2 * turn))) return;
        }
    }
}

/* A stage of the ring, and the parity of its barrier that is waited for. */
struct Slot {
    int index, parity;

    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

/* By each of the COPIERS warps, for its part of a stage's row tiles and tokens, all ordered by one lane; what
 * is not there is not copied and nobody reads it. Weights are asked for before the kernel ahead has ended. */
template <class Matrix>
__device__ __forceinline__ void copy_all(const Work& work, const Share& share, const Ring& ring,
                                         const Matrix& matrix) {
    constexpr int OWN = WEIGHT_TILES / COPIERS;
    const int rank = blockIdx.x % CLUSTER, copier = __shfl_sync(FULL_WARP, warp_index(), 0) - CONSUMERS / 32;
    auto tokens_of = [&](const Unit& unit) {
        return max(0, min(TOKENS, work.padded() - unit.first_token)) / COPIERS;
    };
    // Of more rows, tiles of tokens that come later ask for weights again, which would have left L2 by then.
    const u64 policy = !FP8 && work.rows <= 256 ? READ_ONCE : READ_AGAIN;
    auto copy_chunk = [&](char* to, const char* from,
                          int slot) {  // a block of a cluster brings one of a step
        if constexpr (CLUSTER > 1)
            bulk_load_to_all<CLUSTER>(policy, to, from, CHUNK_BYTES, &ring.full[slot]);
        else
            bulk_load_as(policy, to, from, CHUNK_BYTES, &ring.full[slot]);
    };
    auto copy_weights = [&](int slot, const RowTiles& tiles, const Unit& unit, int chunk, int halves) {
        const int there = min(OWN, tiles.count - copier * OWN);
        mbarrier_arrive_expect(&ring.full[slot],
                               max(0, there) * halves * CHUNK_BYTES + tokens_of(unit) * COLUMN_BYTES);
        char* to = ring.stages + slot * STAGE + TOKEN_BYTES + copier * OWN * TILE_BYTES;
        const char* from = tiles.first + copier * OWN * tile_bytes(work.cols) + (size_t)chunk * CHUNK_BYTES;
#pragma unroll
        for (int tile = 0; tile < OWN; ++tile) {
            if (tile < there && rank == 0) copy_chunk(to, from, slot);
            if (tile < there && halves == 2 && rank == CLUSTER - 1)
                copy_chunk(to + CHUNK_BYTES, from + Walk::GAP * CHUNK_BYTES, slot);
            to += TILE_BYTES, from += tile_bytes(work.cols);
        }
    };
    each_step(work, share, matrix,
              [&](int i, const RowTiles& tiles, const Unit& unit, int, int chunk, int halves) {
                  if (i == STAGES) return false;
                  if (elect_one()) copy_weights(i, tiles, unit, chunk, halves);
                  return true;
              });
    griddep_wait();
    Slot at{0, 1};  // the first round of the ring waits for nobody
    each_step(work, share, matrix,
              [&](int i, const RowTiles& tiles, const Unit& unit, int step, int chunk, int halves) {
                  if (i >= STAGES) mbarrier_wait(&ring.empty[at.index], at.parity);
                  if (elect_one()) {
                      if (i >= STAGES) copy_weights(at.index, tiles, unit, chunk, halves);
                      const int count = tokens_of(unit), first = unit.first_token + copier * count;
                      const char* from =
                          (const char*)work.x + ((size_t)step * work.padded() + first) * COLUMN_BYTES;
                      char* to = ring.stages + at.index * STAGE + copier * count * COLUMN_BYTES;
                      if (count) bulk_load(to, from, count * COLUMN_BYTES, &ring.full[at.index]);
                  }
                  at.advance();
                  return true;
              });
    griddep_launch();
}

/* By a warp, for the weights and tokens that it has read: copies of every block of the cluster wait for it.
 */
__device__ __forceinline__ void give_back_everywhere(const Ring& ring, int slot) {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        if (lane_index() < CLUSTER) mbarrier_arrive_at(cluster_address(&ring.empty[slot], lane_index()));
    } else {
        give_back(ring, slot);
    }
}

/* FP8: the scales of this lane's rows, of a chunk; else nothing. */
struct TileScales {
    const float2* of;  // of this warp's row tile: rows 0..7, rows 8..15

    __device__ __forceinline__ TileScales(const RowTiles& tiles, int cols)
        : of((const float2*)(tiles.first + min((int)warp_index(), tiles.count - 1) * tile_bytes(cols) +
                             fp8_codes(cols))) {}

    __device__ __forceinline__ float2 operator()(int chunk) const {
        return __ldg(of + chunk / (SCALE_K / 32));
    }
};

/* A warp's sums. FP8: those of a span are apart, and meet their scale in f32 (fp8.cuh). */
struct WarpSums {
    float acc[SUMS], part[SUMS];

    /* A half's products. */
    __device__ __forceinline__ void multiply(const Half& a, const char* stage, int half, bool is_first) {
        a.multiply(FP8 ? part : acc, stage, half, !is_first);
    }

    __device__ __forceinline__ void meet(const float2& scale) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, part[i], acc[i]);
        halves_pin(part);
    }
};

/* A warp's chunks of the tree, `own` of them from `first` on, then upon sums. While one warpgroup waits, for
 * its weights or for its products, the others multiply. No product stands in a branch inside the loop over
 * steps: ptxas would wait for each before the next. */
__device__ __forceinline__ void add_warp(float (&sums)[SUMS], WarpSums& warp, int own, int first,
                                         const TileScales& scales, const Ring& ring, Slot& at) {
    auto multiply = [&](bool is_first, int chunks) {
        const char* stage = ring.stages + at.index * STAGE;
        Half halves[2];
        mbarrier_wait(&ring.full[at.index], at.parity);
#pragma unroll
        for (int half = 0; half < chunks; ++half) halves[half].load(stage, half);
#pragma unroll
        for (int half = 0; half < chunks; ++half)
            warp.multiply(halves[half], stage, half, half == 0 && is_first);
        halves_wait();
        give_back_everywhere(ring, at.index);
        at.advance();
    };
    if constexpr (FP8) {
        if (own == 0) return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) warp.acc[i] = 0.f;
#pragma unroll 1
        for (; own >= SPAN; own -= SPAN, first += SPAN * TREE_WARPS) {
            const float2 scale = scales(first);  // asked for before its products
            multiply(true, 2), multiply(false, 2);
            warp.meet(scale);
        }
        if (own > 0) {
            const float2 scale = scales(first);
            if (own == 1) multiply(true, 1);
            if (own > 1) multiply(true, 2);
            if (own > 2) multiply(false, 1);
            warp.meet(scale);
        }
    } else if (own < 2) {
        if (own == 0) return;
        multiply(true, 1);
    } else {
        multiply(true, 2);
#pragma unroll 1
        for (own -= 2; own >= 2; own -= 2) multiply(false, 2);
        if (own > 0) multiply(false, 1);
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] += warp.acc[i];
    halves_pin(warp.acc);
}

/* The sums of this warp in the workspace, and its counter. */
struct HandOver {
    float4* sums;
    u32* counter;

    __device__ __forceinline__ HandOver(const Work& work, int block) {
        const int at = block * (CONSUMERS / 32) + warp_index();
        sums = (float4*)work.handed + (size_t)at * (SUMS / 4) * 32 + lane_index();
        counter = work.counters + at;
    }

    __device__ __forceinline__ void give(const float (&v)[SUMS]) const {
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
            __stcg(sums + i / 4 * 32, make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
        __syncwarp();
        if (lane_index() == 0) red_add_release(counter, 1);
    }

    __device__ __forceinline__ void take(float (&v)[SUMS]) const {
        warp_wait_for(counter, 1);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 part = __ldcg(sums + i / 4 * 32);
            v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
        }
        __syncwarp();
        if (lane_index() == 0) *counter = 0;  // nobody asks again in this launch
    }
};

/* By the computing warpgroups. */
template <class Matrix, class Sink>
__device__ __forceinline__ void sum_all(const Work& work, const Share& share, const Ring& ring,
                                        const Matrix& matrix, const Sink& sink) {
    WarpSums own;
    Slot at{0, 0};
    griddep_wait();  // for what was handed over in the launch before, and for sinks
    for (int i = 0; i < share.pieces(); ++i) {
        const Piece piece = share.piece(i);
        const Unit unit(work, piece.unit);
        const Walk walk(work.cols, unit.slice);
        const TileScales scales(FP8 ? matrix(unit.group) : RowTiles{}, work.cols);
        float sums[SUMS] = {};
        if (piece.from > 0) HandOver(work, blockIdx.x - CLUSTER).take(sums);
#pragma unroll 1
        for (int warp = piece.from; warp < piece.to; ++warp)
            add_warp(sums, own, walk.own(warp), walk.chunk(warp, 0), scales, ring, at);
        if (piece.to < TREE_WARPS)
            HandOver(work, blockIdx.x).give(sums);
        else
            sink(Unit(work, opaque(piece.unit)), sums);  // worked out again: no register keeps it meanwhile
    }
}

__device__ __forceinline__ void meet_cluster() {
    if constexpr (CLUSTER > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

/* The whole of it. sink(unit, sums) gets a warp's 16 outputs x TOKENS tokens (wide_sinks.cuh). */
template <class Matrix, class Sink>
__device__ __forceinline__ void wide(const Work& work, const Matrix& matrix, const Sink& sink) {
    extern __shared__ __align__(1024) char dynamic[];  // RING bytes, then barriers
    const Ring ring(dynamic, RING);
    const Share share(work);
    if (threadIdx.x == 0) ring.open(COPIERS, CLUSTER > 1 ? CLUSTER * CONSUMERS / 32 : CONSUMERS);
    meet_cluster();  // its barriers are there
    __syncthreads();
    if (warp_index() >= CONSUMERS / 32) {
#ifdef WGMMA
        if constexpr (TAKES_MORE) registers_give<LEFT>();
#endif
        copy_all(work, share, ring, matrix);
    } else {
#ifdef WGMMA
        if constexpr (TAKES_MORE) registers_take<TAKEN>();
#endif
        sum_all(work, share, ring, matrix, sink);
    }
    meet_cluster();  // nobody's barriers go while the other may arrive at them
}

/* A packed matrix by groups. */
struct OneMatrix {
    const u16* packed;
    int outputs, cols;

    __device__ __forceinline__ RowTiles operator()(int group) const {
        return RowTiles{(const char*)packed + group * WEIGHT_TILES * tile_bytes(cols),
                        (outputs + 15) / 16 - group * WEIGHT_TILES};
    }
};
