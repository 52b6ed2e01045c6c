/* route_few: route_fast for up to 16 rows (TOKEN_ROWS), with the same bits.
 * Grid:   one cluster, a block a row tile of W, which lies in its shared memory before the wait. It has so
 *         few registers that it runs beside the kernel ahead.
 * Moves:  E*D*2 bytes; bound by latency.
 * Bits:   a logit's sum runs over a warp's chunks, then warps, each ascending.
 * Truth:  oracle_moe.py route. */
#ifndef STREAM_WARPS
#define STREAM_WARPS 16
#endif
#ifndef TOKEN_ROWS
#define TOKEN_ROWS 1
#endif

#include "route.cuh"

constexpr int ROWS = TOKEN_ROWS, EIGHTS = (ROWS + 7) / 8;
constexpr int SUMS = WARPS * 2 * EIGHTS * 32;  // float2; before, the rows' squares lie there
constexpr int MEETING = SUMS > ROWS* ROUTE_THREADS / 2 ? SUMS : ROWS * ROUTE_THREADS / 2;
static_assert(WARPS == PARTS && ROWS <= WARPS, "a warp a part of a row, and a warp a row");

/* A pair as a word, in the order of experts, then of pairs: those of no expert are last. */
constexpr int PAIR_BITS = 9;  // 16 rows of 32 experts
constexpr u32 NO_PAIR = 0xffffffff;
__device__ __forceinline__ u32 pair_word(int expert, int pair) {
    return (expert < 0 ? NO_PAIR : (u32)expert) << PAIR_BITS | pair;
}

/* Where the group of each expert begins, and the pairs in their order: what lies before is counted. By the
 * block, its last warps first: the others have shares to make. pairs: multiples of 4 may be read, NO_PAIR. */
__device__ __forceinline__ void group(const u32* pairs, int count, const Routed& to, int E) {
    for (int base = 32 * (WARPS - 1 - warp_index()); base <= E + count; base += ROUTE_THREADS) {
        const int i = base + lane_index(), pair = i - E - 1;
        const u32 own = pair < 0 ? (u32)i << PAIR_BITS : pair < count ? pairs[pair] : NO_PAIR;
        int before = 0, upto = 0;  // words below this one, and below the next expert's
        for (int at = 0; at < count; at += 4) {
            const uint4 four = *(const uint4*)(pairs + at);
            const u32 next = own + (1 << PAIR_BITS);
            before += (four.x < own) + (four.y < own) + (four.z < own) + (four.w < own);
            upto += (four.x < next) + (four.y < next) + (four.z < next) + (four.w < next);
        }
        const u32 active = __ballot_sync(FULL_WARP, i < E && upto > before);
        if (active && lane_index() == 0) atomicAdd(to.touched, __popc(active));
        if (pair < 0)
            to.first[i] = before;
        else if (pair < count)
            to.order[before] = own >> PAIR_BITS < (u32)E ? pair : -1;
    }
}

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, U_NORM || ROWS > 4 ? 2 : 3)
    route_few(const u16* w, const bf16* x, const float* norm, const float* u_norm, const float* bias,
              const float* expert_scale, const int* pos, bf16* u, int* expert, float* share, int* first,
              int* order, int* touched, float eps, int normalise, int E, int U, int cols) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 loaded, arrived;
    const int rank = cluster_rank(), tiles = cluster_size(), chunks = (cols + 31) / 32, lane = lane_index();
    unsigned char *weights = dynamic, *tokens = weights + chunks * CHUNK_BYTES;  // tokens: [chunk][ROWS][64]
    float2* sums = (float2*)(tokens + chunks * ROWS * 64);                       // [WARPS][2 * EIGHTS][32]
    float* squares = (float*)sums;                                               // [ROWS][WARPS][32], before
    float* scales = (float*)(sums + MEETING);         // [16]: of a row, below 0 where it is inactive
    float* logits = scales + 16;                      // [ROWS][16 * tiles]
    u32* pairs = (u32*)(logits + ROWS * 16 * tiles);  // [ROWS * 32]: pair_word()
    if (threadIdx.x == 0) {
        mbarrier_init(&loaded, 1), mbarrier_init(&arrived, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect(&loaded, chunks * CHUNK_BYTES);
        bulk_load_as(READ_ONCE, weights, (const char*)w + (size_t)rank * chunks * CHUNK_BYTES,
                     chunks * CHUNK_BYTES, &loaded);
        if (rank == 0) mbarrier_arrive_expect(&arrived, tiles * ROWS * 64);
    }
    const int k = 8 * threadIdx.x;  // this thread's part of a row
    float scale[8], own_scale[8];   // own: of u
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scale[i] = k < cols ? norm[k + i] : 0.f;
        own_scale[i] = U_NORM && k < cols ? u_norm[k + i] : 0.f;
    }
    const int of_row = threadIdx.x / 16, of_expert = 16 * rank + threadIdx.x % 16;  // what a thread sends
    const float add = bias && of_expert < E ? bias[of_expert] : 0.f;
    if (threadIdx.x < ROWS * 32) pairs[threadIdx.x] = NO_PAIR;
    griddep_launch();
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();  // the first block's barrier is there
    griddep_wait();
    const int position = warp_index() < ROWS ? pos[warp_index()] : -1;
    auto piece = [&](int row) { return (uint4*)(tokens + (k / 32 * ROWS + row) * 64 + k % 32 * 2); };
    constexpr int AT_ONCE = ROWS < 4 ? ROWS : ROWS < 8 ? 4 : 8;
#pragma unroll(1)
    for (int first_row = 0; first_row < ROWS; first_row += AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (const int row = first_row + i; row < ROWS)
                v[i] = k < cols ? *(const uint4*)(x + (size_t)row * cols + k) : uint4{};
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = first_row + i;
            if (row >= ROWS) break;
            float sum = 0.f;
            scale_pair(v[i].x, 1.f, 1.f, sum), scale_pair(v[i].y, 1.f, 1.f, sum);
            scale_pair(v[i].z, 1.f, 1.f, sum), scale_pair(v[i].w, 1.f, 1.f, sum);
            squares[row * ROUTE_THREADS + threadIdx.x] = sum;
            if (k < 32 * chunks) *piece(row) = v[i];
        }
    }
    __syncthreads();
    if (const int row = warp_index(); row < ROWS) {
        float parts[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) parts[part] = squares[(row * PARTS + part) * 32 + lane];
        const float r = rsqrtf(warp_sum(folded(parts)) / cols + eps);
        if (lane == 0) scales[row] = position < 0 ? -1.f : r;
    }
    __syncthreads();
#pragma unroll(ROWS < 2 ? 1 : ROWS < 5 ? 2 : 4)
    for (int row = 0; row < ROWS; ++row) {
        if (k >= 32 * chunks) break;
        const float r = scales[row];
        const uint4 v = *piece(row);  // what this thread wrote itself
        auto times = [&](const float (&scale)[8]) {
            auto both = [&](u32 pair, int i) {
                return pack_bf16(scale[i] * (low_f32(pair) * r), scale[i + 1] * (high_f32(pair) * r));
            };
            return make_uint4(both(v.x, 0), both(v.y, 2), both(v.z, 4), both(v.w, 6));
        };
        uint4 y = r < 0.f ? uint4{} : times(scale);
        *piece(row) = y;
        if (row % tiles != rank || k >= cols) continue;
        if (U_NORM && !(r < 0.f)) y = times(own_scale);
        *(uint4*)(u + (size_t)row * cols + k) = y;
    }
    __syncthreads();
    mbarrier_wait(&loaded, 0);
    float acc[EIGHTS][4] = {};
    for (int chunk = warp_index(); chunk < chunks; chunk += WARPS) {
        const uint4 *a = (const uint4*)(weights + chunk * CHUNK_BYTES) + lane,
                    *b = (const uint4*)(tokens + chunk * ROWS * 64) + lane;
        const uint4 low = a[0], high = a[32];
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            const uint4 token = 8 * n + lane / 4 < ROWS ? b[32 * n] : uint4{};
            mma_bf16(acc[n], low, token.x, token.y);
            mma_bf16(acc[n], high, token.z, token.w);
        }
    }
    float2* own = sums + warp_index() * 2 * EIGHTS * 32 + lane;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
        own[64 * n] = make_float2(acc[n][0], acc[n][2]);
        own[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
    }
    __syncthreads();
    if (warp_index() < (ROWS + 1) / 2) {  // four experts of a row a store
        const int unit = 2 * (of_row / 8) + of_row % 2;
        const float* from = (const float*)(sums + unit * 32 + lane % 8 * 4 + of_row % 8 / 2) + lane % 16 / 8;
        float sum = from[0];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += from[warp * 128 * EIGHTS];
        sum += add;
        const float4 four =
            make_float4(sum, __shfl_down_sync(FULL_WARP, sum, 1), __shfl_down_sync(FULL_WARP, sum, 2),
                        __shfl_down_sync(FULL_WARP, sum, 3));
        float* to = logits + of_row * 16 * tiles + of_expert;
        if (of_row < ROWS && lane % 4 == 0)
            store_async(cluster_address(to, 0), four, cluster_address(&arrived, 0));
    }
    if (rank > 0) return;
    mbarrier_wait_cluster(&arrived, 0);
    __syncwarp();
    const int row = warp_index();
    const float* own_logits = logits + row * 16 * tiles;
    Choice choice{-1, 0.f, 0.f};
    if (position >= 0) choice = choose(own_logits, E, U);
    if (row < ROWS && lane < U) pairs[row * U + lane] = pair_word(choice.id, row * U + lane);
    __syncthreads();
    const Routed routed{expert, share, first, order, touched, expert_scale};
    if (row < ROWS) routed.keep(row, choice, position >= 0, own_logits, E, U, normalise);
    group(pairs, ROWS * U, routed, E);
}
