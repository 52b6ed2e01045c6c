/* stage, stage_context, accept: the integers of a round, a block a slot; widen: those of a reduced head.
 * Grid:   one block a slot, 32 threads; widen: one a picked row, any number of threads.
 * Moves:  a few hundred bytes; bound by latency, so lanes look at the block's slots side by side.
 * Macros: RECORD_*, the record's fields and reasons, from kernels/record.py.
 * Source: models.md 7.4, engine.md 2.
 * Truth:  oracle_control.py stage, stage_context, accept, widen. */
#include "sm90.cuh"

/* Rows n*width .. of a pass: the anchor, then what fills the block. fill: (slots, B). */
extern "C" __global__ void stage(const int* anchor, const int* start, const int* fresh, const int* done,
                                 const int* fill, int* ids, int* slot, int* pos, int* at, int* begin,
                                 int* end, int* row, int width, int B) {
    griddep_launch();
    griddep_wait();
    int n = blockIdx.x, first = start[n];
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        int r = n * width + i, tap = fresh[n] + i;
        ids[r] = i == 0 ? anchor[n] : max(fill[n * B + i], 0);
        slot[r] = n;
        at[r] = first + i;
        pos[r] = done[n] ? -1 : first + i;
        begin[r] = first;
        end[r] = first + width;
        row[r] = tap < B ? n * B + tap : -1;
    }
}

/* Addresses of the context features that wait; then none does. */
extern "C" __global__ void stage_context(const int* start, int* fresh, int* slot, int* pos, int width) {
    griddep_launch();
    griddep_wait();
    int n = blockIdx.x, count = fresh[n];
    __syncthreads();  // all have read it
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        slot[n * width + i] = n;
        pos[n * width + i] = i < count ? start[n] - count + i : -1;
    }
    if (threadIdx.x == 0) fresh[n] = 0;
}

/* The first i < count where claim(i), or count. All lanes take part. */
template <class Claim>
__device__ __forceinline__ int first_where(int count, Claim claim) {
    for (int base = 0; base < count; base += 32) {
        int i = base + lane_index();
        u32 votes = __ballot_sync(FULL_WARP, i < count && claim(i));
        if (votes) return base + __ffs(votes) - 1;
    }
    return count;
}

/* One slot: the longest prefix of drafts that the target agrees with, its own token behind, budget and stops.
 * drafts: (slots, B). choice: (slots, width). stop: (slots, X). record: (slots, RECORD_TOKENS + 2B). kept:
 * rows that are committed. */
extern "C" __global__ void accept(const int* drafts, const int* choice, const int* stop, int* start,
                                  int* anchor, int* fresh, int* left, int* done, int* record, int* kept,
                                  int width, int B, int X) {
    griddep_launch();
    griddep_wait();
    int n = blockIdx.x, budget = left[n];
    bool is_done = done[n] != 0;
    drafts += n * B;
    choice += n * width;
    stop += n * X;
    record += n * (RECORD_TOKENS + 2 * B);
    auto differs = [&](int i) { return drafts[i + 1] != choice[i] || choice[i] < 0; };
    auto ends = [&](int i) {
        if (choice[i] < 0) return true;  // the target's logits are not finite
        for (int s = 0; s < X; ++s)
            if (stop[s] == choice[i]) return true;
        return false;
    };
    int accepted = is_done ? 0 : first_where(width - 1, differs);
    int most = is_done ? 0 : min(accepted + 1, budget);
    int emitted = first_where(most, ends);
    bool is_broken = emitted < most && choice[emitted] < 0, is_stopped = emitted < most && !is_broken;
    emitted += is_stopped;  // the stop id is kept
    int why = is_broken           ? RECORD_NOT_FINITE
              : is_stopped        ? RECORD_STOPPED
              : emitted == budget ? RECORD_OUT_OF_BUDGET
                                  : 0;
    int* tokens = record + RECORD_TOKENS;  // the drafts lie behind them
    for (int i = lane_index(); i < B; i += 32) {
        tokens[i] = i < emitted ? choice[i] : -1;
        tokens[B + i] = !is_done && 0 < i && i < width ? max(drafts[i], 0) : -1;
    }
    if (lane_index() != 0) return;
    record[RECORD_EMITTED] = emitted, record[RECORD_ACCEPTED] = accepted,
    record[RECORD_WHY] = is_done ? 0 : why;
    kept[n] = emitted;
    if (is_done) return;
    start[n] += emitted;
    fresh[n] += emitted;
    left[n] = budget - emitted;
    done[n] = why;
    if (emitted) anchor[n] = choice[emitted - 1];
}

/* Ids and masses of a picked row of a reduced head become the target's. names: count ids. narrow: (T, count).
 * mass: (T, vocab), or null. */
extern "C" __global__ void widen(const int* pick, const int* pos, const int* names, const float* narrow,
                                 int* ids, float* mass, int count, int vocab) {
    griddep_launch();
    griddep_wait();
    int r = pick[blockIdx.x];
    if (pos[r] < 0) return;
    if (threadIdx.x == 0 && ids[r] >= 0) ids[r] = names[ids[r]];
    if (!mass) return;
    mass += (size_t)r * vocab, narrow += (size_t)r * count;
    for (int n = threadIdx.x; n < vocab; n += blockDim.x) mass[n] = 0.f;
    __syncthreads();
    for (int n = threadIdx.x; n < count; n += blockDim.x)
        if (narrow[n] > 0.f) mass[names[n]] = narrow[n];
}
