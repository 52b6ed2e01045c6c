/* The frame of experts_up_fast and experts_down_fast: each expert's token rows times its packed weights.
 * Grid:   persistent, a block a multiprocessor. A run is up to MOST_ROWS pairs of one expert; a piece is a
 * run and one row tile of its weights. All pieces lie in a row: experts ascending, of one `range` tiles at a
 * time, of those the runs, of a run the tiles. A block takes a stretch of them, or (span) every so-manyth
 * stretch of so many: then the runs of an expert go over the same tiles side by side, and memory gives them
 * once. WARPS warps stream weights, FINISHERS end tiles, as in skinny.cuh. Moves:  the weights of experts
 * that have pairs, once where an expert has one run; token rows once a run and block. Layout: packed weights
 * of skinny.cuh, or of mxfp4.cuh, a matrix behind the other. Bits:   a row's sum runs over a warp's units of
 * K, then warps, each ascending. Who takes which piece, and how many rows are beside it, does not matter. */
#pragma once
#include "experts_plan.cuh"
#include "experts_units.cuh"

#ifndef TOKEN_BUFFERS
#define TOKEN_BUFFERS 2  // runs whose tokens are in shared memory: with 2, the next run's come early
#endif
#ifndef SUM_SETS
#define SUM_SETS 2  // tiles whose sums are
#endif
#ifndef ASKED_TILES
#define ASKED_TILES 0  // tiles behind those under way, asked for in L2 before the wait
#endif

constexpr int ORDER_ROOM = 512;  // pairs whose order is brought to shared memory

/* Where things lie in dynamic shared memory. */
struct Places {
    float2* sums;  // [SUM_SETS][WARPS][UNITS][32]
    int4* entries;
    int* order;
    unsigned char* tokens;  // [TOKEN_BUFFERS][chunks][TOKEN_TILES][32 lanes][16 bytes]

    __device__ __forceinline__ Places(unsigned char* dynamic, int experts)
        : sums((float2*)dynamic),
          entries((int4*)(sums + SUM_SETS * WARPS * UNITS * 32)),
          order((int*)(entries + experts)),
          tokens((unsigned char*)(order + ORDER_ROOM)) {}
};

/* Token rows: pair r's is row r / per of `rows`. */
struct Tokens {
    const bf16* rows;
    int per;
};

/* This lane's pieces of this warp's units of a run's tokens: nobody else reads them. One group of copies. */
__device__ __forceinline__ void bring_run(const Run& run, const Tokens& from, const int* order, int cols,
                                          unsigned char* tokens) {
    const int lane = lane_index(), own = own_units(cols);
    const bool is_aligned = cols % 8 == 0;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= run.count) break;
        const int row = 8 * n + lane / 4;
        const bool is_row = row < run.count;
        const bf16* token = from.rows + (is_row ? (size_t)(order[run.begin + row] / from.per) * cols : 0);
        unsigned char* to = tokens + warp_index() * UNIT_CHUNKS * TOKEN_CHUNK + 512 * n + 16 * lane;
        int k = UNIT_K * warp_index() + 8 * (lane % 4);
        for (int u = 0; u < own; ++u) {
#pragma unroll
            for (int c = 0; c < UNIT_CHUNKS; ++c) {
                const int at = k + 32 * c;
                const bool is_there = is_row && at < cols;
                if (is_aligned)
                    cp_async_16_or_zero(to + c * TOKEN_CHUNK, is_there ? token + at : from.rows, is_there);
                else
                    *(uint4*)(to + c * TOKEN_CHUNK) =
                        load_piece(is_there ? token + at : from.rows, is_there ? cols - at : 0);
            }
            to += WARPS * UNIT_CHUNKS * TOKEN_CHUNK, k += WARPS * UNIT_K;
        }
    }
    cp_async_commit();
}

__device__ __forceinline__ int buffer_bytes(int cols) { return units_of(cols) * UNIT_CHUNKS * TOKEN_CHUNK; }

/* A tile's sums of this warp to the finishing warp whose tile it is. */
__device__ __forceinline__ void give_sums(float (&acc)[TOKEN_TILES][4], int ordinal, int count, float2* sums,
                                          Barriers& barriers) {
    const int set = ordinal % SUM_SETS, thread = opaque(threadIdx.x);
    mbarrier_wait(&barriers.empty[set], (ordinal / SUM_SETS & 1) ^ 1);
    float2* to = sums + (set * WARPS + thread / 32) * UNITS * 32 + thread % 32;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        if (n > 0 && 8 * n >= count) break;
        to[64 * n] = make_float2(acc[n][0], acc[n][2]);
        to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    }
    __syncwarp();  // lanes may have parted in the wait
    mbarrier_arrive(&barriers.full[ordinal % FULL_BARRIERS]);
}

/* Where the weights of a cursor's piece begin, for this lane. */
__device__ __forceinline__ const char* weights_at(const u8* w, const Walk& walk, const Run& run, int cols) {
    const size_t tile = (size_t)run.expert * walk.tiles + run.tile;
    return (const char*)w + tile * units_of(cols) * UNIT_SIZE + warp_index() * UNIT_SIZE + 16 * lane_index();
}

/* The weights that are asked for next. */
struct Ahead {
    Cursor cursor;
    const char* at;

    __device__ __forceinline__ void find(const Walk& walk, const u8* w, int cols) {
        if (cursor.is_there()) at = weights_at(w, walk, cursor.run(walk), cols);
    }

    __device__ __forceinline__ void advance(const Walk& walk, const u8* w, int cols) {
        at += (size_t)units_of(cols) * UNIT_SIZE;
        if (cursor.advance(walk)) find(walk, w, cols);
    }
};

/* The next tiles to L2, so that memory has something to do until this block's tokens are there. */
__device__ __forceinline__ void ask_tiles(const Walk& walk, Ahead ahead, const u8* w, int cols) {
#pragma unroll(1)
    for (int i = 0; i < ASKED_TILES && ahead.cursor.is_there(); ++i) {
        for (int u = 0; u < own_units(cols); ++u)
            if (const int lane = lane_index(); lane < (UNIT_SIZE + 127) / 128)  // a line each
                prefetch_l2(ahead.at + u * WARPS * UNIT_SIZE + (128 - 16) * lane);
        ahead.advance(walk, w, cols);
    }
}

/* What streaming warps know all along. */
struct Stream {
    const Walk& walk;
    const u8* w;
    const Tokens& from;
    const int* order;
    int cols;
    const Places& places;
    Barriers& barriers;
    Ahead& next;
    Cursor here;
    int ordinal, count, buffer;
    bool is_new;
    float acc[TOKEN_TILES][4];

    __device__ __forceinline__ void bring(const Cursor& cursor, int to) const {
        bring_run(cursor.run(walk), from, order, cols, places.tokens + to * buffer_bytes(cols));
    }

    /* A run begins: its tokens are there, the next run's are asked for. */
    __device__ __forceinline__ void enter() {
        count = here.run(walk).count;
        if (TOKEN_BUFFERS == 1) {
            bring(here, 0);
            cp_async_wait<0>();
            return;
        }
        Cursor after = here;
        after.skip(walk);
        if (after.is_there())
            bring(after, buffer ^ 1);
        else
            cp_async_commit();
        cp_async_wait<1>();
    }

    /* A piece, whose weights are in slot S, and those behind it as far as there are slots. False: no more. */
    template <int S>
    __device__ __forceinline__ bool step(Units (&a)[AHEAD]) {
        if (!here.is_there()) return false;
        if (is_new) enter();
        const unsigned char* tokens = places.tokens + buffer * buffer_bytes(cols) +
                                      warp_index() * UNIT_CHUNKS * TOKEN_CHUNK + 16 * lane_index();
        const bool is_asked = next.cursor.is_there();
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (u < own_units(cols)) {
                multiply(acc, a[S], u, tokens + u * WARPS * UNIT_CHUNKS * TOKEN_CHUNK, count);
                if (is_asked) a[S].load(u, next.at);
            }
        if (is_asked) next.advance(walk, w, cols);
        give_sums(acc, ordinal++, count, places.sums, barriers);
        is_new = here.advance(walk);
        if (is_new && TOKEN_BUFFERS == 2) buffer ^= 1;
        if constexpr (S + 1 < AHEAD)
            return step<S + 1>(a);
        else
            return true;
    }

    __device__ __forceinline__ void all(Units (&a)[AHEAD]) {
        here.start(walk);
        if (TOKEN_BUFFERS == 2 && here.is_there()) bring(here, 0);
        while (step<0>(a)) {
        }
    }
};

/* sink.prepare(run, tile) may ask for what the end of a tile needs; sink(run, tile, v) gets each tile once,
 * by one finishing warp: v as in skinny.cuh, of the pairs that the run has. */
template <class Sink>
__device__ __forceinline__ void end_tiles(const Walk& walk, const Places& places, Barriers& barriers,
                                          Sink& sink) {
    int ordinal = warp_index() - WARPS;
    Cursor here;
    here.start(walk);
    for (int i = 0; i < ordinal && here.is_there(); ++i) here.advance(walk);
    bool is_new = true;
    Run run{};
    while (here.is_there()) {
        if (is_new) run = here.run(walk);
        const int set = ordinal % SUM_SETS, tile = run.tile + here.piece - run.piece;
        const float2* sums = places.sums + set * WARPS * UNITS * 32 + lane_index();
        float2 v[UNITS];
        sink.prepare(run, tile);
        mbarrier_wait(&barriers.full[ordinal % FULL_BARRIERS], ordinal / FULL_BARRIERS & 1);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            if (n > 0 && 8 * n >= run.count) break;
            v[2 * n] = sums[64 * n], v[2 * n + 1] = sums[64 * n + 32];
#pragma unroll(5)
            for (int warp = 1; warp < WARPS; ++warp) {
                const float2 even = sums[32 * (warp * UNITS + 2 * n)],
                             odd = sums[32 * (warp * UNITS + 2 * n + 1)];
                v[2 * n].x += even.x, v[2 * n].y += even.y;
                v[2 * n + 1].x += odd.x, v[2 * n + 1].y += odd.y;
            }
        }
        mbarrier_arrive(&barriers.empty[set]);
        sink(run, tile, v);
        ordinal += FINISHERS, is_new = false;
        for (int i = 0; i < FINISHERS && here.is_there(); ++i) is_new |= here.advance(walk);
    }
}

/* What a launch is told of its matrices and how pieces are dealt out. */
struct Shape {
    int experts, tiles, cols, pairs, range, span;
};

/* The whole of it. KNOWS: the groups were complete before the kernel ahead began, which waited for them, so
 * weights are asked for before this one's wait. */
template <bool KNOWS, class Sink>
__device__ __forceinline__ void experts(const Shape& shape, const u8* w, const Tokens& from, const int* first,
                                        const int* order, Sink& sink) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Barriers barriers;
    __shared__ int2 totals;
    const Places places(dynamic, shape.experts);
    const bool is_streaming = warp_index() < WARPS, is_small = shape.pairs <= ORDER_ROOM;
    if (threadIdx.x == 0) barriers.init(Task{});
    if (!KNOWS) {
        griddep_wait();
        griddep_launch();
    }
    if (warp_index() == 0)
        make_plan(first, shape.experts, places.entries, totals);
    else if (is_small)
        for (int r = threadIdx.x - 32; r < shape.pairs; r += THREADS - 32)
            places.order[r] = __ldcg(order + r);
    __syncthreads();
    const Walk walk(shape.tiles, shape.range, shape.span, places.entries, totals);
    sink.order = is_small ? places.order : order, sink.runs = totals.y;
    Units a[AHEAD];
    Ahead next;
    if (is_streaming) {
        next.cursor.start(walk);
        next.find(walk, w, shape.cols);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
            if (next.cursor.is_there()) {
#pragma unroll
                for (int u = 0; u < CHUNKS; ++u)
                    if (u < own_units(shape.cols)) a[s].load(u, next.at);
                next.advance(walk, w, shape.cols);
            }
        if (KNOWS) ask_tiles(walk, next, w, shape.cols);
    }
    if (KNOWS) {
        griddep_wait();
        griddep_launch();
    }
    if (is_streaming) {
        Stream stream{walk,     w,    from, sink.order, shape.cols, places, barriers, next, {}, 0, 0, 0, true, {}};
        stream.all(a);
    } else {
        sink.begin();
        end_tiles(walk, places, barriers, sink);
    }
}
