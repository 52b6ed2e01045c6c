/* The frame of experts_up_fast and experts_down_fast: each expert's token rows times its packed weights.
 * Grid:   persistent, a block a multiprocessor. A run is up to MOST_ROWS pairs of one expert; a piece is a
 * run and one row tile of its weights. All pieces lie in a row: experts ascending, of one `range` tiles at a
 * time, of those the runs, of a run the tiles. A block takes a stretch of them, or (span) every so-manyth
 * stretch of so many: then the runs of an expert go over the same tiles side by side, and memory gives them
 * once. WARPS warps stream weights, FINISHERS end tiles, as in skinny.cuh; where weights come through a ring
 * in shared memory, one more warp fills it.
 * Moves:  the weights of experts that have pairs, once where an expert has one run; token rows once a run and
 *         block.
 * Layout: packed weights of skinny.cuh, of mxfp4.cuh or of fp8.cuh, a matrix behind the other.
 * Bits:   a row's sum runs over a warp's units of K, then warps, each ascending. Who takes which piece, and
 *         how many rows are beside it, does not matter. */
#pragma once
#include "experts_ends.cuh"

#ifndef TOKEN_BUFFERS
#define TOKEN_BUFFERS 2  // runs whose tokens are in shared memory: with 2, the next run's come early
#endif
#ifndef ASKED_TILES
#define ASKED_TILES 0  // tiles behind those under way, asked for in L2 before the wait
#endif
#ifndef RING_TILES
#define RING_TILES 0  // tiles whose weights are in shared memory or on their way there; 0: in registers
#endif
#ifndef HOLDS_TOKENS
#define HOLDS_TOKENS 0  // 1: warps keep a run's tokens, of at most 8 rows, in registers
#endif

constexpr int RING = RING_TILES, SLOTS = RING ? 1 : AHEAD;  // SLOTS: tiles in registers
constexpr int PLANNER = RING ? WARPS + FINISHERS : 0;       // warp that makes the plan and fills the ring
constexpr int EXPERTS_THREADS = THREADS + (RING ? 32 : 0);
constexpr int ORDER_ROOM = 512;              // pairs whose order is brought to shared memory
constexpr bool HAS_SETS = RING == SUM_SETS;  // each tile of the ring has a set for its sums
constexpr bool COME_EARLY = TOKEN_BUFFERS == 2 || HOLDS_TOKENS;  // tokens, a run ahead
static_assert(RING <= FULL_BARRIERS, "a barrier for each tile of the ring");
static_assert(!HOLDS_TOKENS || (TOKEN_TILES == 1 && TOKEN_BUFFERS == 1), "one buffer is on its way");

/* Of a run's tokens in shared memory. */
__device__ __forceinline__ int buffer_bytes(int cols) { return units_of(cols) * UNIT_CHUNKS * TOKEN_CHUNK; }

/* Where things lie in dynamic shared memory. */
struct Places {
    float2* sums;           // [SUM_SETS][WARPS][UNITS][32]
    unsigned char* ring;    // [RING] tiles, from whole lines on as in memory: copies are faster
    unsigned char* tokens;  // [TOKEN_BUFFERS][chunks][TOKEN_TILES][32 lanes][16 bytes]
    unsigned char* scales;  // [RING] tiles'
    Entry* entries;
    Run* list;
    int *order, *starts;  // [ORDER_ROOM], [experts + 1]

    __device__ __forceinline__ Places(unsigned char* dynamic, const Shape& shape)
        : sums((float2*)dynamic),
          ring((unsigned char*)(sums + SUM_SETS * WARPS * UNITS * 32)),
          tokens(ring + RING * units_of(shape.cols) * UNIT_SIZE),
          scales(tokens + TOKEN_BUFFERS * buffer_bytes(shape.cols)),
          entries((Entry*)(scales + RING * units_of(shape.cols) * UNIT_SCALES)),
          list((Run*)(entries + shape.experts)),
          order((int*)(list + shape.room)),
          starts(order + ORDER_ROOM) {}
};

/* Token rows: pair r's is row r / per of `rows`. */
struct Tokens {
    const bf16* rows;
    int per;
};

/* This lane's pieces of this warp's units of a run's tokens: nobody else reads them. cols is a
 * multiple of 8. What it needs is made here, not kept through the stream. */
__device__ __forceinline__ void bring_run(const Run& run, const Tokens& from, const int* order, int cols,
                                          unsigned char* tokens) {
    const int thread = opaque(threadIdx.x), lane = thread % 32, warp = thread / 32;
#pragma unroll(1)
    for (int row = lane / 4; row - lane / 4 < run.count; row += 8) {
        const bool is_row = row < run.count;
        const bf16* token = from.rows;
        if (is_row) token += (size_t)(order[run.begin + row] / from.per) * cols;
        unsigned char* to = tokens + warp * UNIT_CHUNKS * TOKEN_CHUNK + row / 8 * 512 + 16 * lane;
#pragma unroll(1)
        for (int k = UNIT_K * warp + 8 * (lane % 4); k - 8 * (lane % 4) < cols; k += WARPS * UNIT_K) {
#pragma unroll
            for (int c = 0; c < UNIT_CHUNKS; ++c) {
                const bool is_there = is_row && k + 32 * c < cols;
                cp_async_16_or_zero(to + c * TOKEN_CHUNK, is_there ? token + k + 32 * c : from.rows,
                                    is_there);
            }
            to += WARPS * UNIT_CHUNKS * TOKEN_CHUNK;
        }
    }
}

/* The weights that are asked for next: of `left` tiles of run `run` of the list. */
struct Ahead {
    int run, left;
    const char* at;      // the tile's first byte, or this lane's part of this warp's first unit
    const char* scales;  // the tile's, if it has some

    __device__ __forceinline__ void find(const Plan& plan, const Run* list, const u8* w, const Shape& shape) {
        left = 0;
        if (run >= plan.listed) return;
        left = list[run].tiles;
        const int expert = list[run].tile / shape.tiles, tile = list[run].tile - expert * shape.tiles;
        const TileOf first(w, expert, tile, shape.tiles, shape.cols);
        at = first.at, scales = first.scales;
        if (!RING) at += warp_index() * UNIT_SIZE + 16 * lane_index();
    }

    __device__ __forceinline__ void advance(const Plan& plan, const Run* list, const u8* w,
                                            const Shape& shape) {
        at += unit_tile(shape.cols);
        if (FP8) scales += unit_tile(shape.cols);
        if (MXFP4) scales += units_of(shape.cols) * UNIT_SCALES;
        if (--left > 0) return;
        ++run;
        find(plan, list, w, shape);
    }

    /* This warp's unit u of the tile to registers. */
    __device__ __forceinline__ void load(Unit& unit, int u) const {
        unit.load(at + u * WARPS * UNIT_SIZE, scales + (u * WARPS + warp_index()) * UNIT_SCALES);
#if FP8
        unit.load_scale(scales, u * WARPS + warp_index());
#endif
    }
};

/* What streaming warps know all along. */
struct Stream {
    const Plan& plan;
    const u8* w;
    const Tokens& from;
    const int* order;
    const Shape& shape;
    const Places& places;
    Barriers& barriers;
    u64* loaded;  // [RING]: the tile is there
    Ahead next;
    int run, left, count;  // of the list, tiles of it that are left, its pairs
    int buffer, ordinal;
    int slot, phase;  // of the ring
    float acc[TOKEN_TILES][4];
    uint4 held[HOLDS_TOKENS ? CHUNKS * UNIT_CHUNKS : 1];  // the run's tokens

    __device__ __forceinline__ void advance() { next.advance(plan, places.list, w, shape); }

    /* Weights are asked for before the tokens are there. */
    __device__ __forceinline__ void begin(Unit (&a)[SLOTS][CHUNKS]) {
        if (RING) return;
        next.run = 0;
        next.find(plan, places.list, w, shape);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            if (next.left > 0) {
#pragma unroll
                for (int u = 0; u < CHUNKS; ++u)
                    if (has_unit(u, shape.cols)) next.load(a[s][u], u);
                advance();
            }
    }

    /* The next tiles to L2, so that memory has something to do until this block's tokens are there. */
    __device__ __forceinline__ void ask_tiles() const {
        if (RING) return;
        Ahead then = next;
#pragma unroll(1)
        for (int i = 0; i < ASKED_TILES && then.left > 0; ++i) {
            for (int u = 0; u < own_units(shape.cols); ++u)
                if (const int lane = lane_index(); lane < (UNIT_SIZE + 127) / 128)  // a line each
                    prefetch_l2(then.at + u * WARPS * UNIT_SIZE + (128 - 16) * lane);
            then.advance(plan, places.list, w, shape);
        }
    }

    __device__ __forceinline__ void bring(int which, int to) const {
        bring_run(places.list[which], from, order, shape.cols, places.tokens + to * buffer_bytes(shape.cols));
    }

    __device__ __forceinline__ unsigned char* ring_tile(int which) const {
        return places.ring + which * units_of(shape.cols) * UNIT_SIZE;
    }

    __device__ __forceinline__ unsigned char* ring_scales(int which) const {
        return places.scales + which * units_of(shape.cols) * UNIT_SCALES;
    }

    /* All weights of the list to the ring, by the planner; a tile's place is free once all warps have given
     * the sums of the tile that was there, or, where these have a place of their own, once they are read:
     * then no warp waits for that place, and that a tile comes later costs nothing (bench/NOTES.md). */
    __device__ __forceinline__ void fill(int tiles) {
        const u32 bytes = units_of(shape.cols) * UNIT_SIZE, scales = units_of(shape.cols) * UNIT_SCALES;
        for (; next.left > 0 && tiles > 0; --tiles, ++ordinal) {
            if (const int before = ordinal - RING; before >= 0)
                mbarrier_wait(HAS_SETS ? &barriers.empty[slot] : &barriers.full[before % FULL_BARRIERS],
                              before / (HAS_SETS ? RING : FULL_BARRIERS) & 1);
            if (elect_one()) {
                mbarrier_arrive_expect(&loaded[slot], bytes + scales);
                bulk_load_as(READ_ONCE, ring_tile(slot), next.at, bytes, &loaded[slot]);
                if (scales) bulk_load_as(READ_ONCE, ring_scales(slot), next.scales, scales, &loaded[slot]);
            }
            if (++slot == RING) slot = 0;
            advance();
        }
    }

    /* The first run's tokens. */
    __device__ __forceinline__ void bring_first() {
        run = left = buffer = ordinal = slot = phase = 0;
        if (COME_EARLY && plan.listed > 0) bring(0, 0);
        cp_async_commit();
    }

    /* This lane's part of the run's tokens: a chunk of this warp's unit u, rows 8n.. */
    __device__ __forceinline__ const uint4* token_at(int u, int chunk, int n) const {
        return (const uint4*)(places.tokens + buffer * buffer_bytes(shape.cols) + 16 * lane_index() +
                              ((u * WARPS + warp_index()) * UNIT_CHUNKS + chunk) * TOKEN_CHUNK + 512 * n);
    }

    /* A run begins: its tokens are there; where there is room for them, the next run's are asked for. */
    __device__ __forceinline__ void enter() {
        left = places.list[run].tiles, count = places.list[run].count;
        if (HOLDS_TOKENS) {
            cp_async_wait<0>();
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u)
#pragma unroll
                for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk)
                    if (has_unit(u, shape.cols)) held[u * UNIT_CHUNKS + chunk] = *token_at(u, chunk, 0);
            __syncwarp();  // read: others may come there
        }
        const int coming = COME_EARLY ? run + 1 : run;
        if (coming < plan.listed) bring(coming, buffer ^ (TOKEN_BUFFERS - 1));
        cp_async_commit();
        if (!HOLDS_TOKENS) cp_async_wait<TOKEN_BUFFERS - 1>();
    }

    /* The next tile's units from the ring. */
    __device__ __forceinline__ void read_tile(Unit (&a)[CHUNKS]) {
        const unsigned char *weights = ring_tile(slot) + warp_index() * UNIT_SIZE + 16 * lane_index(),
                            *scales = ring_scales(slot) + warp_index() * UNIT_SCALES;
        mbarrier_wait(&loaded[slot], phase);
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (has_unit(u, shape.cols))
                a[u].read(weights + u * WARPS * UNIT_SIZE, scales + u * WARPS * UNIT_SCALES);
        if (++slot == RING) slot = 0, phase ^= 1;
    }

    /* A piece, whose weights are in slot S, and those behind it as far as there are slots. False: no more. */
    template <int S>
    __device__ __forceinline__ bool step(Unit (&a)[SLOTS][CHUNKS]) {
        if (left == 0) {
            if (run == plan.listed) return false;
            enter();
        }
        const bool is_asked = !RING && next.left > 0;
        if (RING) read_tile(a[S]);
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (has_unit(u, shape.cols))
                multiply(acc, a[S][u], count, [&](int chunk, int n) {
                    return HOLDS_TOKENS ? held[u * UNIT_CHUNKS + chunk] : *token_at(u, chunk, n);
                });
        // Not a unit at a time: all loads have one scoreboard, and to wait for a unit would be to wait for
        // what was asked for just now.
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (is_asked && has_unit(u, shape.cols)) next.load(a[S][u], u);
        if (is_asked) advance();
        give_sums<true, HAS_SETS>(
            acc, ordinal++, count, [&](int set) { return own_sums(places.sums, set); }, barriers);
        if (--left == 0) {
            ++run;
            buffer ^= TOKEN_BUFFERS - 1;
        }
        if constexpr (S + 1 < SLOTS)
            return step<S + 1>(a);
        else
            return true;
    }

    /* All pieces of the list, after `begin`. */
    __device__ __forceinline__ void all(Unit (&a)[SLOTS][CHUNKS]) {
        while (step<0>(a)) {
        }
    }
};

/* The whole of it. KNOWS: the groups were complete before the kernel ahead began, which waited for them, so
 * weights are asked for before this one's wait. */
template <bool KNOWS, class Sink>
__device__ __forceinline__ void experts(const Shape& shape, const u8* w, const Tokens& from, const int* first,
                                        const int* order, Sink& sink) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Barriers barriers;
    __shared__ Plan plan;
    const Places places(dynamic, shape);
    __shared__ u64 loaded[RING + 1];
    const bool is_streaming = warp_index() < WARPS, is_small = shape.pairs <= ORDER_ROOM;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; ++i) mbarrier_init(&loaded[i], 1);
        barriers.init(Task{});
    }
    if (!KNOWS) {
        griddep_wait();
        griddep_launch();
    }
    for (int e = threadIdx.x; e <= shape.experts; e += EXPERTS_THREADS) places.starts[e] = __ldcg(first + e);
    if (is_small)
        for (int r = threadIdx.x; r < shape.pairs; r += EXPERTS_THREADS) places.order[r] = __ldcg(order + r);
    __syncthreads();
    Unit a[SLOTS][CHUNKS];
    const int* lies = is_small ? places.order : order;
    Stream stream{plan, w, from, lies, shape, places, barriers, loaded, {}, 0, 0, 0, 0, 0, 0, 0, {}, {}};
    if (warp_index() == PLANNER) {
        plan.open(places.starts, shape, places.entries);
        plan.make_list(shape, places.entries, places.list);
        __syncwarp();
        if (RING) {
            stream.next.run = 0;
            stream.next.find(plan, places.list, w, shape);
            stream.fill(RING);
        }
    }
    __syncthreads();
    sink.order = lies, sink.runs = plan.runs;
    if (is_streaming) {
        if (!KNOWS) stream.bring_first();  // first, where both can come
        stream.begin(a);
        if (KNOWS) stream.ask_tiles();
    }
    if (KNOWS) {
        griddep_wait();
        griddep_launch();
    }
    if (is_streaming) {
        if (KNOWS) stream.bring_first();
        stream.all(a);
    } else if (RING && warp_index() == PLANNER) {
        stream.fill(1 << 30);
    } else {
        sink.begin();
        end_tiles(plan, shape, places.list, places.sums, barriers, sink);
    }
}
