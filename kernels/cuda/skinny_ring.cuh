/* Weights that come through a ring in shared memory: FP8, which become bf16 in registers, exactly, and whose
 * sums over 32 k meet their scale in f32 (fp8.cuh). Widening takes registers and time, in which those under
 * way would stand still; and a wait for the first of many loads to registers is a wait for all. Each warp has
 * AHEAD slots of its own, of a step each; a lane copies the 16 bytes that it multiplies itself. */
#pragma once

constexpr int SLOT_BYTES = CHUNKS * (FP8_CHUNK + 8) + (CHUNKS % 2 ? 8 : 0);  // chunks, then their scales
constexpr int RING_BYTES = (WARPS * AHEAD * SLOT_BYTES + 127) / 128 * 128;
static_assert(CHUNKS <= 16, "a lane for each scale of a step");

struct UnderWay {
    unsigned char* slots;  // of this warp
    int slot = 0;          // that is read next, and filled behind it

    __device__ __forceinline__ explicit UnderWay(unsigned char* ring)
        : slots(ring + warp_index() * AHEAD * SLOT_BYTES) {}

    /* The step that `next` names, into a slot; a group of copies, also where there is none. */
    __device__ __forceinline__ void load(const Task& task, const Cursor& next, unsigned char* to) const {
        const int lane = lane_index(), count = next.rest(task);
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (u < count) cp_async_stream(to + FP8_CHUNK * u + 16 * lane, next.at + u * WARPS * FP8_CHUNK);
        const int chunk = task.begin + warp_index() + (next.step * CHUNKS + lane / 2) * WARPS;
        if (lane < 2 * min(count, CHUNKS))
            cp_async_4(to + FP8_CHUNK * CHUNKS + 4 * lane,
                       next.scales + chunk / (SCALE_K / 32) * 8 + lane % 2 * 4);
        cp_async_commit();
    }

    template <class Matrix>
    __device__ __forceinline__ void begin(const Task& task, const Matrix& weights, Cursor& next) {
#pragma unroll(1)
        for (int s = 0; s < AHEAD; ++s) {
            load(task, next, slots + s * SLOT_BYTES);
            next.advance(task, weights);
        }
    }
};

/* A chunk times the tokens: this lane's 16 bytes of 8 rows, 512 bytes further those of the next 8. */
__device__ __forceinline__ void multiply(float (&acc)[TOKEN_TILES][4], const uint4& words, float2 scale,
                                         const unsigned char* tokens) {
    uint4 wide[2];
    widen_chunk(wide, words);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        const uint4 b = *(const uint4*)(tokens + 512 * n);
        float part[4] = {};
        mma_bf16(part, wide[0], b.x, b.y);
        mma_bf16(part, wide[1], b.z, b.w);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = fmaf(e < 2 ? scale.x : scale.y, part[e], acc[n][e]);
    }
}

template <bool IS_NORMED, class Matrix>
__device__ __forceinline__ void stream(const Task& task, const Matrix& weights, UnderWay& a, Cursor& next,
                                       unsigned char* tokens, float2* sums, Barriers& barriers) {
    const unsigned char* first = tokens + warp_index() * TOKEN_CHUNK + 16 * lane_index();
    float acc[TOKEN_TILES][4] = {};
    for (int tile = task.first, step = 0, ordinal = 0; tile < task.tiles;) {
        if (ordinal == 0 && step % AHEAD == 0) ready<IS_NORMED>(task, step * CHUNKS, tokens);
        if (!EARLY_LAUNCH && next.tile >= task.tiles && warp_index() == 0) griddep_launch();
        unsigned char* slot = a.slots + a.slot * SLOT_BYTES;
        const unsigned char* k = first + step * (CHUNKS * WARPS * TOKEN_CHUNK);
        const int rest = own_chunks(task) - step * CHUNKS;
        cp_async_wait<AHEAD - 1>();
        __syncwarp();  // scales that other lanes brought
#pragma unroll
        for (int u = 0; u < CHUNKS; ++u)
            if (u < rest)
                multiply(acc, *(const uint4*)(slot + FP8_CHUNK * u + 16 * lane_index()),
                         *(const float2*)(slot + FP8_CHUNK * CHUNKS + 8 * u), k + u * WARPS * TOKEN_CHUNK);
        __syncwarp();  // all have read the scales
        a.load(task, next, slot);
        next.advance(task, weights);
        if (++a.slot == AHEAD) a.slot = 0;
        if (++step == steps_of(task)) {
            hand_over(acc, ordinal++, sums, barriers);
            step = 0, tile += task.step;
        }
    }
}
