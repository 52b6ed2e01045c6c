/* The frame of experts_up_few and experts_down_few: the experts' products of up to 8 pairs, as plain rounds
 * have them.
 * Grid:   persistent, a block a multiprocessor. A piece is a row tile of one expert's weights; which pieces a
 * block takes is the kernel's. WARPS warps multiply, FINISHERS end pieces, one more fills a ring of weights
 * in shared memory by bulk copies. A block takes about half of a multiprocessor, so that the next kernel's
 * has room beside it: its weights are on their way while this one ends.
 * Moves:  the weights of experts that have pairs, once; token rows once a block.
 * Layout: token rows lie as [K/32][rows][32 k], so that rows that are not there take no room.
 * Bits:   those of experts.cuh: a row's sum runs over a warp's units of K, then warps, each ascending. */
#pragma once
#include "experts_units.cuh"

#ifndef RING_SLOTS
#define RING_SLOTS 3
#endif
#ifndef SLOT_UNITS
#define SLOT_UNITS 1  // of a multiplying warp in a slot
#endif
#ifndef TOKEN_ROWS
#define TOKEN_ROWS 1  // that lie in shared memory
#endif

constexpr int MOST_PAIRS = 8, SLOTS = RING_SLOTS, SLOT_BYTES = SLOT_UNITS * WARPS * UNIT_SIZE;
constexpr int SLOT_SCALES = SLOT_UNITS * WARPS * UNIT_SCALES;
constexpr int PARTS = (CHUNKS + SLOT_UNITS - 1) / SLOT_UNITS;  // slots that a tile takes
constexpr int FILLER = WARPS + FINISHERS;                      // the warp
constexpr int FEW_THREADS = 32 * (FILLER + 1);
static_assert(TOKEN_TILES == 1 && SUM_SETS == 2, "8 columns; Barriers has two sets");

/* The experts that have pairs, in no order. */
struct Chosen {
    int of_pair[MOST_PAIRS];  // -1: the pair is not there, or its row is inactive
    int experts[MOST_PAIRS];
    int count, pairs;

    /* By a warp. */
    __device__ __forceinline__ void make(const int* expert, int most) {
        const int lane = lane_index(), id = lane < most ? __ldcg(expert + lane) : -1;
        bool is_first = id >= 0;
#pragma unroll
        for (int before = 0; before < MOST_PAIRS; ++before)
            if (__shfl_sync(FULL_WARP, id, before) == id && before < lane) is_first = false;
        const u32 firsts = __ballot_sync(FULL_WARP, is_first), there = __ballot_sync(FULL_WARP, id >= 0);
        if (lane < MOST_PAIRS) of_pair[lane] = id;
        if (is_first) experts[__popc(firsts & (1u << lane) - 1)] = id;
        if (lane == 0) count = __popc(firsts), pairs = __popc(there);
        __syncwarp();
    }
};

/* Of row tile `tile` of an expert. */
struct Piece {
    int expert, tile;
};

/* loaded: a slot's bytes have come; freed: all warps have multiplied them. */
struct Ring {
    u64 loaded[SLOTS], freed[SLOTS];

    /* By one thread, before Barriers::init, which has the fence. */
    __device__ __forceinline__ void init() {
        for (int i = 0; i < SLOTS; ++i) mbarrier_init(&loaded[i], 1), mbarrier_init(&freed[i], WARPS);
    }
};

/* Slots come in turn; each turn has the other parity. */
struct Turn {
    int slot;
    u32 parity;

    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

/* Where things lie in dynamic shared memory. */
struct FewPlaces {
    float2* sums;           // [SUM_SETS][WARPS][UNITS][32]
    unsigned char* ring;    // [SLOTS] SLOT_BYTES, from whole lines on as in memory
    unsigned char* scales;  // [SLOTS] SLOT_SCALES
    unsigned char* tokens;  // [chunks][TOKEN_ROWS][64 bytes]
    float* rest;            // the kernel's own

    __device__ __forceinline__ FewPlaces(unsigned char* dynamic, int cols)
        : sums((float2*)dynamic),
          ring(dynamic + SUM_SETS * WARPS * UNITS * 32 * sizeof(float2)),
          scales(ring + SLOTS * SLOT_BYTES),
          tokens(scales + SLOTS * SLOT_SCALES),
          rest((float*)(tokens + units_of(cols) * UNIT_CHUNKS * TOKEN_ROWS * 64)) {}
};

/* The filling warp's way through the pieces of a block. deal(n) is the block's n-th piece. */
struct Fill {
    int piece, part;  // which slot of the piece's comes next
    Turn turn;

    /* Up to `most` slots more. By one lane. */
    template <class Deal>
    __device__ __forceinline__ void run(const Deal& deal, const u8* w, int cols, int tiles, Ring& ring,
                                        const FewPlaces& places, int most, bool is_first_turn) {
        const int units = units_of(cols);
        for (; piece < deal.pieces && most > 0; --most) {
            const Piece at = deal(piece);
            const TileOf tile(w, at.expert, at.tile, tiles, cols);
            const int slot_units = min(SLOT_UNITS * WARPS, units - part * SLOT_UNITS * WARPS);
            const u32 bytes = slot_units * UNIT_SIZE, scales = slot_units * UNIT_SCALES;
            u64* const loaded = &ring.loaded[turn.slot];
            if (!is_first_turn) mbarrier_wait(&ring.freed[turn.slot], turn.parity ^ 1);
            mbarrier_arrive_expect(loaded, bytes + scales);
            bulk_load_as(READ_ONCE, places.ring + turn.slot * SLOT_BYTES, tile.at + part * SLOT_BYTES, bytes,
                         loaded);
            if (scales)
                bulk_load_as(READ_ONCE, places.scales + turn.slot * SLOT_SCALES,
                             tile.scales + part * SLOT_SCALES, scales, loaded);
            if (++part == PARTS) part = 0, ++piece;
            turn.next();
        }
    }
};

/* This lane's pieces of this warp's units of the token rows: no other warp reads them. cols is a multiple
 * of 8.
 */
__device__ __forceinline__ void bring_few(const bf16* from, int cols, unsigned char* tokens) {
    const int row = lane_index() / 4, part = lane_index() % 4;
    if (row < TOKEN_ROWS)
        for (int unit = warp_index(); unit < units_of(cols); unit += WARPS)
#pragma unroll
            for (int c = 0; c < UNIT_CHUNKS; ++c) {
                const int chunk = unit * UNIT_CHUNKS + c, k = 32 * chunk + 8 * part;
                cp_async_16_or_zero(tokens + (chunk * TOKEN_ROWS + row) * 64 + 16 * part,
                                    k < cols ? from + (size_t)row * cols + k : from, k < cols);
            }
    cp_async_commit();
}

/* All pieces of the block, by a multiplying warp. Where a ring is a whole number of pieces, so many are
 * worked on in turn that each finds its slots at constant addresses. */
__device__ __forceinline__ void multiply_few(int pieces, int cols, const FewPlaces& places, Ring& ring,
                                             Barriers& barriers) {
    constexpr int TOKEN_UNIT = UNIT_CHUNKS * TOKEN_ROWS * 64;  // bytes
    constexpr int TOGETHER = SLOTS % PARTS ? 1 : SLOTS / PARTS;
    // Lanes of rows that are not there read the last one's: their sums are nobody's.
    const int lane = lane_index(), row = min(lane / 4, TOKEN_ROWS - 1);
    const unsigned char *weights = places.ring + warp_index() * UNIT_SIZE + 16 * lane,
                        *scales = places.scales + warp_index() * UNIT_SCALES,
                        *tokens = places.tokens + warp_index() * TOKEN_UNIT + 64 * row + 16 * (lane % 4);
    float2* const sums = places.sums + warp_index() * UNITS * 32 + lane;
    Turn turn{0, 0};
    __syncwarp();  // tokens are there that other lanes of the warp brought
    for (int first = 0; first < pieces; first += TOGETHER)
#pragma unroll
        for (int piece = first; piece < first + TOGETHER; ++piece) {
            if (TOGETHER > 1 && piece == first) turn.slot = 0;  // it is, and here it is known
            if (piece >= pieces) break;
            float acc[TOKEN_TILES][4] = {};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const unsigned char *from = weights + turn.slot * SLOT_BYTES,
                                    *from_scales = scales + turn.slot * SLOT_SCALES;
                mbarrier_wait(&ring.loaded[turn.slot], turn.parity);
                Unit a[SLOT_UNITS];
#pragma unroll
                for (int i = 0; i < SLOT_UNITS; ++i)
                    if (const int u = part * SLOT_UNITS + i; u < CHUNKS && has_unit(u, cols))
                        a[i].read(from + i * WARPS * UNIT_SIZE, from_scales + i * WARPS * UNIT_SCALES);
#pragma unroll
                for (int i = 0; i < SLOT_UNITS; ++i)
                    if (const int u = part * SLOT_UNITS + i; u < CHUNKS && has_unit(u, cols))
                        multiply(acc, a[i], 8, [&](int chunk, int) {
                            return *(const uint4*)(tokens + u * WARPS * TOKEN_UNIT +
                                                   chunk * TOKEN_UNIT / UNIT_CHUNKS);
                        });
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&ring.freed[turn.slot]);
                turn.next();
            }
            give_sums<(TOKEN_ROWS > 1)>(
                acc, piece, 8, [&](int set) { return sums + set * WARPS * UNITS * 32; }, barriers);
        }
}

/* A number of the warps' sums, in their order: of float or float2. */
template <class Number>
__device__ __forceinline__ Number sum_of_warps(const Number* from) {
    constexpr int STEP = UNITS * 32 * sizeof(float2) / sizeof(Number);
    Number v = from[0];
#pragma unroll(5)
    for (int warp = 1; warp < WARPS; ++warp) {
        if constexpr (sizeof(Number) == sizeof(float2))
            v.x += from[warp * STEP].x, v.y += from[warp * STEP].y;
        else
            v += from[warp * STEP];
    }
    return v;
}

/* A piece as its finishing warp sees it. */
struct Ending {
    int piece;
    const float2* sums;  // of all WARPS
    Barriers& barriers;

    /* Until the sums are there. */
    __device__ __forceinline__ void wait() const {
        mbarrier_wait(&barriers.full[piece % FULL_BARRIERS], piece / FULL_BARRIERS & 1);
    }

    /* They have been read. */
    __device__ __forceinline__ void done() const { mbarrier_arrive(&barriers.empty[piece % SUM_SETS]); }
};

/* Calls end(Ending, ready), which waits and says when it is done, for every piece of a finishing warp's.
 * prepare(piece) asks for what is ready then, one piece ahead: behind all weights under way it takes as long
 * as several pieces. */
template <class Prepare, class End>
__device__ __forceinline__ void end_few(int pieces, const FewPlaces& places, Barriers& barriers,
                                        const Prepare& prepare, const End& end) {
    int piece = warp_index() - WARPS;
    if (piece >= pieces) return;
    auto soon = prepare(piece);
    while (piece < pieces) {
        const auto ready = soon;
        const Ending ending{piece, places.sums + piece % SUM_SETS * WARPS * UNITS * 32, barriers};
        piece += FINISHERS;
        if (piece < pieces) soon = prepare(piece);
        end(ending, ready);
    }
}
