/* One wrapper an instruction, for sm_90a only: products of a warpgroup (four warps, the first a multiple of
 * 4). Asynchronous: between wgmma and the wgmma_wait that covers its group nobody touches d, a or what b
 * names. Under MINIDFLASH_EMULATE the same names are C++ on fibers (kernels/emulate/emulated_wgmma.h). */
#pragma once
#include "sm90.cuh"

/* A matrix in shared memory, columns of 64 k (128 bytes) one after the other, 8 of them 1024 bytes, aligned
 * to that; their 16-byte units are permuted: unit u of column c lies at u ^ c % 8 (128-byte swizzle). The
 * address of a later k is that many bytes on: of the 64 k, only the first 16 bytes of 16 k may be named. */
__device__ __forceinline__ u64 wgmma_columns(const void* shared) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_COLUMNS = (u64)(1024 >> 4) << 32, UNUSED = 1ull << 16;
    return (shared_address(shared) & 0x3ffff) >> 4 | UNUSED | EIGHT_COLUMNS | SWIZZLE_128;
}

#ifdef MINIDFLASH_EMULATE
#include "emulated_wgmma.h"
#elif defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma is sm_90a's alone"
#else

/* Before the first wgmma, and between writes of its registers and a wgmma. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/* What is computed of d so far is computed before what follows: else it may come between the fence and the
 * wgmma, which the compiler mends with a fence of its own, one for each. */
template <int Tiles>
__device__ __forceinline__ void wgmma_pin(float (&d)[Tiles][4]) {
#pragma unroll
    for (int n = 0; n < Tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[n][e])::"memory");
}

template <int Count>
__device__ __forceinline__ void wgmma_pin(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most `Left` of the newest groups are under way. */
template <int Left>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

#define EIGHT(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define THIRTY_TWO(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)
#define D0                                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D32                                                                                                \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D64                                                                                                \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D96                                                                                              \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
    "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* d += A * B: 64 x 16 bf16 A, 16 x n bf16 B with n = twice the size of d, f32 d. Warp w of the warpgroup has
 * rows 16w .. 16w+15 of A and d, each as in mma_bf16: d[4i..4i+3] are columns 8i .. 8i+7. b: wgmma_columns.
 * is_upon: false: d = A * B. */
__device__ __forceinline__ void wgmma(float (&d)[32], const uint4& a, u64 b, bool is_upon = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" D0
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : THIRTY_TWO(0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)is_upon));
}

__device__ __forceinline__ void wgmma(float (&d)[64], const uint4& a, u64 b, bool is_upon = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" D0
        ", " D32 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : THIRTY_TWO(0), THIRTY_TWO(32)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)is_upon));
}

__device__ __forceinline__ void wgmma(float (&d)[128], const uint4& a, u64 b, bool is_upon = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{" D0 ", " D32 ", " D64 ", " D96 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n}"
        : THIRTY_TWO(0), THIRTY_TWO(32), THIRTY_TWO(64), THIRTY_TWO(96)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)is_upon));
}

#define TWO_TILES(i)                                                                                  \
    "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), \
        "+f"(d[i + 1][2]), "+f"(d[i + 1][3])
#define FOUR_TILES(i) TWO_TILES(i), TWO_TILES(i + 2)

/* The same with A in shared memory too, a: wgmma_columns of its 64 rows. d[i] are columns 8i .. 8i+7. */
__device__ __forceinline__ void wgmma(float (&d)[18][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {" D0 ", " D32
                 ", %64, %65, %66, %67, %68, %69, %70, %71}, %72, %73, 1, 1, 1, 0, 0;"
                 : FOUR_TILES(0), FOUR_TILES(4), FOUR_TILES(8), FOUR_TILES(12), TWO_TILES(16)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[6][4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
        "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, 1, 1, 1, 0, 0;"
        : FOUR_TILES(0), TWO_TILES(4)
        : "l"(a), "l"(b));
}

/* The same with A in registers, and B turned: k by k, a row of 64 columns (128 bytes) a k, in wgmma_columns's
 * order. */
__device__ __forceinline__ void wgmma_turned(float (&d)[8][4], const uint4& a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" D0
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : FOUR_TILES(0), FOUR_TILES(4)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

#undef FOUR_TILES
#undef TWO_TILES
#undef EIGHT
#undef THIRTY_TWO
#undef D0
#undef D32
#undef D64
#undef D96

/* The four warps of a warpgroup give registers back, or wait for that many; a multiple of 8, 24 to 256. */
template <int Count>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
#endif
