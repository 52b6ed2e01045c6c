/* One wrapper an instruction, for sm_90 and newer; the only PTX besides common.cuh and sm100.cuh.
 * Under MINIDFLASH_EMULATE the same names are C++ on fibers (kernels/emulate/emulated_sm90.h).
 * Shared-memory pointers are plain generic pointers here; the wrappers narrow them. */
#pragma once
#include "common.cuh"

/* What createpolicy.fractional.L2::evict_first makes for all of an access: lines that are read once leave L2
 * before those of instructions, keys and activations do. */
constexpr u64 READ_ONCE = 0x12f0000000000000;
constexpr u64 READ_AGAIN = 0x1000000000000000;  // evict_normal's

#ifdef MINIDFLASH_EMULATE
#include "emulated_sm90.h"
#else

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

/* The same pointer, whose address stays in a register: else it is worked out anew in each turn of a loop. */
template <class T>
__device__ __forceinline__ T* kept_shared(T* pointer) {
    u32 address = shared_address(pointer);
    asm volatile("" : "+r"(address));
    return (T*)__cvta_shared_to_generic(address);
}

// ---- loads ----

/* 16 bytes that are read once: keep them out of L1, fetch 256-byte sectors of L2, and let them go there first
 * (LeavesFirst). For memory that nobody writes while this kernel runs: weights, but not what a predecessor of
 * a dependent launch writes. */
template <bool LeavesFirst = true>
__device__ __forceinline__ uint4 load_stream(const void* global) {
    uint4 v;
    if constexpr (LeavesFirst)
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(global), "l"(READ_ONCE));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(global));
    return v;
}

/* The same of 4 bytes. */
__device__ __forceinline__ u32 load_stream_4(const void* global) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(global), "l"(READ_ONCE));
    return v;
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- two bf16 of a word, and its bytes ----

/* Both times one number, the lower of `pair` (Half 0) or the upper. Each product is rounded once; subnormals
 * are numbers. */
template <int Half>
__device__ __forceinline__ u32 mul_bf16_by(u32 a, u32 pair) {
    u32 product;
    if (Half == 0)
        asm("{\n .reg .b16 low, high;\n .reg .b32 twice;\n mov.b32 {low, high}, %2;\n"
            " mov.b32 twice, {low, low};\n mul.rn.bf16x2 %0, %1, twice;\n}"
            : "=r"(product)
            : "r"(a), "r"(pair));
    else
        asm("{\n .reg .b16 low, high;\n .reg .b32 twice;\n mov.b32 {low, high}, %2;\n"
            " mov.b32 twice, {high, high};\n mul.rn.bf16x2 %0, %1, twice;\n}"
            : "=r"(product)
            : "r"(a), "r"(pair));
    return product;
}

/* Byte i is byte number `which >> 4i & 7` of low (0..3) and high (4..7). */
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 which) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(which));
    return result;
}

// ---- matrix tiles ----

/* d += A * B for a 16 x 16 bf16 A (row major fragments), 16 x 8 bf16 B, f32 d.
 * With g = lane / 4, t = lane % 4: a.x, a.y, a.z, a.w hold rows g, g+8, g, g+8 and k 2t.., 2t.., 2t+8..,
 * 2t+8..; b0, b1 hold k 2t.. and 2t+8.. of column g; d holds (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). */
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* Lanes 8i..8i+7 name the eight 16-byte rows of matrix i; lane l gets elements 2(l%4), +1 of row l/4 of each.
 */
__device__ __forceinline__ uint4 ldmatrix_x4(const void* shared_row) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(shared_address(shared_row))
                 : "memory");
    return r;
}

/* The same with each 8 x 8 matrix transposed: lane l gets rows 2(l%4), +1 of column l/4. */
__device__ __forceinline__ uint4 ldmatrix_x4_trans(const void* shared_row) {
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(shared_address(shared_row))
                 : "memory");
    return r;
}

__device__ __forceinline__ uint2 ldmatrix_x2(const void* shared_row) {
    uint2 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "r"(shared_address(shared_row))
                 : "memory");
    return r;
}

__device__ __forceinline__ uint2 ldmatrix_x2_trans(const void* shared_row) {
    uint2 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "r"(shared_address(shared_row))
                 : "memory");
    return r;
}

// ---- cp.async: 16 bytes a thread, global to shared ----

__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
                 : "memory");
}

/* Zeros instead of memory where `is_valid` is false; the pointer is then not read. */
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(is_valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until at most `Left` of this thread's newest groups are under way; a barrier then shows them to the block.
 */
template <int Left>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// ---- mbarriers and bulk copies ----

/* One thread initialises, then mbarrier_fence_init, then a block barrier; `arrivals` a phase. */
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* The same in another block of the cluster (cluster_address), for what was read, not for what was written. */
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrive, and hold the phase open until `bytes` more have been copied. */
__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* True once the phase of this parity is complete: the first phase has parity 0. */
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

/* The same shared variable in block `rank` of the cluster, for store_async. */
__device__ __forceinline__ u32 cluster_address(const void* shared, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
    return there;
}

/* To another block of the cluster (cluster_address), whose barrier counts the bytes off
 * (mbarrier_arrive_expect there). Unlike a store and an arrival behind it, this waits for nothing. */
__device__ __forceinline__ void store_async(u32 to, const float4& v, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void store_async(u32 to, const float2& v, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "f"(v.x), "f"(v.y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_cluster(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

/* True in one lane of a warp that is together here: copies in such a branch need no loop over lanes. */
__device__ __forceinline__ bool elect_one() {
    u32 is_elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is_elected));
    return is_elected;
}

/* Contiguous memory to shared memory by one thread's order: all 16-byte aligned, bytes a multiple of 16. */
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

/* The same, and how long they stay in L2: READ_ONCE, READ_AGAIN. */
__device__ __forceinline__ void bulk_load_as(u64 policy, void* shared, const void* global, u32 bytes,
                                             u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], "
        "%4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

/* The same to this place in all blocks of a cluster of so many; each one's barrier counts its bytes. */
template <int Blocks>
__device__ __forceinline__ void bulk_load_to_all(u64 policy, void* shared, const void* global, u32 bytes,
                                                 u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4, %5;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"((unsigned short)((1 << Blocks) - 1)),
        "l"(policy)
        : "memory");
}

/* Between plain accesses of shared memory and a bulk copy that follows them there. */
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- barriers of part of a block ----

/* Ids 1..15 (0 is __syncthreads); threads: how many take part, arrivals counted, a multiple of 32. */
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- dependent launch ----

#ifdef STAMPS  // bench/timeline.py: when block 0 of every launch began (0), its wait was over (1), and more
constexpr int STAMP_PHASES = 16;
__device__ u64 stamps[STAMPS][STAMP_PHASES];  // by launch
__device__ u32 stamp_count;                   // launches

/* One lane asks for the launch's number at its first stamp; later ones wait for nothing. */
__device__ __forceinline__ void stamp(int phase) {
    __shared__ u32 launch;
    if (blockIdx.x + blockIdx.y + blockIdx.z > 0 || lane_index() > 0) return;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    if (phase == 0) launch = atomicAdd(&stamp_count, 1u) % STAMPS;
    stamps[launch][phase] = now;
}
#else
__device__ __forceinline__ void stamp(int) {}
#endif

/* Until the kernel before this one in the stream has ended and its writes are visible. In a kernel that calls
 * it, leave `__restrict__` off pointers to what the predecessor writes: with const it would turn their loads
 * into read-only ones, which promise that nobody writes while this kernel runs. */
__device__ __forceinline__ void griddep_wait() {
    if (threadIdx.x < 32) stamp(0);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x < 32) stamp(1);
}

/* The next kernel may start its blocks; it still waits for this one's end before it reads. */
__device__ __forceinline__ void griddep_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/* The same to say no more than "I am here", or that mbarriers are there (mbarrier_fence_init): nothing else
 * that this thread wrote need be seen, so it does not wait for its loads and stores under way. */
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Where the same shared variable lies in block `rank` of the cluster. That block must still be running:
 * end with cluster_sync. */
template <class T>
__device__ __forceinline__ T* map_shared(T* shared, u32 rank) {
    u64 mapped;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(rank));
    return (T*)mapped;
}

#endif

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

__device__ __forceinline__ void mbarrier_wait_cluster(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait_cluster(barrier, parity)) {
    }
}
