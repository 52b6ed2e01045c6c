/* What runs beside the threads: copies in flight, mbarriers, cluster barriers, dependent launch, tensor
 * cores. */
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "scheduler.h"

namespace emulate {

// ---- cp.async ----

void async_copy(void* shared, const void* global, unsigned bytes, unsigned valid) {
    memset(shared, 0xff, bytes);
    Copy copy{(char*)shared, (const char*)global, bytes, valid, self()->open_group, nullptr};
    copy.is_early = !launch.saved.empty();
    if (copy.is_early) memcpy(copy.read, global, valid);
    self()->copies.push_back(copy);
}

void async_commit() {
    ++self()->open_group;
    progress();
}

void async_wait(unsigned left) {
    Fiber* fiber = self();
    std::vector<Copy>& copies = fiber->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group + left < fiber->open_group; ++done) {
        race_access(copies[done].to, copies[done].bytes, true, nullptr);
        memset(copies[done].to, 0, copies[done].bytes);
        memcpy(copies[done].to, copies[done].is_early ? copies[done].read : copies[done].from,
               copies[done].valid);
    }
    copies.erase(copies.begin(), copies.begin() + done);
}

// ---- mbarriers: the same 64 bits as state, laid out our way ----

struct Mbarrier {
    uint32_t phase : 1, is_valid : 1, arrivals : 15, pending : 15;
    int32_t bytes;
};
static_assert(sizeof(Mbarrier) == 8);

static Mbarrier load(uint64_t* barrier, Site site) {
    if ((uintptr_t)barrier % 8)
        fail("mbarrier at %s:%d: address is not a multiple of 8", site.file, site.line);
    Mbarrier state;
    memcpy(&state, barrier, 8);
    if (!state.is_valid || !state.arrivals || state.pending > state.arrivals)
        fail("mbarrier at %s:%d is not initialised", site.file, site.line);
    return state;
}

static Phases& phases_of(uint64_t* barrier) { return self()->block->cluster->mbarriers[barrier]; }

static void store(uint64_t* barrier, Mbarrier state) {
    if (!state.pending && !state.bytes) {
        state.phase ^= 1;
        state.pending = state.arrivals;
        if (launch.finds_races) {
            Phases& phases = phases_of(barrier);
            add_clock(phases.done, phases.arrived);
            phases.arrived.clear();
        }
    }
    memcpy(barrier, &state, 8);
    progress();
}

void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
    Mbarrier state{};
    state.is_valid = 1;
    state.arrivals = state.pending = arrivals;
    if (arrivals < 1 || arrivals > 32767)
        fail("mbarrier_init: %u arrivals, 1 to 32767 are emulated", arrivals);
    memcpy(barrier, &state, 8);
}

void mbarrier_arrive(uint64_t* barrier, unsigned bytes, Site site) {
    Mbarrier state = load(barrier, site);
    if (!state.pending)
        fail("mbarrier at %s:%d: more arrivals than its count in one phase", site.file, site.line);
    state.bytes += bytes;
    --state.pending;
    if (launch.finds_races) race_release(phases_of(barrier).arrived);
    store(barrier, state);
}

static void order_bulk(Block* block, void* shared, const void* global, unsigned bytes, uint64_t* barrier,
                       Site site) {
    load(barrier, site);
    memset(shared, 0xff, bytes);
    block->bulk.push_back({(char*)shared, (const char*)global, bytes, bytes, 0, barrier, false, {}});
    progress();
}

void bulk_copy(void* shared, const void* global, unsigned bytes, uint64_t* barrier, Site site) {
    order_bulk(self()->block, shared, global, bytes, barrier, site);
}

/* The same place of every block of the cluster. */
void bulk_copy_to_all(void* shared, const void* global, unsigned bytes, uint64_t* barrier, unsigned blocks,
                      Site site) {
    const Cluster* cluster = self()->block->cluster;
    if (cluster->blocks.size() != blocks)
        fail("bulk_load_to_all at %s:%d: to %u blocks of a cluster of %zu", site.file, site.line, blocks,
             cluster->blocks.size());
    for (unsigned rank = 0; rank < blocks; ++rank)
        order_bulk(cluster->blocks[rank], cluster_map(shared, rank), global, bytes,
                   (uint64_t*)cluster_map(barrier, rank), site);
}

/* A store to block `rank` of the cluster that its mbarrier counts off. */
void remote_store(void* shared, const void* value, unsigned bytes, uint64_t* barrier, unsigned rank,
                  Site site) {
    char* to = (char*)cluster_map(shared, rank);
    uint64_t* there = (uint64_t*)cluster_map(barrier, rank);
    Mbarrier state = load(there, site);
    race_access(to, bytes, true, nullptr);
    memcpy(to, value, bytes);
    state.bytes -= bytes;
    if (launch.finds_races) race_release(phases_of(there).arrived);
    store(there, state);
}

static bool poll(uint64_t* barrier, unsigned parity, Site site);

/* A copy lands when somebody asks for its barrier; under shuffling, only at some of the times they ask. */
bool mbarrier_test(uint64_t* barrier, unsigned parity, Site site) {
    bool is_complete = poll(barrier, parity, site);
    if (is_complete && launch.finds_races) race_acquire(self(), phases_of(barrier).done);
    return is_complete;
}

static bool poll(uint64_t* barrier, unsigned parity, Site site) {
    Mbarrier state = load(barrier, site);
    if (state.phase != (parity & 1)) return true;
    std::vector<Copy>& bulk = self()->block->bulk;
    for (size_t i = 0; i < bulk.size();) {
        if (bulk[i].barrier != barrier || (launch.request->seed >= 0 && random_below(2))) {
            ++i;
            continue;
        }
        race_forget(bulk[i].to, bulk[i].bytes);
        memcpy(bulk[i].to, bulk[i].from, bulk[i].bytes);
        state = load(barrier, site);
        state.bytes -= bulk[i].bytes;
        bulk.erase(bulk.begin() + i);
        store(barrier, state);
    }
    if (load(barrier, site).phase != (parity & 1)) return true;
    spin("an mbarrier", site);
    return load(barrier, site).phase != (parity & 1);
}

// ---- clusters ----

unsigned cluster_rank() { return self()->block->rank; }

void settle_cluster(Cluster* cluster) {
    if (!cluster->arrived || cluster->arrived < cluster->alive_threads) return;
    cluster->arrived = 0;
    ++cluster->phase;
    if (launch.finds_races) add_clock(cluster->barrier.done, cluster->barrier.arrived);
    cluster->barrier.arrived.clear();
    progress();
}

void cluster_arrive(Site site) {
    Cluster* cluster = self()->block->cluster;
    if (self()->cluster_phase > cluster->phase)
        fail("cluster_arrive at %s:%d: arrived before and has not waited", site.file, site.line);
    self()->cluster_phase = cluster->phase + 1;
    ++cluster->arrived;
    race_release(cluster->barrier.arrived);
    settle_cluster(cluster);
}

void cluster_wait(Site site) {
    Cluster* cluster = self()->block->cluster;
    while (cluster->phase < self()->cluster_phase) spin("cluster_wait", site);
    race_acquire(self(), cluster->barrier.done);
}

void* cluster_map(const void* shared, unsigned rank) {
    Block* block = self()->block;
    size_t offset = (const char*)shared - block->shared;
    if (rank >= block->cluster->blocks.size() || offset > launch.request->shared_bytes)
        fail("map_shared: block %u of %zu, offset %zu of %zu", rank, block->cluster->blocks.size(), offset,
             (size_t)launch.request->shared_bytes);
    Block* other = block->cluster->blocks[rank];
    if (!other->alive) fail("map_shared: block %u of the cluster has already ended", rank);
    return other->shared + offset;
}

// ---- dependent launch ----

void poison_outputs() {
    for (uint64_t i = 0; i < launch.request->poisoned_count; ++i) {
        const Span& span = launch.request->poisoned[i];
        launch.saved.emplace_back(span.begin, span.begin + span.bytes);
    }
    for (uint64_t i = 0; i < launch.saved.size(); ++i)
        memset(launch.request->poisoned[i].begin, 0xff, launch.saved[i].size());
}

void restore_outputs() {
    for (size_t i = 0; i < launch.saved.size(); ++i)
        std::copy(launch.saved[i].begin(), launch.saved[i].end(), launch.request->poisoned[i].begin);
    launch.saved.clear();
}

/* Held until nobody else can go on, so that every thread's code before its wait ran on poisoned memory. */
void griddep_wait(Site site) {
    launch.request->has_waited = 1;
    if (launch.saved.empty()) return;
    launch.griddep_waiters.push_back(self());
    wait_for("griddep_wait", site);
}

/* What the launches before this one still write, the next one may meet as well. */
void griddep_launch() {
    if (!launch.saved.empty()) launch.request->has_let_start = 1;
}

// ---- tensor cores ----

static float widen(unsigned bits) {
    unsigned wide = bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* One fma per k, k ascending, whatever else the warp does: the order is ours, the device's is not documented.
 */
void mma_bf16(void* const* operands, unsigned lanes) {
    if (lanes != 0xffffffffu) fail("mma_bf16 needs all 32 lanes");
    float a[16][16], b[16][8], d[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
        const Mma& mine = *static_cast<Mma*>(operands[lane]);
        unsigned g = lane / 4, t = 2 * (lane % 4);
        for (unsigned half = 0; half < 2; ++half) {
            unsigned shift = 16 * half, k = t + half;
            a[g][k] = widen(mine.a[0] >> shift & 0xffff);
            a[g + 8][k] = widen(mine.a[1] >> shift & 0xffff);
            a[g][k + 8] = widen(mine.a[2] >> shift & 0xffff);
            a[g + 8][k + 8] = widen(mine.a[3] >> shift & 0xffff);
            b[k][g] = widen(mine.b[0] >> shift & 0xffff);
            b[k + 8][g] = widen(mine.b[1] >> shift & 0xffff);
            d[g][k] = mine.d[half];
            d[g + 8][k] = mine.d[2 + half];
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                d[row][column] = __builtin_fmaf(a[row][k], b[k][column], d[row][column]);
    for (unsigned lane = 0; lane < 32; ++lane) {
        float* mine = static_cast<Mma*>(operands[lane])->d;
        unsigned g = lane / 4, t = 2 * (lane % 4);
        mine[0] = d[g][t], mine[1] = d[g][t + 1], mine[2] = d[g + 8][t], mine[3] = d[g + 8][t + 1];
    }
}

}  // namespace emulate
