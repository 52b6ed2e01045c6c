/* The frame of the *_fast kernels: tokens (rows x K) times packed weights (N x K) transposed, for few rows.
 * Grid:   persistent; block b owns K slice b % slices, and of it the row tiles b / slices, + blocks / slices
 * ... WARPS warps stream weights through mma; one more adds up their sums and finishes tiles, so that what a
 * tile's end costs does not hold up the stream. Shared: the slice's tokens, two sets of sums. Moves:  the
 * weights once; tokens once a block, from L2. Layout: packed weights [N/16][K/32][2][lane][8] bf16, sizes
 * rounded up with zeros (pack.cu). In each 32 k, lane l owns k 8(l%4)..+7 and gives 4 of them to each of two
 * mma's, so the B operands of both are one 16-byte read. Tokens lie as [K/32][8 rows][32 k], which is the
 * order in which a warp reads them: no bank conflicts. Only the order of the sum changes, the same for all
 * weights. Bits:   a row's sum runs over a warp's chunks, then warps, then slices, each ascending: never a
 * matter of how many rows there are. Source: kernel-playbook 2, 2a; warps that add through shared memory as
 * in Marlin (Frantar et al. 2024). */
#pragma once
#include "sm90.cuh"

#ifndef TOKEN_TILES
#define TOKEN_TILES 1  // groups of 8 token rows
#endif
#ifndef STREAM_WARPS
#define STREAM_WARPS 8
#endif
#ifndef STEP_CHUNKS
#define STEP_CHUNKS 4  // chunks of 32 k that a warp takes in one step: 2 loads of 16 bytes a lane each
#endif
#ifndef STEPS_AHEAD
#define STEPS_AHEAD 1  // steps whose weights are on their way to registers
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

constexpr int WARPS = STREAM_WARPS;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int CHUNKS = STEP_CHUNKS;
constexpr int AHEAD = STEPS_AHEAD;
constexpr int UNITS = 2 * TOKEN_TILES;  // pairs of outputs a lane: rows g, g + 8 of a token, g = lane / 4
constexpr int MOST_ROWS = 8 * TOKEN_TILES;
constexpr int CHUNK_BYTES = 1024;               // of packed weights: 16 rows x 32 k
constexpr int TOKEN_CHUNK = 512 * TOKEN_TILES;  // bytes of a chunk of the tokens
constexpr int SQUARES = 64;  // floats a slice at the start of the workspace: sums of squares by token row

/* What one block does. */
struct Task {
    int rows, cols, tiles;          // token rows, K, row tiles of all weights
    int slice, slices, begin, end;  // this block's chunks of K
    int first, step;                // its tiles: first, first + step, ...
};

__device__ __forceinline__ Task make_task(int rows, int cols, int tiles, int slices) {
    Task task;
    int chunks = (cols + 31) / 32;
    task.rows = rows, task.cols = cols, task.tiles = tiles;
    task.slice = blockIdx.x % slices, task.slices = slices;
    task.begin = chunks * task.slice / slices;
    task.end = chunks * (task.slice + 1) / slices;
    task.first = blockIdx.x / slices, task.step = gridDim.x / slices;
    return task;
}

/* The same task, made anew after the stream, which then need not keep it in registers; its step is kept. */
__device__ __forceinline__ Task again(const Task& before, int rows, int cols, int tiles, int slices) {
    Task task = make_task(rows, cols, tiles, opaque(slices));
    task.step = before.step;
    return task;
}

/* One packed matrix, or two whose tiles follow each other: the first then has heads * size rows. What at()
 * needs it makes anew, once a tile, rather than keep registers from the stream. */
struct Weights {
    int cols;
    const u16 *first, *second = nullptr;
    int heads = 0, size = 0;

    __device__ __forceinline__ const char* at(int tile) const {
        size_t tile_bytes = (size_t)(opaque(cols) + 31) / 32 * CHUNK_BYTES;
        if (!second) return (const char*)first + tile * tile_bytes;
        int first_tiles = (opaque(heads) * size + 15) / 16;
        return tile < first_tiles ? (const char*)first + tile * tile_bytes
                                  : (const char*)second + (tile - first_tiles) * tile_bytes;
    }
};

/* The token row and the weight row within its tile of unit q: v[q].x is row g, v[q].y row g + 8. */
__device__ __forceinline__ int token_of(int q) { return 8 * (q / 2) + 2 * (lane_index() % 4) + q % 2; }
__device__ __forceinline__ int row_of() { return lane_index() / 4; }

// ---- tokens ----

/* 8 activations from column k; zeros past the end. Aligned: 16 bytes at once. */
template <bool IS_ALIGNED>
__device__ __forceinline__ uint4 load_piece(const bf16* row, int k, int cols) {
    if (IS_ALIGNED) return k < cols ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = k + i < cols ? row[k + i].bits : 0;
    return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                      bits[6] | bits[7] << 16);
}

/* Two activations times their scales; their squares are added to sum. */
__device__ __forceinline__ u32 scale_pair(u32 pair, float scale_low, float scale_high, float& sum) {
    float low = low_f32(pair), high = high_f32(pair);
    sum += low * low;
    sum += high * high;
    return pack_bf16(low * scale_low, high * scale_high);
}

template <bool IS_ALIGNED>
__device__ __forceinline__ uint4 scale_piece(uint4 v, const float* norm, int k, int cols, float& sum) {
    if (IS_ALIGNED) {
        if (k >= cols) return v;
        float4 a = *(const float4*)(norm + k), b = *(const float4*)(norm + k + 4);
        return make_uint4(scale_pair(v.x, a.x, a.y, sum), scale_pair(v.y, a.z, a.w, sum),
                          scale_pair(v.z, b.x, b.y, sum), scale_pair(v.w, b.z, b.w, sum));
    }
    float scale[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = k + i < cols ? norm[k + i] : 0.f;
    return make_uint4(scale_pair(v.x, scale[0], scale[1], sum), scale_pair(v.y, scale[2], scale[3], sum),
                      scale_pair(v.z, scale[4], scale[5], sum), scale_pair(v.w, scale[6], scale[7], sum));
}

/* One row's slice by one warp; returns the sum of squares. */
template <bool IS_NORMED, bool IS_ALIGNED>
__device__ __forceinline__ float lay_row(const Task& task, const bf16* row, const float* norm,
                                         unsigned char* to) {
    int pieces = 4 * (task.end - task.begin);
    float sum = 0.f;
#pragma unroll(!IS_ALIGNED || TOKEN_TILES == 4 ? 1 : 4)
    for (int piece = lane_index(); piece < pieces; piece += 32) {
        int k = 32 * task.begin + 8 * piece;
        uint4 v = load_piece<IS_ALIGNED>(row, k, task.cols);
        if (IS_NORMED) v = scale_piece<IS_ALIGNED>(v, norm, k, task.cols, sum);
        *(uint4*)(to + piece / 4 * TOKEN_CHUNK + 16 * (piece % 4)) = v;
    }
    return IS_NORMED ? warp_sum(sum) : 0.f;
}

/* This slice of the token rows into shared memory; with a norm, times its scale, rounded to bf16, and each
 * row's sum of squares to `squares`: the root scales the finished sums (RowScale). One warp a row, so that a
 * row's bits are its own. All blocks of a slice write the same squares. pick: which rows of x, null: all. */
template <bool IS_NORMED>
__device__ __forceinline__ void lay_tokens(const Task& task, const bf16* x, const int* pick,
                                           const float* norm, float* squares, unsigned char* tokens) {
    for (int row = warp_index(); row < task.rows; row += WARPS + 1) {
        const bf16* from = x + (size_t)(pick ? pick[row] : row) * task.cols;
        unsigned char* to = tokens + row / 8 * 512 + row % 8 * 64;
        float sum = task.cols % 8 ? lay_row<IS_NORMED, false>(task, from, norm, to)
                                  : lay_row<IS_NORMED, true>(task, from, norm, to);
        if (IS_NORMED && lane_index() == 0) squares[SQUARES * task.slice + row] = sum;
    }
}

// ---- the stream of weights: WARPS warps ----

/* Steps of a tile: the same for all warps, though the last may have no chunk for some. */
__device__ __forceinline__ int steps_of(const Task& task) {
    int most = (task.end - task.begin + WARPS - 1) / WARPS;
    return (most + CHUNKS - 1) / CHUNKS;
}

/* Chunks of this warp in a tile: they are dealt out in turn. */
__device__ __forceinline__ int own_chunks(const Task& task) {
    return (task.end - task.begin - warp_index() + WARPS - 1) / WARPS;
}

/* The step whose weights are asked for next. */
struct Cursor {
    const char* at;
    int tile, step;

    __device__ __forceinline__ void start(const Task& task, const Weights& weights, int tile_) {
        tile = tile_, step = 0;
        if (tile < task.tiles)
            at = weights.at(tile) + (task.begin + warp_index()) * CHUNK_BYTES + 16 * lane_index();
    }

    /* Chunks of this warp from here to the tile's end; none past the last tile. */
    __device__ __forceinline__ int rest(const Task& task) const {
        return tile < task.tiles ? own_chunks(task) - step * CHUNKS : 0;
    }

    __device__ __forceinline__ void advance(const Task& task, const Weights& weights) {
        at += CHUNKS * WARPS * CHUNK_BYTES;
        if (++step == steps_of(task)) start(task, weights, tile + task.step);
    }
};

typedef uint4 Fragments[2 * CHUNKS];

__device__ __forceinline__ void load_chunk(Fragments& a, int u, const char* at) {
    a[2 * u] = load_stream(at + u * WARPS * CHUNK_BYTES);
    a[2 * u + 1] = load_stream(at + u * WARPS * CHUNK_BYTES + CHUNK_BYTES / 2);
}

/* sums: [2][WARPS][UNITS][32]. Each set is written by all warps (`full`), then read by the last (`empty`). */
__device__ __forceinline__ void hand_over(float (&acc)[TOKEN_TILES][4], int ordinal, float2* sums, u64* full,
                                          u64* empty) {
    int set = ordinal & 1;
    mbarrier_wait(&empty[set], (ordinal >> 1 & 1) ^ 1);
    int thread = opaque(threadIdx.x);  // the address is made here, not kept through the stream
    float2* to = sums + (set * WARPS + thread / 32) * UNITS * 32 + thread % 32;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        to[64 * n] = make_float2(acc[n][0], acc[n][2]);
        to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
    }
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(&full[set]);
}

__device__ __forceinline__ void stream(const Task& task, const Weights& weights, Fragments (&a)[AHEAD],
                                       Cursor& next, const unsigned char* tokens, float2* sums, u64* full,
                                       u64* empty) {
    const unsigned char* own = tokens + warp_index() * TOKEN_CHUNK + 16 * lane_index();
    float acc[TOKEN_TILES][4] = {};
    int tile = task.first, step = 0, ordinal = 0;
    while (true) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (tile >= task.tiles) return;
            if (next.tile >= task.tiles && warp_index() == 0) griddep_launch();  // the last load is under way
            int rest = own_chunks(task) - step * CHUNKS, asked = next.rest(task);
            const unsigned char* k = own + step * (CHUNKS * WARPS * TOKEN_CHUNK);
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u) {
                if (u < rest)
#pragma unroll
                    for (int n = 0; n < TOKEN_TILES; ++n) {
                        uint4 b = *(const uint4*)(k + u * WARPS * TOKEN_CHUNK + 512 * n);
                        mma_bf16(acc[n], a[s][2 * u], b.x, b.y);
                        mma_bf16(acc[n], a[s][2 * u + 1], b.z, b.w);
                    }
                if (u < asked) load_chunk(a[s], u, next.at);
            }
            next.advance(task, weights);
            if (++step == steps_of(task)) {
                hand_over(acc, ordinal++, sums, full, empty);
                step = 0, tile += task.step;
            }
        }
    }
}

// ---- the end of a tile: the last warp ----

/* Every lane of the warp that arrives last of `total` gets true and sees what the others' warps wrote before.
 * The counter is left at zero. */
__device__ __forceinline__ bool warp_last_to_arrive(u32* counter, u32 total) {
    __syncwarp();
    u32 before = 0;
    if (lane_index() == 0) {
        before = atomic_add_acq_rel(counter, 1);
        if (before == total - 1) store_release(counter, 0);
    }
    before = __shfl_sync(FULL_WARP, before, 0);
    __syncwarp();  // a shuffle alone orders no memory
    return before == total - 1;
}

/* Where unit 0 of this lane lies among the slices' sums: [tile][slice][UNITS][32]. */
__device__ __forceinline__ float2* slice_sums(const Task& task, float* work, int tile, int slice) {
    float2* sums = (float2*)(work + SQUARES * task.slices);
    return sums + ((size_t)tile * task.slices + slice) * UNITS * 32 + lane_index();
}

__device__ __forceinline__ void keep_slice(const Task& task, float* work, int tile,
                                           const float2 (&v)[UNITS]) {
    float2* to = slice_sums(task, work, tile, task.slice);
#pragma unroll
    for (int q = 0; q < UNITS; ++q) __stcg(to + 32 * q, v[q]);
}

/* True for the slice that comes last to a tile; v is then the sum over all slices. */
__device__ __forceinline__ bool merge(const Task& task, float* work, u32* counters, int tile,
                                      float2 (&v)[UNITS]) {
    if (task.slices == 1) return true;
    keep_slice(task, work, tile, v);
    if (!warp_last_to_arrive(counters + tile, task.slices)) return false;
#pragma unroll
    for (int q = 0; q < UNITS; ++q) v[q] = make_float2(0.f, 0.f);
    const float2* from = slice_sums(task, work, tile, 0);
#pragma unroll(8 / UNITS)  // 16 registers of loads under way
    for (int slice = 0; slice < task.slices; ++slice) {
#pragma unroll
        for (int q = 0; q < UNITS; ++q) {
            float2 part = __ldcg(from + 32 * (slice * UNITS + q));
            v[q].x += part.x, v[q].y += part.y;
        }
    }
    return true;
}

/* 1 / rms of each token row, from the slices' sums of squares; ready once any tile is whole. */
struct RowScale {
    float of[MOST_ROWS];

    /* By one warp. */
    __device__ __forceinline__ void make(const Task& task, const float* squares, float eps) {
        if (lane_index() < MOST_ROWS) {
            float sum = 0.f;
            for (int slice = 0; slice < task.slices; ++slice)
                sum += __ldcg(squares + SQUARES * slice + lane_index());
            of[lane_index()] = rsqrtf(sum / task.cols + eps);
        }
        __syncwarp();
    }
};

/* sink(tile, v) gets each tile of this block once its warps' sums are added up. */
template <class Sink>
__device__ __forceinline__ void gather(const Task& task, const float2* sums, u64* full, u64* empty,
                                       Sink& sink) {
    int ordinal = 0;
    for (int tile = task.first; tile < task.tiles; tile += task.step, ++ordinal) {
        int set = ordinal & 1;
        const float2* from = sums + set * WARPS * UNITS * 32 + lane_index();
        float2 v[UNITS];
        mbarrier_wait(&full[set], ordinal >> 1 & 1);
#pragma unroll
        for (int q = 0; q < UNITS; ++q) v[q] = from[32 * q];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp)
#pragma unroll
            for (int q = 0; q < UNITS; ++q) {
                float2 part = from[32 * (warp * UNITS + q)];
                v[q].x += part.x, v[q].y += part.y;
            }
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(&empty[set]);
        sink(tile, v);
    }
}

/* The whole of it. Weights are asked for first, so they travel while the kernel before this one ends. */
template <bool IS_NORMED, class Sink>
__device__ __forceinline__ void skinny(const Task& task, const Weights& weights, const bf16* x,
                                       const int* pick, const float* norm, float* squares, Sink& sink) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 full[2], empty[2];
    float2* sums = (float2*)dynamic;
    unsigned char* tokens = dynamic + 2 * WARPS * UNITS * 32 * sizeof(float2);
    bool is_streaming = warp_index() < WARPS;
    Fragments a[AHEAD];
    Cursor next{};
    if (is_streaming) {
        next.start(task, weights, task.first);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u)
                if (u < next.rest(task)) load_chunk(a[s], u, next.at);
            next.advance(task, weights);
        }
    }
    if (threadIdx.x == 0) {
        for (int set = 0; set < 2; ++set) mbarrier_init(&full[set], WARPS), mbarrier_init(&empty[set], 1);
        mbarrier_fence_init();
    }
    griddep_wait();
    lay_tokens<IS_NORMED>(task, x, pick, norm, squares, tokens);
    __syncthreads();
    if (is_streaming)
        stream(task, weights, a, next, tokens, sums, full, empty);
    else
        gather(task, sums, full, empty, sink);
}
