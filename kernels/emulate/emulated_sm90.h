/* The wrappers of sm90.cuh as C++ on fibers: same names, same alignment rules, refused where the device
 * traps. */
#pragma once

namespace emulate {
inline void aligned(const void* pointer, unsigned bytes, const char* what) {
    if ((uintptr_t)pointer % bytes) fail("%s: address %p is not a multiple of %u", what, pointer, bytes);
}
}  // namespace emulate

inline u32 shared_address(const void* pointer) { return (u32)((const char*)pointer - emulate_self->shared); }

template <bool LeavesFirst = true>
uint4 load_stream(const void* global) {
    emulate::aligned(global, 16, "load_stream");
    return *(const uint4*)global;
}

inline u32 load_stream_4(const void* global) {
    emulate::aligned(global, 4, "load_stream_4");
    return *(const u32*)global;
}

inline void prefetch_l2(const void*) {}

template <int Half>
u32 mul_bf16_by(u32 a, u32 pair) {
    const float by = __uint_as_float(Half ? pair & 0xffff0000u : pair << 16);
    return pack_bf16(__uint_as_float(a << 16) * by, __uint_as_float(a & 0xffff0000u) * by);
}

inline u32 permute_bytes(u32 low, u32 high, u32 which) {
    u64 all = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(all >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

inline void mma_bf16(float (&d)[4], const uint4& a, u32 b0, u32 b1, EMULATE_SITE) {
    emulate::Mma mine{{a.x, a.y, a.z, a.w}, {b0, b1}, d};
    emulate::warp_meet(FULL_WARP, "mma_bf16", &mine, emulate::mma_bf16, site);
}

namespace emulate {
template <int Matrices, bool IsTransposed>
struct Ldmatrix {
    const u16* row;
    u32 result[Matrices];

    static void complete(void* const* operands, unsigned lanes) {
        if (lanes != FULL_WARP) fail("ldmatrix needs all 32 lanes");
        for (int m = 0; m < Matrices; ++m) {
            const u16* rows[8];
            for (int r = 0; r < 8; ++r) {
                rows[r] = static_cast<Ldmatrix*>(operands[8 * m + r])->row;
                aligned(rows[r], 16, "ldmatrix");
            }
            for (int lane = 0; lane < 32; ++lane) {
                int i = lane / 4, j = 2 * (lane % 4);
                u32 low = IsTransposed ? rows[j][i] : rows[i][j];
                u32 high = IsTransposed ? rows[j + 1][i] : rows[i][j + 1];
                static_cast<Ldmatrix*>(operands[lane])->result[m] = high << 16 | low;
            }
        }
    }

    Ldmatrix(const void* shared_row, Site site) : row((const u16*)shared_row), result{} {
        warp_meet(FULL_WARP, "ldmatrix", this, complete, site);
    }
};
}  // namespace emulate

inline uint4 ldmatrix_x4(const void* shared_row, EMULATE_SITE) {
    emulate::Ldmatrix<4, false> m(shared_row, site);
    return {m.result[0], m.result[1], m.result[2], m.result[3]};
}
inline uint4 ldmatrix_x4_trans(const void* shared_row, EMULATE_SITE) {
    emulate::Ldmatrix<4, true> m(shared_row, site);
    return {m.result[0], m.result[1], m.result[2], m.result[3]};
}
inline uint2 ldmatrix_x2(const void* shared_row, EMULATE_SITE) {
    emulate::Ldmatrix<2, false> m(shared_row, site);
    return {m.result[0], m.result[1]};
}
inline uint2 ldmatrix_x2_trans(const void* shared_row, EMULATE_SITE) {
    emulate::Ldmatrix<2, true> m(shared_row, site);
    return {m.result[0], m.result[1]};
}

inline void cp_async_16_or_zero(void* shared, const void* global, bool is_valid) {
    emulate::aligned(shared, 16, "cp_async_16, shared side");
    emulate::aligned(global, 16, "cp_async_16, global side");
    emulate::async_copy(shared, global, 16, is_valid ? 16 : 0);
}
inline void cp_async_16(void* shared, const void* global) { cp_async_16_or_zero(shared, global, true); }
inline void cp_async_commit() { emulate::async_commit(); }
template <int Left>
void cp_async_wait() {
    emulate::async_wait(Left);
}

inline void mbarrier_init(u64* barrier, u32 arrivals) {
    emulate::mbarrier_init((uint64_t*)barrier, arrivals);
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(u64* barrier, EMULATE_SITE) {
    emulate::mbarrier_arrive((uint64_t*)barrier, 0, site);
}
inline void mbarrier_arrive_expect(u64* barrier, u32 bytes, EMULATE_SITE) {
    emulate::mbarrier_arrive((uint64_t*)barrier, bytes, site);
}
inline void mbarrier_arrive_at(u32 barrier, EMULATE_SITE) {
    char* own = emulate_self->shared + (barrier & 0xffffff);
    emulate::mbarrier_arrive((uint64_t*)emulate::cluster_map(own, barrier >> 24), 0, site);
}
inline bool mbarrier_try_wait(u64* barrier, u32 parity, EMULATE_SITE) {
    return emulate::mbarrier_test((uint64_t*)barrier, parity, site);
}
inline u32 cluster_address(const void* shared, u32 rank) { return rank << 24 | shared_address(shared); }
template <class Vector>  // float2, float4
void store_async(u32 to, const Vector& v, u32 barrier, EMULATE_SITE) {
    if (to >> 24 != barrier >> 24) emulate::fail("store_async: the barrier is another block's");
    char* own = emulate_self->shared + (to & 0xffffff);
    emulate::aligned(own, sizeof v, "store_async");
    emulate::remote_store(own, &v, sizeof v, (uint64_t*)(emulate_self->shared + (barrier & 0xffffff)),
                          to >> 24, site);
}
inline bool mbarrier_try_wait_cluster(u64* barrier, u32 parity, EMULATE_SITE) {
    return emulate::mbarrier_test((uint64_t*)barrier, parity, site);
}
template <class T>
T* kept_shared(T* pointer) {
    return pointer;
}

inline bool elect_one() { return lane_index() == 0; }

inline void check_bulk(const void* shared, const void* global, u32 bytes) {
    emulate::aligned(shared, 16, "bulk_load, shared side");
    emulate::aligned(global, 16, "bulk_load, global side");
    if (bytes % 16) emulate::fail("bulk_load: %u bytes is not a multiple of 16", bytes);
}
inline void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier, EMULATE_SITE) {
    check_bulk(shared, global, bytes);
    emulate::bulk_copy(shared, global, bytes, (uint64_t*)barrier, site);
}
inline void bulk_load_as(u64, void* shared, const void* global, u32 bytes, u64* barrier, EMULATE_SITE) {
    bulk_load(shared, global, bytes, barrier, site);
}
template <int Blocks>
void bulk_load_to_all(u64, void* shared, const void* global, u32 bytes, u64* barrier, EMULATE_SITE) {
    check_bulk(shared, global, bytes);
    emulate::bulk_copy_to_all(shared, global, bytes, (uint64_t*)barrier, Blocks, site);
}
inline void fence_async_shared() {}

inline void named_barrier_sync(int id, int threads, EMULATE_SITE) {
    emulate::block_barrier(id, threads, true, "named_barrier_sync", site);
}
inline void named_barrier_arrive(int id, int threads, EMULATE_SITE) {
    emulate::block_barrier(id, threads, false, "named_barrier_arrive", site);
}

inline void griddep_wait(EMULATE_SITE) { emulate::griddep_wait(site); }
inline void griddep_launch() { emulate::griddep_launch(); }

inline u32 cluster_rank() { return emulate::cluster_rank(); }
inline u32 cluster_size() { return emulate_grid.cluster; }
inline void cluster_arrive(EMULATE_SITE) { emulate::cluster_arrive(site); }
inline void cluster_arrive_relaxed(EMULATE_SITE) { emulate::cluster_arrive(site); }
inline void cluster_wait(EMULATE_SITE) { emulate::cluster_wait(site); }
template <class T>
T* map_shared(T* shared, u32 rank) {
    return (T*)emulate::cluster_map(shared, rank);
}
