/* route_fast: r = n(x) * norm, rounded once; of W r + bias each row's experts and shares; the groups. u is r,
 *         or n(x) * u_norm where U_NORM; a share is times its expert's scale where EXPERT_SCALE.
 * Grid:   a cluster for `each` rows, a block of it for every so-manyth row tile of W. All blocks norm the
 *         rows; logits meet in the first block's shared memory, which chooses and, where there is one
 *         cluster, makes the groups (route.cu's group otherwise). W is asked for before the wait, as much of
 *         it as registers hold.
 * Moves:  E*D*2 bytes; bound by latency.
 * Bits:   a logit's sum runs over a warp's chunks, then warps, each ascending.
 * Truth:  oracle_moe.py route. */
#ifndef STREAM_WARPS
#define STREAM_WARPS 16  // a warp or more for each row
#endif

#include "choose.cuh"
#include "skinny_tokens.cuh"

#ifndef KEPT_CHUNKS
#define KEPT_CHUNKS 4  // of a warp, in registers
#endif

#ifndef U_NORM
#define U_NORM 0
#endif
#ifndef EXPERT_SCALE
#define EXPERT_SCALE 0
#endif

constexpr int KEPT = KEPT_CHUNKS, ROUTE_THREADS = 32 * WARPS;
constexpr int LAID_CHUNK = TOKEN_CHUNK + 64;  // bytes: rows are laid without bank conflicts
constexpr int MOST_EACH = 32;                 // rows of a cluster: a word has a bit for each
constexpr int PARTS = 16, AT_ONCE = 4;        // of a row's squares; that are asked for at once
static_assert(MOST_ROWS <= WARPS && WARPS == PARTS, "a warp or more for each row");

struct Places {
    float2* sums;           // [WARPS][UNITS][32]
    float* squares;         // [WARPS][32], before the sums
    float* logits;          // [MOST_EACH][16 * tiles]
    u32* rows_of;           // [E]: which rows chose an expert
    int *starts, *chosen;   // [E + 1]; [MOST_EACH * 32]
    float* norm;            // [chunks * 32]
    float* bias;            // [16 * tiles]
    float* u_norm;          // [chunks * 32] where U_NORM
    unsigned char* tokens;  // [chunks] LAID_CHUNK

    __device__ __forceinline__ Places(unsigned char* dynamic, int tiles, int chunks) {
        sums = (float2*)dynamic, squares = (float*)dynamic;
        logits = (float*)(sums + WARPS * UNITS * 32);
        rows_of = (u32*)(logits + MOST_EACH * 16 * tiles);
        starts = (int*)(rows_of + 16 * tiles);
        chosen = starts + 16 * tiles + 16;
        norm = (float*)(chosen + MOST_EACH * 32);
        bias = norm + 32 * chunks;
        u_norm = bias + 16 * tiles;
        tokens = (unsigned char*)(u_norm + (U_NORM ? 32 * chunks : 0));
    }
};

/* Where 8 k of a row are laid. */
__device__ __forceinline__ uint4* laid(unsigned char* tokens, int row, int piece) {
    return (uint4*)(tokens + piece / 4 * LAID_CHUNK + row / 8 * 512 + (row % 8 * 4 + piece % 4) * 16);
}

/* Parts 0 and 1, 2 and 3, ..., then pairs of them, ... */
template <int Parts>
__device__ __forceinline__ float folded(const float (&sums)[Parts]) {
    if constexpr (Parts == 1) {
        return sums[0];
    } else {
        float half[Parts / 2];
#pragma unroll
        for (int i = 0; i < Parts / 2; ++i) half[i] = sums[2 * i] + sums[2 * i + 1];
        return folded(half);
    }
}

/* A row of the group as warps make it that have 1 << bits parts each, of which this is number `mine`: to
 * shared memory and, if it is this block's, to u. cols is a multiple of 8. Squares are added up 8 numbers a
 * lane, then by a tree over PARTS and one over lanes: the same one however many warps there are. */
struct NormRow {
    const Places& places;
    const bf16* from;
    bf16* to;  // or null
    int row, bits, mine, cols, position;

    __device__ __forceinline__ int pieces() const { return (cols + 31) / 32 * 4; }

    __device__ __forceinline__ bool has(int part) const { return part >> bits == mine; }

    /* Its squares of this warp's parts, a lane's; many numbers are asked for at once. */
    __device__ __forceinline__ float bring() const {
        float sums[PARTS] = {};
        for (int first = lane_index(); first < pieces(); first += 32 * PARTS)
#pragma unroll
            for (int begin = 0; begin < PARTS; begin += AT_ONCE) {
                uint4 v[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int piece = first + 32 * (begin + i);
                    v[i] = uint4{};
                    if (has(begin + i) && 8 * piece < cols) v[i] = *(const uint4*)(from + 8 * piece);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int piece = first + 32 * (begin + i);
                    float& sum = sums[begin + i];
                    if (!has(begin + i) || piece >= pieces()) continue;
                    *laid(places.tokens, row, piece) = v[i];
                    scale_pair(v[i].x, 1.f, 1.f, sum), scale_pair(v[i].y, 1.f, 1.f, sum);
                    scale_pair(v[i].z, 1.f, 1.f, sum), scale_pair(v[i].w, 1.f, 1.f, sum);
                }
            }
        return folded(sums);  // a part that is another warp's is 0
    }

    /* With what all warps of the row brought. An inactive row is zeros. */
    __device__ __forceinline__ void scale(float eps) const {
        float sums[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            sums[part] = part < PARTS >> bits
                             ? places.squares[32 * ((row * PARTS >> bits) + part) + lane_index()]
                             : 0.f;
        const float r = rsqrtf(warp_sum(folded(sums)) / cols + eps);
        auto both = [r](u32 pair, float low, float high) {
            return pack_bf16(low * (low_f32(pair) * r), high * (high_f32(pair) * r));
        };
        auto times = [&](const uint4& v, const float* scales) {
            const float4 a = *(const float4*)scales, b = *(const float4*)(scales + 4);
            return make_uint4(both(v.x, a.x, a.y), both(v.y, a.z, a.w), both(v.z, b.x, b.y),
                              both(v.w, b.z, b.w));
        };
        for (int first = lane_index(); first < pieces(); first += 32 * PARTS)
#pragma unroll 4
            for (int part = mine << bits; has(part); ++part) {
                const int piece = first + 32 * part;
                if (piece >= pieces()) break;
                uint4* at = laid(places.tokens, row, piece);  // what this lane wrote itself
                const uint4 raw = *at;
                uint4 v = times(raw, places.norm + 8 * piece);
                if (position < 0) v = make_uint4(0, 0, 0, 0);
                *at = v;
                if (!to || 8 * piece >= cols) continue;
                if (U_NORM && position >= 0) v = times(raw, places.u_norm + 8 * piece);
                *(uint4*)(to + 8 * piece) = v;
            }
    }
};

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

/* Sums of the warps, plus bias, to the first block: a thread an expert of a row, four of them a store. */
__device__ __forceinline__ void send_logits(const Places& places, int tile, int group, int tiles,
                                            u64* arrived) {
    for (int i = threadIdx.x; i < 16 * MOST_ROWS; i += ROUTE_THREADS) {
        const int row = i / 16, e = i % 16;
        const int lane = e % 8 * 4 + row % 8 / 2, unit = 2 * (row / 8) + row % 2;
        const float* from = (const float*)(places.sums + unit * 32 + lane) + e / 8;
        float v = from[0];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) v += from[warp * UNITS * 64];
        v += places.bias[16 * tile + e];
        const float4 four = make_float4(v, __shfl_down_sync(FULL_WARP, v, 1),
                                        __shfl_down_sync(FULL_WARP, v, 2), __shfl_down_sync(FULL_WARP, v, 3));
        if (e % 4) continue;
        float* to = places.logits + (group + row) * 16 * tiles + 16 * tile + e;
        store_async(cluster_address(to, 0), four, cluster_address(arrived, 0));
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
        if (lane == 0) atomicAdd(touched, active);
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
    route_fast(const u16* w, const bf16* x, const float* norm, const float* u_norm, const float* bias,
               const float* expert_scale, const int* pos, bf16* u, int* expert, float* share, int* first,
               int* order, int* touched, float eps, int normalise, int rows, int E, int U, int cols,
               int each) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 arrived;
    const int rank = cluster_rank(), blocks = cluster_size(), tiles = (E + 15) / 16,
              chunks = (cols + 31) / 32;
    const int begin = blockIdx.x / blocks * each, count = min(each, rows - begin);
    const int groups = (count + MOST_ROWS - 1) / MOST_ROWS;
    const Places places(dynamic, tiles, chunks);
    uint4 a[2 * KEPT];
    if (rank < tiles) load_kept(a, w, rank, chunks, 0);
    for (int k = threadIdx.x; k < 32 * chunks; k += ROUTE_THREADS) {
        places.norm[k] = k < cols ? norm[k] : 0.f;
        if (U_NORM) places.u_norm[k] = k < cols ? u_norm[k] : 0.f;
    }
    for (int i = threadIdx.x; i < chunks * LAID_CHUNK / 16; i += ROUTE_THREADS)
        ((uint4*)places.tokens)[i] = uint4{};  // rows that are not there
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
        const int here = min(MOST_ROWS, count - group);
        int bits = 0;  // as many warps a row as there are
        while (here * PARTS >> bits > WARPS) ++bits;
        const int row = warp_index() << bits >> 4, t = begin + group + row;
        const bool is_row = row < here;
        const NormRow made{places,
                           x + (size_t)t * cols,
                           t % blocks == rank ? u + (size_t)t * cols : nullptr,
                           row,
                           bits,
                           warp_index() & (PARTS >> bits) - 1,
                           cols,
                           is_row ? pos[t] : -1};
        if (is_row) places.squares[threadIdx.x] = made.bring();
        __syncthreads();
        if (is_row) made.scale(eps);
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
    int position[MOST_EACH / WARPS];
#pragma unroll
    for (int i = 0; i < MOST_EACH / WARPS; ++i) {
        const int row = warp_index() + i * WARPS;
        position[i] = row < count ? pos[begin + row] : -1;
    }
    mbarrier_wait_cluster(&arrived, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MOST_EACH / WARPS; ++i) {
        const int row = warp_index() + i * WARPS, t = begin + row, lane = lane_index();
        if (row >= count) break;
        Choice choice{-1, 0.f};
        if (position[i] >= 0) choice = choose(places.logits + row * 16 * tiles, E, U, normalise);
        if (lane >= U) continue;
        if (EXPERT_SCALE && choice.id >= 0) choice.share *= expert_scale[choice.id];
        expert[(size_t)t * U + lane] = choice.id, share[(size_t)t * U + lane] = choice.share;
        places.chosen[row * U + lane] = choice.id;
        if (choice.id >= 0) atomicOr(places.rows_of + choice.id, 1u << row);
    }
    if (first) make_groups(places, first, order, touched, count, E, U);
}
