/* The frame of the *_fast kernels: tokens (rows x K) times packed weights (N x K) transposed, for few rows.
 * Grid:   persistent; block b owns K slice b % slices, and of it the row tiles b / slices, + blocks / slices
 *         ... WARPS warps stream weights through mma; one more adds up their sums and finishes tiles, so
 *         that what a tile's end costs does not hold up the stream. Shared: the slice's tokens, two sets of
 *         sums.
 * Moves:  the weights once; tokens once a block, from L2.
 * Layout: packed weights [N/16][K/32][2][lane][8] bf16, sizes rounded up with zeros (pack.cu), or FP8 as
 *         fp8.cuh says. In each 32 k,
 *         lane l owns k 8(l%4)..+7 and gives 4 of them to each of two mma's, so the B operands of both are
 *         one 16-byte read. Tokens lie as [K/32][8 rows][32 k], which is the order in which a warp reads
 *         them: no bank conflicts. Only the order of the sum changes, the same for all weights.
 * Bits:   a row's sum runs over a warp's chunks, then warps, then slices, each ascending: never a matter of
 *         how many rows there are.
 * Source: kernel-playbook 2, 2a; warps that add through shared memory as in Marlin (Frantar et al. 2024). */
#pragma once
#include "skinny_finish.cuh"
#include "skinny_weights.cuh"

// ---- the stream of weights: WARPS warps ----

/* Steps of a tile: the same for all warps, though the last may have no chunk for some. */
__device__ __forceinline__ int steps_of(const Task& task) {
    if (EVEN_STEPS) return EVEN_STEPS;
    int most = (task.end - task.begin + SPAN * WARPS - 1) / (SPAN * WARPS) * SPAN;
    return (most + CHUNKS - 1) / CHUNKS;
}

/* Chunks of this warp from a step of a tile on. */
__device__ __forceinline__ int rest_of(const Task& task, int step) {
    return EVEN_STEPS ? CHUNKS : own_chunks(task) - step * CHUNKS;
}

/* Whether a step with so many of them has chunk u. */
__device__ __forceinline__ bool has_chunk(int u, int rest) { return EVEN_STEPS ? rest > 0 : u < rest; }

/* The step whose weights are asked for next. */
struct Cursor {
    const char *at, *scales;  // scales: of FP8, the tile's
    int tile, step;

    template <class Matrix>
    __device__ __forceinline__ void start(const Task& task, const Matrix& weights, int tile_) {
        tile = tile_, step = 0;
        if (tile >= task.tiles) return;
        const char* first = weights.at(tile);
        at = first + (task.begin + SPAN * warp_index()) * CHUNK_BYTES + 16 * lane_index();
        if (FP8) scales = first + fp8_codes(opaque(task.cols));
    }

    /* Chunks of this warp from here to the tile's end; none past the last tile. */
    __device__ __forceinline__ int rest(const Task& task) const {
        return tile < task.tiles ? rest_of(task, step) : 0;
    }

    template <class Matrix>
    __device__ __forceinline__ void advance(const Task& task, const Matrix& weights) {
        at += CHUNKS * WARPS * CHUNK_BYTES;
        if (++step == steps_of(task)) start(task, weights, tile + task.step);
    }
};

/* FP8: the scales of the step that `next` names. */
__device__ __forceinline__ void load_scales(Fragments& a, const Task& task, const Cursor& next) {
    if (FP8)
        a.load_scales(next.scales,
                      task.begin / SPAN + opaque(threadIdx.x) / 32 + next.step * (CHUNKS / SPAN) * WARPS,
                      next.rest(task));
}

/* The warp's next ASKED_CHUNKS chunks to L2: memory then has something to do until the tokens are there. */
template <class Matrix>
__device__ __forceinline__ void ask(const Task& task, const Matrix& weights, Cursor next) {
    const int lane = opaque(threadIdx.x) % 32;
#pragma unroll(1)
    for (int left = ASKED_CHUNKS; left > 0; left -= CHUNKS) {
        int here = min(min(left, CHUNKS), next.rest(task));
        constexpr int LINES = CHUNK_BYTES / 128;  // of a chunk, a lane each
        for (int u = lane / LINES; u < here; u += 32 / LINES)
            prefetch_l2(next.at - 16 * lane + chunk_at(u) * CHUNK_BYTES + 128 * (lane % LINES));
        next.advance(task, weights);
    }
}

/* The steps under way in turn. Not a loop: of large bodies the compiler keeps one, and weights in memory. */
template <int S = 0, class Take>
__device__ __forceinline__ bool take_all(Fragments (&a)[AHEAD], const Take& take) {
    if constexpr (S == AHEAD)
        return true;
    else
        return take(a[S]) && take_all<S + 1>(a, take);
}

template <bool IS_NORMED, class Matrix>
__device__ __forceinline__ void stream(const Task& task, const Matrix& weights, Fragments (&a)[AHEAD],
                                       Cursor& next, unsigned char* tokens, float2* sums,
                                       Barriers& barriers) {
    const unsigned char* first = tokens + SPAN * warp_index() * TOKEN_CHUNK + 16 * lane_index();
    float acc[TOKEN_TILES][4] = {}, part[TOKEN_TILES][4] = {};  // FP8: of a span
    int tile = task.first, step = 0, ordinal = 0;
    auto take = [&](Fragments& own) {  // a step; false: there is none
        if (tile >= task.tiles) return false;
        if (!EARLY_LAUNCH && next.tile >= task.tiles && warp_index() == 0)
            griddep_launch();  // the last load is under way
        const int rest = rest_of(task, step), asked = next.rest(task);
        const unsigned char* k = first + step * (CHUNKS * WARPS * TOKEN_CHUNK);
        const float scale = own.scale;
        load_scales(own, task, next);
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u) {
            if (has_chunk(u, rest)) multiply(FP8 ? part : acc, own, u, k + chunk_at(u) * TOKEN_CHUNK);
            if (has_chunk(u, asked)) own.load(u, next.at);
            if (FP8 && u % SPAN == SPAN - 1 && has_chunk(u - u % SPAN, rest))
                meet_scales(acc, part, scale, u / SPAN);
        }
        next.advance(task, weights);
        if (++step == steps_of(task)) {
            give_sums(acc, ordinal++, MOST_ROWS, [&](int set) { return own_sums(sums, set); }, barriers);
            step = 0, tile += task.step;
        }
        return true;
    };
    do {
        if (ordinal == 0) ready<IS_NORMED>(task, step * CHUNKS, tokens);
    } while (take_all(a, take));
}

// ---- the whole of it ----

/* Weights are asked for first, so they travel while the kernel before this one ends. */
template <bool IS_NORMED, class Matrix, class Sink>
__device__ __forceinline__ void skinny(const Task& task, const Matrix& weights, const bf16* x,
                                       const int* pick, const float* norm, float* squares, Sink& sink) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Barriers barriers;
    float2* sums = (float2*)dynamic;
    float4* inbox = (float4*)(sums + 2 * WARPS * UNITS * 32);  // [finisher][slice][UNITS / 2][32]
    unsigned char* tokens =
        (unsigned char*)(inbox + (CLUSTER_MERGE ? FINISHERS * task.slices * UNITS / 2 * 32 : 0));
    bool is_streaming = warp_index() < WARPS;
    Fragments a[AHEAD];
    Cursor next{};
    if (is_streaming) {
        next.start(task, weights, task.first);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u)
                if (has_chunk(u, next.rest(task))) a[s].load(u, next.at);
            load_scales(a[s], task, next);
            next.advance(task, weights);
        }
        ask(task, weights, next);
        if (IS_NORMED) bring_scales(task, norm, tokens);
    }
    if (threadIdx.x == 0) barriers.init(task);
    if (EARLY_LAUNCH && warp_index() == 0) griddep_launch();
    if (CLUSTER_MERGE) {  // the other blocks' barriers are there too
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        __syncthreads();
    }
    griddep_wait();
    if (is_streaming) {
        bring_tokens(task, x, pick, tokens);
        stream<IS_NORMED>(task, weights, a, next, tokens, sums, barriers);
    } else {
        gather<IS_NORMED>(task, sums, inbox, tokens, squares, barriers, sink);
    }
}
