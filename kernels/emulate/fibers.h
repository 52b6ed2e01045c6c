/* The emulator's runtime as kernels see it: who am I, wait for others, give others a turn, fail.
 * One launch at a time runs on one host thread, so plain memory operations are atomic between switches. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <source_location>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#pragma GCC visibility push(default)  // kernels are built with hidden visibility
namespace emulate {

/* Where in the source a thread waits; a default argument of the wrappers, so that it is their caller's place.
 */
struct Site {
    const char* file = nullptr;
    int line = 0;
    Site() = default;
    Site(std::source_location place) : file(place.file_name()), line(place.line()) {}
};
#define EMULATE_SITE std::source_location site = std::source_location::current()

struct Block;
struct Warp;

/* What a running thread can read without a call. */
struct Thread {
    uint3 thread;
    uint3 block_index;
    unsigned lane;
    Warp* warp;
    Block* block;
    char* shared;  // this block's static, then dynamic shared memory
};

struct Grid {
    dim3 grid, block;
    unsigned cluster;
};

}  // namespace emulate

extern "C" {
extern emulate::Thread* emulate_self;
extern emulate::Grid emulate_grid;
}

namespace emulate {

/* Completes a warp-wide operation: operands[lane] of every lane of `lanes`, all of which wait meanwhile. */
using Complete = void (*)(void* const* operands, unsigned lanes);

/* Meet the lanes of `mask` in the operation named `what`; the last to come runs `complete` for all. */
void warp_meet(unsigned mask, const char* what, void* operand, Complete complete, Site site);

/* Barrier `id` of the block. count: threads that take part, 0 = all. is_waiting false: arrive and go on. */
void block_barrier(int id, unsigned count, bool is_waiting, const char* what, Site site);

/* Barrier 0 of all threads; whether any of them came with a predicate that is not zero. */
int block_any(int predicate, const char* what, Site site);

/* In a loop that polls memory: let the others run. */
void spin(const char* what, Site site);

/* Something others may poll for has changed. */
void progress();

/* What this thread did is known to who acquires the same counter later. */
void counter_release(const void* counter);
void counter_acquire(const void* counter);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/* Copies in flight land only at the wait that makes them visible; until then their target holds NaN bits. */
void async_copy(void* shared, const void* global, unsigned bytes, unsigned valid);
void async_commit();
void async_wait(unsigned left);
void remote_store(void* shared, const void* value, unsigned bytes, uint64_t* barrier, unsigned rank,
                  Site site);
void bulk_copy(void* shared, const void* global, unsigned bytes, uint64_t* barrier, Site site);
void bulk_copy_to_all(void* shared, const void* global, unsigned bytes, uint64_t* barrier, unsigned blocks,
                      Site site);

void mbarrier_init(uint64_t* barrier, unsigned arrivals);
void mbarrier_arrive(uint64_t* barrier, unsigned bytes, Site site);
bool mbarrier_test(uint64_t* barrier, unsigned parity, Site site);

unsigned cluster_rank();
void cluster_arrive(Site site);
void cluster_wait(Site site);
void* cluster_map(const void* shared, unsigned rank);

void griddep_wait(Site site);
void griddep_launch();

void mma_bf16(void* const* operands, unsigned lanes);  // Complete for struct Mma

struct Mma {
    unsigned a[4], b[2];
    float* d;
};

/* b: a matrix descriptor. sums: floats of d, half the columns of B. */
void wgmma(float* d, unsigned sums, const unsigned* a, uint64_t rows, uint64_t b, bool is_turned, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(unsigned left, Site site);

}  // namespace emulate
#pragma GCC visibility pop
