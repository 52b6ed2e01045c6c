/* Finds data races in shared memory: two accesses of one byte, one of them a write, that nothing orders.
 * Kernels are built with -fsanitize=thread, whose hooks end here. A thread's clock counts the times it
 * released; it knows of others what it acquired: barriers, __syncwarp, mbarriers, cluster barriers, atomics,
 * acquire and release of counters. Shuffles, votes and mma order nothing. An access is ordered behind an
 * earlier one if the thread knows of the earlier one's clock. Source: Flanagan, Freund 2009 (FastTrack). */
#include "scheduler.h"

namespace emulate {

void add_clock(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i)
        if (from[i] > into[i]) into[i] = from[i];
}

static Clock& clock_of(Fiber* fiber) {
    if (fiber->clock.empty()) {
        fiber->clock.resize(fiber->block->cluster->blocks.size() * fiber->block->fibers.size());
        fiber->clock[fiber->number] = 1;
    }
    return fiber->clock;
}

void race_release(Clock& to) {
    if (!launch.finds_races) return;
    add_clock(to, clock_of(self()));
    ++self()->clock[self()->number];
}

void race_acquire(Fiber* fiber, const Clock& from) {
    if (launch.finds_races) add_clock(clock_of(fiber), from);
}

void race_meeting(Warp* warp, unsigned lanes) {
    if (!launch.finds_races) return;
    Clock all;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1) add_clock(all, clock_of(warp->lanes + lane));
    for (unsigned lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1)
            add_clock(warp->lanes[lane].clock, all), ++warp->lanes[lane].clock[warp->lanes[lane].number];
}

void counter_release(const void* counter) {
    if (launch.finds_races) race_release(self()->block->cluster->counters[counter]);
}

void counter_acquire(const void* counter) {
    if (launch.finds_races) race_acquire(self(), self()->block->cluster->counters[counter]);
}

static void check(const Access& before, Fiber* fiber, const char* what, const void* place) {
    if (before.clock <= clock_of(fiber)[before.fiber]) return;
    unsigned threads = fiber->block->fibers.size();
    fail(
        "a race in shared memory: thread %u of block %u of its cluster %s [%p], which nothing orders behind "
        "thread %u of block %u [%p]",
        fiber->number % threads, fiber->number / threads, what, place, before.fiber % threads,
        before.fiber / threads, before.place);
}

void race_access(const void* address, size_t bytes, bool is_write, const void* place) {
    Fiber* fiber = self();
    if (!fiber || !launch.finds_races) return;
    for (Block* block : fiber->block->cluster->blocks) {
        size_t at = (const char*)address - block->shared;
        if (at >= launch.request->shared_bytes) continue;
        if (block->history.empty()) block->history.resize(launch.request->shared_bytes);
        Access now{fiber->number, clock_of(fiber)[fiber->number], place};
        for (size_t i = at; i < at + bytes && i < block->history.size(); ++i) {
            History& history = block->history[i];
            if (history.write.clock)
                check(history.write, fiber, is_write ? "writes what was written" : "reads what was written",
                      place);
            if (!is_write) {
                size_t j = 0;
                while (j < history.reads.size() && history.reads[j].fiber != now.fiber) ++j;
                if (j == history.reads.size()) history.reads.push_back(now);
                history.reads[j] = now;
                continue;
            }
            for (const Access& read : history.reads) check(read, fiber, "writes what was read", place);
            history.reads.clear();
            history.write = now;
        }
        return;
    }
}

/* What a copy engine writes is ordered by the barrier that it completes: nobody's write. */
void race_forget(const void* shared, size_t bytes) {
    if (!launch.finds_races) return;
    for (Block* block : self()->block->cluster->blocks) {
        size_t at = (const char*)shared - block->shared;
        for (size_t i = at; i < at + bytes && i < block->history.size(); ++i) block->history[i] = History{};
    }
}

}  // namespace emulate

#define HOOK extern "C" __attribute__((visibility("default")))
#define ACCESS(size)                                                       \
    HOOK void __tsan_read##size(void* a) {                                 \
        emulate::race_access(a, size, false, __builtin_return_address(0)); \
    }                                                                      \
    HOOK void __tsan_write##size(void* a) {                                \
        emulate::race_access(a, size, true, __builtin_return_address(0));  \
    }
#define UNALIGNED(size)                                                    \
    HOOK void __tsan_unaligned_read##size(void* a) {                       \
        emulate::race_access(a, size, false, __builtin_return_address(0)); \
    }                                                                      \
    HOOK void __tsan_unaligned_write##size(void* a) {                      \
        emulate::race_access(a, size, true, __builtin_return_address(0));  \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
UNALIGNED(2)
UNALIGNED(4)
UNALIGNED(8)
UNALIGNED(16)
HOOK void __tsan_read_range(void* a, size_t n) {
    emulate::race_access(a, n, false, __builtin_return_address(0));
}
HOOK void __tsan_write_range(void* a, size_t n) {
    emulate::race_access(a, n, true, __builtin_return_address(0));
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}
