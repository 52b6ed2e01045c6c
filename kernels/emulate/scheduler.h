/* Inside the runtime: fibers, warps, blocks, clusters and the launch they belong to. */
#pragma once
#include <map>
#include <vector>

#include "fibers.h"

namespace emulate {

constexpr size_t STACK_BYTES = 128 << 10;  // address space; a page or two of it is ever touched

using Clock = std::vector<uint32_t>;  // by thread of a cluster: races.cpp

/* One access of a byte: by whom, at which of its clock's counts, from where. */
struct Access {
    unsigned fiber;
    uint32_t clock;
    const void* place;
};

struct History {
    Access write{};
    std::vector<Access> reads;  // since the write
};

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, valid, group;
    uint64_t* barrier;  // bulk copies only
    bool is_early;      // begun before griddep_wait: it may read what is there then
    char read[16];
};

struct Fiber : Thread {
    void* stack_pointer;
    char* stack;
    const char* waits_for;  // null while it runs or is ready
    Site site;
    unsigned cluster_phase;
    unsigned open_group;  // cp.async group that the next commit closes
    std::vector<Copy> copies;
    unsigned number;     // in its cluster
    unsigned votes = 0;  // that it took part in
    Clock clock;
};

/* A product of a warpgroup, as one of its warps asked for it: warpgroups.cpp. */
struct Wgmma {
    const unsigned* a[32];  // null: A's rows are in shared memory
    float* d[32];
    uint64_t rows, b;
    bool is_turned;
    unsigned sums, group;
};

/* The true sums of a lane while products are under way. */
struct Flying {
    std::vector<float> sums;
    unsigned products;
};

struct Warp {
    Block* block;
    Fiber* lanes;
    unsigned alive, ready, spinning;
    unsigned arrived;  // lanes that wait in warp_meet, each with what follows
    const char* what[32];
    unsigned masks[32];
    void* operands[32];
    Complete completes[32];
    unsigned at_barrier[16];
    std::vector<Wgmma> wgmmas;        // under way
    std::map<float*, Flying> flying;  // by where a lane's sums belong
    unsigned asked, open_group;       // products so far; the group that the next commit closes
    bool is_fenced;
};

struct Barrier {
    unsigned arrived, count;
    const char* what;
    Site site;
    Clock clock;  // of those who arrived
};

struct Phases {
    Clock arrived, done;  // in this phase; in all that are complete
};

struct Cluster {
    std::vector<Block*> blocks;
    Phases barrier;
    std::map<const void*, Phases> mbarriers;
    std::map<const void*, Clock> counters;
    unsigned alive_threads, alive_blocks, arrived, phase;
};

struct Block {
    Cluster* cluster;
    unsigned rank, alive;
    char* shared;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barriers[16];
    int votes[3] = {};  // __syncthreads_or: this vote, the last one, which may still be read, the next one
    std::vector<Copy> bulk;
    std::vector<std::vector<Wgmma>> asked;  // of each warpgroup, as its first warp asked
    std::vector<History> history;           // of each byte of shared memory
};

struct Span {
    char* begin;
    uint64_t bytes;
};

/* What Python fills in (kernels/emulate/__init__.py mirrors it with ctypes). */
struct Request {
    void (*entry)(void**);
    void** arguments;
    const char* name;
    unsigned grid[3], block[3], cluster[3];
    uint64_t shared_bytes;
    uint64_t resident;  // blocks the device holds at once
    int64_t seed;       // below 0: ascending order everywhere
    double patience;    // seconds of processor time a thread may run without waiting
    const Span* poisoned;
    uint64_t poisoned_count;
    int garbage;
    int has_waited;     // out: griddep_wait was called
    int has_let_start;  // out: griddep_launch was called while the poisoned spans still were
    char error[2048];
};

struct Launch {
    Request* request;
    std::vector<Cluster*> resident;
    std::vector<Fiber*> griddep_waiters;
    std::vector<std::vector<char>> saved;  // contents of the poisoned spans until griddep_wait
    bool has_failed, finds_races;
    uint64_t progress, random;
    uint64_t runs;  // turns given to fibers
};

extern Launch launch;

inline Fiber* self() { return static_cast<Fiber*>(emulate_self); }
inline void wake(Fiber* fiber) { fiber->warp->ready |= 1u << fiber->lane; }

unsigned random_below(unsigned bound);
void wait_for(const char* what, Site site);  // gives the processor away until wake()
void run_fiber(Fiber* fiber);                // to its next wait
void start_fiber(Fiber* fiber);              // gives it a stack that begins in the kernel
void release_stack(char* stack);
void fiber_ends(Fiber* fiber);
void settle_barrier(Block* block, int id);
void settle_cluster(Cluster* cluster);
void poison_outputs();
void restore_outputs();
void describe_waiters(char* text, size_t bytes);
void catch_faults();
void release_faults();
void add_clock(Clock& into, const Clock& from);
void race_release(Clock& to);  // by the thread that runs
void race_acquire(Fiber* fiber, const Clock& from);
void race_meeting(Warp* warp, unsigned lanes);
void race_access(const void* address, size_t bytes, bool is_write, const void* place);
void race_forget(const void* shared, size_t bytes);
void start_watchdog();
void stop_watchdog();

}  // namespace emulate
