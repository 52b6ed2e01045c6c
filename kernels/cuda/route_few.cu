/* route_few: route_fast for one or two rows (TOKEN_ROWS), with the same bits.
 * Grid:   one cluster, a block a row tile of W, which lies in its shared memory before the wait. It has so few
 *         registers that it runs beside the kernel ahead.
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

constexpr int ROWS = TOKEN_ROWS;
static_assert(WARPS == PARTS && ROWS <= 2, "a warp a part of a row; a warp sends the logits");

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, U_NORM ? 2 : 3)
    route_few(const u16* w, const bf16* x, const float* norm, const float* u_norm, const float* bias,
              const float* expert_scale, const int* pos, bf16* u, int* expert, float* share, int* first,
              int* order, int* touched, float eps, int normalise, int E, int U, int cols) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 loaded, arrived;
    const int rank = cluster_rank(), tiles = cluster_size(), chunks = (cols + 31) / 32, lane = lane_index();
    unsigned char *weights = dynamic, *tokens = weights + chunks * CHUNK_BYTES;  // tokens: [chunk][ROWS][64]
    float2* sums = (float2*)(tokens + chunks * ROWS * 64);                       // [WARPS][2][32]
    float* squares = (float*)sums;                                               // [ROWS][WARPS][32], before
    float* logits = (float*)(sums + WARPS * 2 * 32);                             // [ROWS][16 * tiles]
    Groups groups;
    groups.rows_of = (u32*)(logits + ROWS * 16 * tiles);
    groups.starts = (int*)(groups.rows_of + 16 * tiles);
    groups.chosen = groups.starts + 16 * tiles + 16;
    if (threadIdx.x == 0) {
        mbarrier_init(&loaded, 1), mbarrier_init(&arrived, 1);
        mbarrier_fence_init();
        mbarrier_arrive_expect(&loaded, chunks * CHUNK_BYTES);
        bulk_load(weights, (const char*)w + (size_t)rank * chunks * CHUNK_BYTES, chunks * CHUNK_BYTES,
                  &loaded);
        if (rank == 0) mbarrier_arrive_expect(&arrived, tiles * ROWS * 64);
    }
    const int k = 8 * threadIdx.x;  // this thread's part of a row
    float scale[8], own_scale[8];   // own: of u
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scale[i] = k < cols ? norm[k + i] : 0.f;
        own_scale[i] = U_NORM && k < cols ? u_norm[k + i] : 0.f;
    }
    const int of_row = lane / 16, of_expert = 16 * rank + lane % 16;  // what a lane of the first warp sends
    const float add = bias && of_expert < E ? bias[of_expert] : 0.f;
    for (int e = threadIdx.x; e < 16 * tiles; e += ROUTE_THREADS) groups.rows_of[e] = 0;
    griddep_launch();
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();  // the first block's barrier is there
    griddep_wait();
    uint4 v[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        v[row] = k < cols ? *(const uint4*)(x + (size_t)row * cols + k) : uint4{};
        float sum = 0.f;
        scale_pair(v[row].x, 1.f, 1.f, sum), scale_pair(v[row].y, 1.f, 1.f, sum);
        scale_pair(v[row].z, 1.f, 1.f, sum), scale_pair(v[row].w, 1.f, 1.f, sum);
        squares[row * ROUTE_THREADS + threadIdx.x] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        float parts[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) parts[part] = squares[(row * PARTS + part) * 32 + lane];
        const float r = rsqrtf(warp_sum(folded(parts)) / cols + eps);
        auto times = [&](const float (&scale)[8]) {
            auto both = [&](u32 pair, int i) {
                return pack_bf16(scale[i] * (low_f32(pair) * r), scale[i + 1] * (high_f32(pair) * r));
            };
            return make_uint4(both(v[row].x, 0), both(v[row].y, 2), both(v[row].z, 4), both(v[row].w, 6));
        };
        uint4 y = times(scale);
        if (pos[row] < 0) y = uint4{};
        if (k < 32 * chunks) *(uint4*)(tokens + (k / 32 * ROWS + row) * 64 + k % 32 * 2) = y;
        if (U_NORM && pos[row] >= 0) y = times(own_scale);
        if (row % tiles == rank && k < cols) *(uint4*)(u + (size_t)row * cols + k) = y;
    }
    __syncthreads();
    mbarrier_wait(&loaded, 0);
    float acc[4] = {};
    for (int chunk = warp_index(); chunk < chunks; chunk += WARPS) {
        const uint4 *a = (const uint4*)(weights + chunk * CHUNK_BYTES) + lane,
                    *b = (const uint4*)(tokens + chunk * ROWS * 64) + lane;
        const uint4 token = lane / 4 < ROWS ? *b : uint4{};
        mma_bf16(acc, a[0], token.x, token.y);
        mma_bf16(acc, a[32], token.z, token.w);
    }
    sums[warp_index() * 64 + lane] = make_float2(acc[0], acc[2]);
    sums[warp_index() * 64 + 32 + lane] = make_float2(acc[1], acc[3]);
    __syncthreads();
    if (warp_index() == 0) {  // four experts of a row a store
        const float* from = (const float*)(sums + of_row % 2 * 32 + lane % 8 * 4) + lane % 16 / 8;
        float sum = from[0];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += from[warp * 128];
        sum += add;
        const float4 four =
            make_float4(sum, __shfl_down_sync(FULL_WARP, sum, 1), __shfl_down_sync(FULL_WARP, sum, 2),
                        __shfl_down_sync(FULL_WARP, sum, 3));
        float* to = logits + of_row * 16 * tiles + of_expert;
        if (of_row < ROWS && lane % 4 == 0)
            store_async(cluster_address(to, 0), four, cluster_address(&arrived, 0));
    }
    if (rank > 0) return;
    const int position[1] = {warp_index() < ROWS ? pos[warp_index()] : -1};
    mbarrier_wait_cluster(&arrived, 0);
    __syncwarp();
    const Routed routed{expert, share, first, order, touched, expert_scale};
    choose_and_group(groups, logits, 16 * tiles, position, 0, ROWS, E, U, normalise, routed);
}
