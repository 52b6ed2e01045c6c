/* Runs a launch: which block, warp and lane goes next, meetings and barriers, and what to say when nobody can
 * go. */
#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <string>

namespace emulate {

Launch launch;

// Rounds of polling in which nothing changed, after which polling is called a deadlock.
constexpr unsigned IDLE_ROUNDS = 20000;

unsigned random_below(unsigned bound) {  // xorshift64*
    uint64_t& x = launch.random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return (unsigned)((x * 0x2545f4914f6cdd1dull >> 32) * bound >> 32);
}

static bool is_shuffled() { return launch.request->seed >= 0; }

template <class T>
static void shuffle(std::vector<T>& items) {
    if (is_shuffled())
        for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random_below(i)]);
}

void progress() { ++launch.progress; }

void spin(const char* what, Site site) {
    Fiber* fiber = self();
    fiber->warp->spinning |= 1u << fiber->lane;
    wait_for(what, site);
}

// ---- warp meetings ----

static bool same_site(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

static bool complete_meeting(Warp* warp, unsigned lane) {
    unsigned need = warp->masks[lane] & warp->alive;
    if ((warp->arrived & need) != need) return false;
    for (unsigned other = 0; other < 32; ++other)
        if (need >> other & 1 &&
            (strcmp(warp->what[other], warp->what[lane]) || warp->masks[other] != warp->masks[lane]))
            fail(
                "lanes of one warp meet in different operations: lane %u in %s with mask %08x at %s:%d, lane "
                "%u in %s "
                "with mask %08x at %s:%d",
                lane, warp->what[lane], warp->masks[lane], warp->lanes[lane].site.file,
                warp->lanes[lane].site.line, other, warp->what[other], warp->masks[other],
                warp->lanes[other].site.file, warp->lanes[other].site.line);
    if (!strcmp(warp->what[lane], "__syncwarp")) race_meeting(warp, need);
    warp->completes[lane](warp->operands, need);
    warp->arrived &= ~need;
    warp->ready |= need;
    progress();
    return true;
}

void warp_meet(unsigned mask, const char* what, void* operand, Complete complete, Site site) {
    Fiber* fiber = self();
    Warp* warp = fiber->warp;
    unsigned bit = 1u << fiber->lane;
    if (!(mask & bit))
        fail("%s at %s:%d with mask %08x, which leaves out the caller", what, site.file, site.line, mask);
    warp->arrived |= bit;
    warp->what[fiber->lane] = what;
    warp->masks[fiber->lane] = mask;
    warp->operands[fiber->lane] = operand;
    warp->completes[fiber->lane] = complete;
    fiber->site = site;
    if (complete_meeting(warp, fiber->lane))
        warp->ready &= ~bit;  // the last to come just goes on
    else
        wait_for(what, site);
}

// ---- block barriers ----

void settle_barrier(Block* block, int id) {
    Barrier& barrier = block->barriers[id];
    unsigned count = barrier.count ? barrier.count : block->alive;
    if (!barrier.arrived || barrier.arrived < count) return;
    barrier.arrived = 0;
    for (Warp& warp : block->warps) {
        if (launch.finds_races)
            for (unsigned lane = 0; lane < 32; ++lane)
                if (warp.at_barrier[id] >> lane & 1) race_acquire(warp.lanes + lane, barrier.clock);
        warp.ready |= warp.at_barrier[id];
        warp.at_barrier[id] = 0;
    }
    barrier.clock.clear();
    progress();
}

void block_barrier(int id, unsigned count, bool is_waiting, const char* what, Site site) {
    Fiber* fiber = self();
    if (id < 0 || id > 15)
        fail("%s at %s:%d: barrier %d is not one of 0..15", what, site.file, site.line, id);
    if (count % 32)
        fail("%s at %s:%d: %u threads is not a multiple of 32", what, site.file, site.line, count);
    Barrier& barrier = fiber->block->barriers[id];
    if (!barrier.arrived) {
        barrier.count = count;
        barrier.what = what;
        barrier.site = site;
    } else if (barrier.count != count || (id == 0 && !same_site(barrier.site, site))) {
        fail(
            "barrier divergence: %s for %u threads at %s:%d, while others of the block wait at %s:%d for %u "
            "(0: all)",
            what, count, site.file, site.line, barrier.site.file, barrier.site.line, barrier.count);
    }
    ++barrier.arrived;
    race_release(barrier.clock);
    unsigned bit = 1u << fiber->lane;
    if (is_waiting) fiber->warp->at_barrier[id] |= bit;
    settle_barrier(fiber->block, id);
    if (!is_waiting) return;
    if (fiber->warp->at_barrier[id] & bit)
        wait_for(what, site);
    else
        fiber->warp->ready &= ~bit;  // it was the last
}

int block_any(int predicate, const char* what, Site site) {
    int (&votes)[3] = self()->block->votes;
    unsigned turn = self()->votes++;
    if (predicate) votes[turn % 3] = 1;
    block_barrier(0, 0, true, what, site);
    // All have read the vote before this one, and nobody comes to its place again before the next barrier.
    votes[(turn + 2) % 3] = 0;
    return votes[turn % 3];
}

// ---- blocks ----

static Block* new_block(Cluster* cluster, unsigned rank, uint3 index) {
    Request* request = launch.request;
    unsigned threads = request->block[0] * request->block[1] * request->block[2];
    Block* block = new Block{};
    block->cluster = cluster;
    block->rank = rank;
    block->alive = threads;
    if (posix_memalign((void**)&block->shared, 1024, request->shared_bytes + !request->shared_bytes)) abort();
    memset(block->shared, request->garbage, request->shared_bytes);  // nobody may count on zeros
    block->fibers.resize(threads);
    block->warps.resize((threads + 31) / 32);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = block->fibers[i];
        fiber.thread = {i % request->block[0], i / request->block[0] % request->block[1],
                        i / request->block[0] / request->block[1]};
        fiber.block_index = index;
        fiber.lane = i % 32;
        fiber.number = rank * threads + i;
        fiber.block = block;
        fiber.shared = block->shared;
        Warp& warp = block->warps[i / 32];
        fiber.warp = &warp;
        if (i % 32 == 0) warp.lanes = &fiber, warp.block = block;
        warp.alive |= 1u << i % 32;
        warp.ready = warp.alive;
    }
    return block;
}

static void delete_cluster(Cluster* cluster) {
    for (Block* block : cluster->blocks) {
        for (Fiber& fiber : block->fibers)
            if (fiber.stack) release_stack(fiber.stack);
        free(block->shared);
        delete block;
    }
    delete cluster;
}

static Cluster* new_cluster(uint64_t number) {
    const unsigned *grid = launch.request->grid, *size = launch.request->cluster;
    uint64_t nx = grid[0] / size[0], ny = grid[1] / size[1];
    unsigned first[3] = {(unsigned)(number % nx) * size[0], (unsigned)(number / nx % ny) * size[1],
                         (unsigned)(number / nx / ny) * size[2]};
    Cluster* cluster = new Cluster{};
    for (unsigned z = 0; z < size[2]; ++z)
        for (unsigned y = 0; y < size[1]; ++y)
            for (unsigned x = 0; x < size[0]; ++x)
                cluster->blocks.push_back(
                    new_block(cluster, cluster->blocks.size(), {first[0] + x, first[1] + y, first[2] + z}));
    cluster->alive_blocks = cluster->blocks.size();
    for (Block* block : cluster->blocks) cluster->alive_threads += block->alive;
    progress();
    return cluster;
}

void fiber_ends(Fiber* fiber) {
    Block* block = fiber->block;
    Warp* warp = fiber->warp;
    for (Copy& copy : fiber->copies) memcpy(copy.to, copy.from, copy.valid);
    fiber->copies.clear();
    if (!warp->wgmmas.empty()) fail("a warp ends with %zu wgmma under way", warp->wgmmas.size());
    warp->alive &= ~(1u << fiber->lane);
    for (unsigned lane = 0; lane < 32; ++lane)  // those who waited for this lane need not any more
        if (warp->arrived >> lane & 1) complete_meeting(warp, lane);
    --block->alive;
    --block->cluster->alive_threads;
    if (!block->barriers[0].count) settle_barrier(block, 0);
    settle_cluster(block->cluster);
    if (!block->alive) {
        if (!block->bulk.empty()) fail("the block ends with %zu bulk copies under way", block->bulk.size());
        --block->cluster->alive_blocks;
        memset(block->shared, 0xff, launch.request->shared_bytes);  // gone for the rest of its cluster
    }
    progress();
}

// ---- the scheduler ----

/* Run every lane of a block until all wait. */
static void run_block(Block* block) {
    std::vector<Warp*> order;
    for (Warp& warp : block->warps) {
        warp.ready |= warp.spinning;
        warp.spinning = 0;
        order.push_back(&warp);
    }
    for (bool again = true; again;) {
        again = false;
        shuffle(order);
        for (Warp* warp : order) {
            unsigned start = is_shuffled() ? random_below(32) : 0;
            while (warp->ready) {
                unsigned turned = (warp->ready >> start) | (start ? warp->ready << (32 - start) : 0);
                unsigned lane = (__builtin_ctz(turned) + start) % 32;
                warp->ready &= ~(1u << lane);
                Fiber& fiber = warp->lanes[lane];
                if (!fiber.stack) start_fiber(&fiber);
                if (!fiber.stack) {
                    snprintf(launch.request->error, sizeof launch.request->error,
                             "kernel %s: no memory for the stacks of its threads", launch.request->name);
                    launch.has_failed = true;
                    return;
                }
                uint64_t progress_before = launch.progress;
                run_fiber(&fiber);
                if (launch.has_failed) return;
                if (!(warp->alive >> lane & 1)) {  // the next to start takes it while caches have it
                    release_stack(fiber.stack);
                    fiber.stack = nullptr;
                }
                if (!(warp->spinning >> lane & 1) && launch.progress == progress_before) progress();
                again = true;
            }
        }
    }
}

void describe_waiters(char* text, size_t bytes) {
    struct Group {
        unsigned threads;
        const Fiber* first;
    };
    std::map<std::string, Group> groups;
    for (Cluster* cluster : launch.resident)
        for (Block* block : cluster->blocks)
            for (Fiber& fiber : block->fibers)
                if (fiber.waits_for) {
                    std::string key = std::string(fiber.waits_for) + " at " + fiber.site.file + ":" +
                                      std::to_string(fiber.site.line);
                    Group& group = groups.emplace(key, Group{0, &fiber}).first->second;
                    ++group.threads;
                }
    size_t at = 0;
    for (auto& [key, group] : groups)
        if (at < bytes)
            at += snprintf(text + at, bytes - at,
                           "; %u threads wait in %s, first block (%u, %u, %u) thread (%u, %u, %u)",
                           group.threads, key.c_str(), group.first->block_index.x, group.first->block_index.y,
                           group.first->block_index.z, group.first->thread.x, group.first->thread.y,
                           group.first->thread.z);
}

static void report_deadlock(uint64_t unstarted) {
    char* text = launch.request->error;
    size_t room = sizeof launch.request->error;
    int at = snprintf(text, room, "kernel %s is deadlocked", launch.request->name);
    if (unstarted)
        at += snprintf(text + at, room - at,
                       " (%llu clusters have not started, the device holds %llu blocks at once)",
                       (unsigned long long)unstarted, (unsigned long long)launch.request->resident);
    describe_waiters(text + at, room - at);
    launch.has_failed = true;
}

static void run_all(std::vector<uint64_t>& waiting) {
    size_t per_cluster =
        (size_t)launch.request->cluster[0] * launch.request->cluster[1] * launch.request->cluster[2];
    unsigned idle = 0;
    while (!launch.resident.empty() || !waiting.empty()) {
        while (!waiting.empty() && (launch.resident.size() + 1) * per_cluster <=
                                       std::max<size_t>(launch.request->resident, per_cluster)) {
            launch.resident.push_back(new_cluster(waiting.back()));
            waiting.pop_back();
        }
        uint64_t before = launch.progress;
        shuffle(launch.resident);
        for (Cluster* cluster : launch.resident)
            for (Block* block : cluster->blocks) {
                if (block->alive) run_block(block);
                if (launch.has_failed) return;
            }
        auto done = std::stable_partition(launch.resident.begin(), launch.resident.end(),
                                          [](Cluster* cluster) { return cluster->alive_blocks > 0; });
        std::for_each(done, launch.resident.end(), delete_cluster);
        launch.resident.erase(done, launch.resident.end());
        if (launch.progress != before) {
            idle = 0;
        } else if (!launch.griddep_waiters.empty()) {
            restore_outputs();
            for (Fiber* fiber : launch.griddep_waiters) wake(fiber);
            launch.griddep_waiters.clear();
        } else {
            bool is_polling = false;
            for (Cluster* cluster : launch.resident)
                for (Block* block : cluster->blocks)
                    for (Warp& warp : block->warps) is_polling |= warp.spinning != 0;
            if (!is_polling || ++idle > IDLE_ROUNDS) return report_deadlock(waiting.size());
        }
    }
}

extern "C" __attribute__((visibility("default"))) int emulate_launch(Request* request) {
    launch = Launch{};
    launch.request = request;
    const char* asked = getenv("MINIDFLASH_RACES");
    launch.finds_races = asked && *asked && strcmp(asked, "0");
    launch.random = (uint64_t)request->seed * 2 + 0x9e3779b97f4a7c15ull;
    request->error[0] = 0;
    emulate_grid.grid = {request->grid[0], request->grid[1], request->grid[2]};
    emulate_grid.block = {request->block[0], request->block[1], request->block[2]};
    emulate_grid.cluster = request->cluster[0] * request->cluster[1] * request->cluster[2];
    uint64_t clusters =
        (uint64_t)request->grid[0] * request->grid[1] * request->grid[2] / emulate_grid.cluster;
    std::vector<uint64_t> waiting;
    for (uint64_t number = clusters; number-- > 0;) waiting.push_back(number);
    shuffle(waiting);
    catch_faults();
    start_watchdog();
    poison_outputs();
    run_all(waiting);
    restore_outputs();
    stop_watchdog();
    release_faults();
    for (Cluster* cluster : launch.resident) delete_cluster(cluster);
    launch.resident.clear();
    launch.finds_races = false;
    return launch.has_failed;
}

}  // namespace emulate
