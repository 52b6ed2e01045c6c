/* Weights that come to registers: bf16. */
#pragma once

constexpr int RING_BYTES = 0;
typedef uint4 Fragments[2 * CHUNKS];

__device__ __forceinline__ void load_chunk(Fragments& a, int u, const char* at) {
    a[2 * u] = load_stream(at + u * WARPS * CHUNK_BYTES);
    a[2 * u + 1] = load_stream(at + u * WARPS * CHUNK_BYTES + CHUNK_BYTES / 2);
}

/* The steps whose weights are on their way. */
struct UnderWay {
    Fragments of[AHEAD];

    __device__ __forceinline__ explicit UnderWay(const unsigned char*) {}

    template <class Matrix>
    __device__ __forceinline__ void begin(const Task& task, const Matrix& weights, Cursor& next) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u)
                if (u < next.rest(task)) load_chunk(of[s], u, next.at);
            next.advance(task, weights);
        }
    }
};

template <bool IS_NORMED, class Matrix>
__device__ __forceinline__ void stream(const Task& task, const Matrix& weights, UnderWay& a, Cursor& next,
                                       unsigned char* tokens, float2* sums, Barriers& barriers) {
    const unsigned char* own = tokens + warp_index() * TOKEN_CHUNK + 16 * lane_index();
    float acc[TOKEN_TILES][4] = {};
    int tile = task.first, step = 0, ordinal = 0;
    while (true) {
        if (ordinal == 0) ready<IS_NORMED>(task, step * CHUNKS, tokens);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (tile >= task.tiles) return;
            if (!EARLY_LAUNCH && next.tile >= task.tiles && warp_index() == 0)
                griddep_launch();  // the last load is under way
            int rest = own_chunks(task) - step * CHUNKS, asked = next.rest(task);
            const unsigned char* k = own + step * (CHUNKS * WARPS * TOKEN_CHUNK);
#pragma unroll
            for (int u = 0; u < CHUNKS; ++u) {
                if (u < rest)
#pragma unroll
                    for (int n = 0; n < TOKEN_TILES; ++n) {
                        uint4 b = *(const uint4*)(k + u * WARPS * TOKEN_CHUNK + 512 * n);
                        mma_bf16(acc[n], a.of[s][2 * u], b.x, b.y);
                        mma_bf16(acc[n], a.of[s][2 * u + 1], b.z, b.w);
                    }
                if (u < asked) load_chunk(a.of[s], u, next.at);
            }
            next.advance(task, weights);
            if (++step == steps_of(task)) {
                hand_over(acc, ordinal++, sums, barriers);
                step = 0, tile += task.step;
            }
        }
    }
}
