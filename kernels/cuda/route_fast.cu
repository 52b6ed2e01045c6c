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

#include "route.cuh"

#ifndef KEPT_CHUNKS
#define KEPT_CHUNKS 4  // of a warp, in registers
#endif

constexpr int KEPT = KEPT_CHUNKS;
constexpr int MOST_EACH = 32;                 // rows of a cluster: a word has a bit for each
constexpr int LAID_CHUNK = TOKEN_CHUNK + 64;  // bytes: rows are laid without bank conflicts
constexpr int AT_ONCE = 4;                    // parts of a row's squares that are asked for at once
static_assert(MOST_ROWS <= WARPS && WARPS == PARTS, "a warp or more for each row");

/* In shared memory. */
struct Groups {
    u32* rows_of;          // [E]: which rows chose an expert
    int *starts, *chosen;  // [E + 1]; [MOST_EACH * 32]

    /* Where the groups of one cluster's rows begin. By a warp. */
    __device__ __forceinline__ void begin(int* first, int* touched, int E) const {
        const int lane = lane_index(), each = (E + 31) / 32, from = min(E, lane * each),
                  end = min(E, from + each);
        int pairs = 0, active = 0;
        for (int e = from; e < end; ++e) pairs += __popc(rows_of[e]), active += rows_of[e] != 0;
        int upto = pairs;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, upto, step);
            if (lane >= step) upto += other;
            active += __shfl_xor_sync(FULL_WARP, active, step);
        }
        int at = upto - pairs;
        for (int e = from; e < end; ++e) {
            starts[e] = first[e] = at;
            at += __popc(rows_of[e]);
        }
        if (lane == 31) first[E] = starts[E] = upto;
        if (lane == 0) atomicAdd(touched, active);
    }

    /* Their pairs. By the block. */
    __device__ __forceinline__ void fill(int* order, int rows, int E, int U) const {
        for (int r = threadIdx.x; r < rows * U; r += ROUTE_THREADS) {
            const int e = chosen[r];
            if (e >= 0) order[starts[e] + __popc(rows_of[e] & ((1u << r / U) - 1))] = r;
            if (r >= starts[E]) order[r] = -1;
        }
    }
};

/* Experts, groups and shares of rows begin .. begin + count - 1, by a block, a warp every so-manyth row.
 * logits: (count, stride). positions: of a warp's rows. */
template <int Each>
__device__ __forceinline__ void choose_and_group(const Groups& groups, const float* logits, int stride,
                                                 const int (&positions)[Each], int begin, int count, int E,
                                                 int U, bool normalise, const Routed& to) {
    const int lane = lane_index();
    Choice choice[Each];
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        const int row = warp_index() + i * WARPS;
        if (row >= count) break;
        choice[i] = Choice{-1, 0.f, 0.f};
        if (positions[i] >= 0) choice[i] = choose(logits + row * stride, E, U);
        if (lane >= U) continue;
        groups.chosen[row * U + lane] = choice[i].id;
        if (choice[i].id >= 0) atomicOr(groups.rows_of + choice[i].id, 1u << row);
    }
    __syncthreads();  // all rows have chosen
    if (to.first && warp_index() == WARPS - 1) groups.begin(to.first, to.touched, E);
#pragma unroll
    for (int i = 0; i < Each; ++i) {  // shares, which are late in use, meanwhile
        const int row = warp_index() + i * WARPS;
        if (row >= count) break;
        to.keep(begin + row, choice[i], positions[i] >= 0, logits + row * stride, E, U, normalise);
    }
    __syncthreads();
    if (to.first) groups.fill(to.order, count, E, U);
}

struct Places {
    float2* sums;    // [WARPS][UNITS][32]
    float* squares;  // [WARPS][32], before the sums
    float* logits;   // [MOST_EACH][16 * tiles]
    Groups groups;
    float* norm;            // [chunks * 32]
    float* bias;            // [16 * tiles]
    float* u_norm;          // [chunks * 32] where U_NORM
    unsigned char* tokens;  // [chunks] LAID_CHUNK

    __device__ __forceinline__ Places(unsigned char* dynamic, int tiles, int chunks) {
        sums = (float2*)dynamic, squares = (float*)dynamic;
        logits = (float*)(sums + WARPS * UNITS * 32);
        groups.rows_of = (u32*)(logits + MOST_EACH * 16 * tiles);
        groups.starts = (int*)(groups.rows_of + 16 * tiles);
        groups.chosen = groups.starts + 16 * tiles + 16;
        norm = (float*)(groups.chosen + MOST_EACH * 32);
        bias = norm + 32 * chunks;
        u_norm = bias + 16 * tiles;
        tokens = (unsigned char*)(u_norm + (U_NORM ? 32 * chunks : 0));
    }
};

/* Where 8 k of a row are laid. */
__device__ __forceinline__ uint4* laid(unsigned char* tokens, int row, int piece) {
    return (uint4*)(tokens + piece / 4 * LAID_CHUNK + row / 8 * 512 + (row % 8 * 4 + piece % 4) * 16);
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
        places.groups.rows_of[e] = 0, places.bias[e] = bias && e < E ? bias[e] : 0.f;
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
    const Routed routed{expert, share, first, order, touched, expert_scale};
    choose_and_group(places.groups, places.logits, 16 * tiles, position, begin, count, E, U, normalise,
                     routed);
}
