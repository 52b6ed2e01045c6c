/* route_fast: u = n(x) * norm, rounded once; of W u + bias each row's experts and shares; the groups.
 * Grid:   a cluster for `each` rows, a block of it for every so-manyth row tile of W. All blocks norm the
 *         rows; logits meet in the first block's shared memory, which chooses and, where there is one
 *         cluster, makes the groups (route.cu's group otherwise). W is asked for before the wait, as much of
 *         it as registers hold.
 * Moves:  E*D*2 bytes; bound by latency.
 * Bits:   a logit's sum runs over a warp's chunks, then warps, each ascending.
 * Truth:  oracle_moe.py route. */
#include "choose.cuh"
#include "skinny_tokens.cuh"

#ifndef KEPT_CHUNKS
#define KEPT_CHUNKS 4  // of a warp, in registers
#endif

constexpr int KEPT = KEPT_CHUNKS, ROUTE_THREADS = 32 * WARPS;
constexpr int LAID_CHUNK = TOKEN_CHUNK + 64;  // bytes: rows are laid without bank conflicts
constexpr int MOST_EACH = 32;                 // rows of a cluster: a word has a bit for each

struct Places {
    float2* sums;           // [WARPS][UNITS][32]
    float* logits;          // [MOST_EACH][16 * tiles]
    u32* rows_of;           // [E]: which rows chose an expert
    int *starts, *chosen;   // [E + 1]; [MOST_EACH * 32]
    float* norm;            // [chunks * 32]
    float* bias;            // [16 * tiles]
    unsigned char* tokens;  // [chunks] LAID_CHUNK

    __device__ __forceinline__ Places(unsigned char* dynamic, int tiles, int chunks) {
        sums = (float2*)dynamic;
        logits = (float*)(sums + WARPS * UNITS * 32);
        rows_of = (u32*)(logits + MOST_EACH * 16 * tiles);
        starts = (int*)(rows_of + 16 * tiles);
        chosen = starts + 16 * tiles + 16;
        norm = (float*)(chosen + MOST_EACH * 32);
        bias = norm + 32 * chunks;
        tokens = (unsigned char*)(bias + 16 * tiles);
    }
};

/* Where 8 k of a row are laid. */
__device__ __forceinline__ uint4* laid(unsigned char* tokens, int row, int piece) {
    return (uint4*)(tokens + piece / 4 * LAID_CHUNK + row / 8 * 512 + (row % 8 * 4 + piece % 4) * 16);
}

/* By a warp: row `row` of the group, to shared memory and, if it is this block's, to u. from null: no such
 * row. An inactive one is zeros; its position comes while its numbers do. cols is a multiple of 8. */
__device__ __forceinline__ void norm_row(const Places& places, int row, const bf16* from, const int* pos,
                                         bf16* to, int cols, float eps) {
    const int pieces = (cols + 31) / 32 * 4, position = from ? *pos : -1;
    float sum = 0.f;
#pragma unroll 8
    for (int piece = lane_index(); piece < pieces; piece += 32) {
        uint4 v{};
        if (from && 8 * piece < cols) v = *(const uint4*)(from + 8 * piece);
        scale_pair(v.x, 1.f, 1.f, sum), scale_pair(v.y, 1.f, 1.f, sum);
        scale_pair(v.z, 1.f, 1.f, sum), scale_pair(v.w, 1.f, 1.f, sum);
        *laid(places.tokens, row, piece) = v;
    }
    const float r = rsqrtf(warp_sum(sum) / cols + eps);
#pragma unroll 4
    for (int piece = lane_index(); piece < pieces; piece += 32) {  // each lane what it wrote itself
        const float4 a = *(const float4*)(places.norm + 8 * piece),
                     b = *(const float4*)(places.norm + 8 * piece + 4);
        uint4* at = laid(places.tokens, row, piece);
        auto both = [r](u32 pair, float low, float high) {
            return pack_bf16(low * (low_f32(pair) * r), high * (high_f32(pair) * r));
        };
        uint4 v = *at;
        v = make_uint4(both(v.x, a.x, a.y), both(v.y, a.z, a.w), both(v.z, b.x, b.y), both(v.w, b.z, b.w));
        if (position < 0) v = make_uint4(0, 0, 0, 0);
        *at = v;
        if (to && 8 * piece < cols) *(uint4*)(to + 8 * piece) = v;
    }
}

/* The weights of chunks first, first + 1, ... of this warp's. */
__device__ __forceinline__ void load_kept(uint4 (&a)[2 * KEPT], const u16* w, int tile, int chunks,
                                          int first) {
    const char* at = (const char*)w + ((size_t)tile * chunks + warp_index() + first * WARPS) * CHUNK_BYTES;
#pragma unroll
    for (int u = 0; u < KEPT; ++u)
        if (warp_index() + (first + u) * WARPS < chunks) {
            a[2 * u] = load_stream(at + u * WARPS * CHUNK_BYTES + 16 * lane_index());
            a[2 * u + 1] = load_stream(at + u * WARPS * CHUNK_BYTES + CHUNK_BYTES / 2 + 16 * lane_index());
        }
}

__device__ __forceinline__ void multiply_kept(float (&acc)[TOKEN_TILES][4], const uint4 (&a)[2 * KEPT],
                                              const unsigned char* tokens, int chunks, int first) {
#pragma unroll
    for (int u = 0; u < KEPT; ++u) {
        const int chunk = warp_index() + (first + u) * WARPS;
        if (chunk >= chunks) break;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 b = *(const uint4*)(tokens + chunk * LAID_CHUNK + 512 * n + 16 * lane_index());
            mma_bf16(acc[n], a[2 * u], b.x, b.y);
            mma_bf16(acc[n], a[2 * u + 1], b.z, b.w);
        }
    }
}

/* Sums of the warps, plus bias, to the first block: a thread four experts of a row. */
__device__ __forceinline__ void send_logits(const Places& places, int tile, int group, int tiles,
                                            u64* arrived) {
    for (int i = threadIdx.x; i < 4 * MOST_ROWS; i += ROUTE_THREADS) {
        const int row = i / 4, quarter = i % 4;
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int lane = (4 * quarter + j) % 8 * 4 + row % 8 / 2, unit = 2 * (row / 8) + row % 2;
            const float* from = (const float*)(places.sums + unit * 32 + lane) + quarter / 2;
            float sum = from[0];
#pragma unroll
            for (int warp = 1; warp < WARPS; ++warp) sum += from[warp * UNITS * 64];
            v[j] = sum + places.bias[16 * tile + 4 * quarter + j];
        }
        float* to = places.logits + (group + row) * 16 * tiles + 16 * tile + 4 * quarter;
        store_async(cluster_address(to, 0), make_float4(v[0], v[1], v[2], v[3]), cluster_address(arrived, 0));
    }
}

/* The groups of one cluster's rows, from rows_of. By the block. */
__device__ __forceinline__ void make_groups(const Places& places, int* first, int* order, int* touched,
                                            int rows, int E, int U) {
    __syncthreads();  // all rows have chosen
    if (warp_index() == 0) {
        const int lane = lane_index(), each = (E + 31) / 32, begin = min(E, lane * each),
                  end = min(E, begin + each);
        int pairs = 0, active = 0;
        for (int e = begin; e < end; ++e)
            pairs += __popc(places.rows_of[e]), active += places.rows_of[e] != 0;
        int upto = pairs;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, upto, step);
            if (lane >= step) upto += other;
            active += __shfl_xor_sync(FULL_WARP, active, step);
        }
        int at = upto - pairs;
        for (int e = begin; e < end; ++e) {
            places.starts[e] = first[e] = at;
            at += __popc(places.rows_of[e]);
        }
        if (lane == 31) first[E] = places.starts[E] = upto;
        if (lane == 0) *touched += active;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < rows * U; r += ROUTE_THREADS) {
        const int e = places.chosen[r];
        if (e >= 0) order[places.starts[e] + __popc(places.rows_of[e] & ((1u << r / U) - 1))] = r;
        if (r >= places.starts[E]) order[r] = -1;
    }
}

/* first null: groups are another kernel's. */
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, 1)
    route_fast(const u16* w, const bf16* x, const float* norm, const float* bias, const int* pos, bf16* u,
               int* expert, float* share, int* first, int* order, int* touched, float eps, int normalise,
               int rows, int E, int U, int cols, int each) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 arrived;
    const int rank = cluster_rank(), blocks = cluster_size(), tiles = (E + 15) / 16,
              chunks = (cols + 31) / 32;
    const int begin = blockIdx.x / blocks * each, count = min(each, rows - begin);
    const int groups = (count + MOST_ROWS - 1) / MOST_ROWS;
    const Places places(dynamic, tiles, chunks);
    uint4 a[2 * KEPT];
    if (rank < tiles) load_kept(a, w, rank, chunks, 0);
    for (int k = threadIdx.x; k < 32 * chunks; k += ROUTE_THREADS) places.norm[k] = k < cols ? norm[k] : 0.f;
    for (int e = threadIdx.x; e < 16 * tiles; e += ROUTE_THREADS)
        places.rows_of[e] = 0, places.bias[e] = bias && e < E ? bias[e] : 0.f;
    if (threadIdx.x == 0) {
        mbarrier_init(&arrived, 1);
        mbarrier_fence_init();
    }
    griddep_launch();
    __syncthreads();
    if (rank == 0 && threadIdx.x == 0) mbarrier_arrive_expect(&arrived, groups * tiles * MOST_ROWS * 64);
    cluster_arrive_relaxed();
    cluster_wait();  // the first block's barrier is there
    griddep_wait();
    for (int group = 0; group < count; group += MOST_ROWS) {
        for (int row = warp_index(); row < MOST_ROWS; row += WARPS) {
            const int t = begin + group + row;
            const bool is_row = group + row < count;
            norm_row(places, row, is_row ? x + (size_t)t * cols : nullptr, pos + t,
                     is_row && t % blocks == rank ? u + (size_t)t * cols : nullptr, cols, eps);
        }
        __syncthreads();
        for (int tile = rank; tile < tiles; tile += blocks) {
            float acc[TOKEN_TILES][4] = {};
            for (int k = 0; k * WARPS < chunks; k += KEPT) {
                if (group > 0 || tile != rank || k > 0) load_kept(a, w, tile, chunks, k);
                multiply_kept(acc, a, places.tokens, chunks, k);
            }
            float2* to = places.sums + warp_index() * UNITS * 32 + lane_index();
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                to[64 * n] = make_float2(acc[n][0], acc[n][2]);
                to[64 * n + 32] = make_float2(acc[n][1], acc[n][3]);
            }
            __syncthreads();
            send_logits(places, tile, group, tiles, &arrived);
            __syncthreads();  // sums and tokens have been read
        }
    }
    if (rank > 0) return;
    mbarrier_wait_cluster(&arrived, 0);
    __syncwarp();
    for (int row = warp_index(); row < count; row += WARPS) {
        const int t = begin + row, lane = lane_index();
        Choice choice{-1, 0.f};
        if (pos[t] >= 0) choice = choose(places.logits + row * 16 * tiles, E, U, normalise);
        if (lane >= U) continue;
        expert[(size_t)t * U + lane] = choice.id, share[(size_t)t * U + lane] = choice.share;
        places.chosen[row * U + lane] = choice.id;
        if (choice.id >= 0) atomicOr(places.rows_of + choice.id, 1u << row);
    }
    if (first) make_groups(places, first, order, touched, count, E, U);
}
