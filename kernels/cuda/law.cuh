/* The filtered law of a row of logits as integer masses, and a draw from it: what sample and reject share.
 * Grid:   1, 2, 4 or 8 blocks a row, a cluster; any multiple of 32 threads. A warp has `part` neighbouring
 *         ids.
 * How:    masses are integers, so no order of adding shows, nor the number of threads or blocks. The last id
 *         that a filter keeps is found by histograms of 2048 bins: over depth below the best, then over the
 *         order of the logits in one bin, then over ids where logits are equal. A block counts its own ids,
 *         then adds up its share of the bins of all blocks. No sort.
 * Source: Salmon et al. 2011 (Philox).
 * Truth:  oracle.py masses. */
#pragma once
#include "sm90.cuh"
#include "softcap.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0  // 1: logits are scaled and capped
#endif

constexpr int BINS = 2048;
constexpr float BINS_A_UNIT = 64.f, MASS = 8796093022208.f /* 2^43 */, GREEDY_BELOW = 1e-5f;
constexpr u32 DRAW = 0, DRAFT = 1, ACCEPT = 2, RESIDUAL = 3;  // what a random number is for

/* A number that orders as the logit does; -0 and 0 are one. */
__device__ __forceinline__ u32 order_of(float logit) {
    u32 bits = __float_as_uint(logit + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(u32 order) {
    return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

struct Law {
    const float* logits;
    int count;
    int only;        // the id that has all the mass, or -1
    bool is_broken;  // a logit is not finite: there is no law, and id 0 has all the mass
    float best, per_unit /* 1 / temperature */;
    u32 cut;                     // order of the last logit that the filters keep
    int last;                    // and of the ids with that logit, the last one
    u64 least;                   // mass that min_p asks for
    float multiplier, cap, top;  // top: the best logit, capped

    __device__ __forceinline__ float logit(int n) const { return logits[n]; }
    /* How far the logit, scaled and capped, lies below the best one. Never above: tanh may round either way.
     */
    __device__ __forceinline__ float below(float logit) const {
        if (SOFTCAP && cap > 0.f) return fminf(soft_cap(logit, multiplier, cap) - top, 0.f);
        float z = logit == best ? 0.f : logit - best;
        return SOFTCAP ? z * multiplier : z;
    }
    __device__ __forceinline__ float depth(float logit) const {
        float z = below(logit) * per_unit;
        return z > -80.f ? z : -80.f;
    }
    __device__ __forceinline__ u64 mass(float logit) const {
        return (u64)(exp2_fast(depth(logit) * 1.44269504f) * MASS + 0.5f);
    }
    __device__ __forceinline__ u64 kept(int n, float logit) const {
        if (only >= 0) return n == only ? (u64)MASS : 0;
        u32 order = order_of(logit);
        if (order < cut || (order == cut && n > last)) return 0;
        u64 found = mass(logit);
        return found >= least ? found : 0;
    }
    __device__ __forceinline__ u64 kept(int n) const { return kept(n, logit(n)); }
};

/* Sum over the warp, in every lane. */
__device__ __forceinline__ u64 warp_total(u64 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

/* Sum over the lanes up to this one. */
__device__ __forceinline__ u64 warp_through(u64 x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(FULL_WARP, x, step);
        if (lane_index() >= step) x += other;
    }
    return x;
}

struct Found {
    int bin;
    u64 before, inside, need;  // sum before the bin, in it, and what was asked for
};

struct Total {
    u64 all, before, own;  // of the row, of the blocks before this one, of this one
};

/* Shared memory of a block; `turn` is the same in all threads. */
struct Search {
    u32 low[BINS], high[BINS];  // halves of a bin's sum: shared memory adds 32 bits at a time
    u64 sums[BINS];             // of this block's share of the bins, all blocks added
    u64 warps[32];
    u64 totals[2];  // in turns: who reads the last one has not to be waited for
    Best best;
    u32 first, final;
    Found found;
    int chosen;
};

/* Visits this thread's ids below count, ascending. */
template <class Visit>
__device__ __forceinline__ void each_id(int count, Visit visit) {
    int warps = blockDim.x / 32,
        part = (count + 32 * warps * (int)cluster_size() - 1) / (32 * warps * (int)cluster_size()) * 32;
    int begin = ((int)cluster_rank() * warps + warp_index()) * part, end = min(begin + part, count);
    for (int n = begin + lane_index(); n < end; n += 32) visit(n);
}

/* First id of a warp of this block, as each_id has it. */
__device__ __forceinline__ int first_id(int count, int warp) {
    int warps = blockDim.x / 32, all = warps * (int)cluster_size();
    return ((int)cluster_rank() * warps + warp) * ((count + 32 * all - 1) / (32 * all) * 32);
}

/* Sum over all threads of the row's blocks; search.warps[w] gets the share of warp w. */
__device__ __forceinline__ Total total_of(Search& search, int& turn, u64 own) {
    own = warp_total(own);
    __syncthreads();  // the array's last readers are done
    if (lane_index() == 0) search.warps[warp_index()] = own;
    __syncthreads();
    Total total{0, 0, 0};
    for (int w = 0; w < (int)blockDim.x / 32; ++w) total.own += search.warps[w];
    turn ^= 1;
    if (threadIdx.x == 0) search.totals[turn] = total.own;
    cluster_sync();
    for (u32 k = 0; k < cluster_size(); ++k) {
        u64 there = *map_shared(&search.totals[turn], k);
        total.all += there;
        if (k < cluster_rank()) total.before += there;
    }
    return total;
}

/* The same of a function of ids. */
template <class PartOf>
__device__ __forceinline__ Total total_of(Search& search, int& turn, int count, PartOf part_of) {
    u64 own = 0;
    each_id(count, [&](int n) { own += part_of(n); });
    return total_of(search, turn, own);
}

/* The bin in which the sum of parts, from `before` on, reaches what need_of(sum of all) says.
 * bin_of(n, logit): -1 for what does not count. part_of(n, logit): what it adds. */
template <class NeedOf, class BinOf, class PartOf>
__device__ __forceinline__ Found find_bin(Search& search, int& turn, const Law& law, u64 before,
                                          NeedOf need_of, BinOf bin_of, PartOf part_of) {
    for (int b = threadIdx.x; b < BINS; b += blockDim.x) search.low[b] = search.high[b] = 0;
    __syncthreads();
    each_id(law.count, [&](int n) {
        float logit = law.logit(n);
        int bin = bin_of(n, logit);
        u64 part = bin < 0 ? 0 : part_of(n, logit);
        if (part == 0) return;
        u32 old = atomicAdd(&search.low[bin], (u32)part);
        u32 more = (u32)(part >> 32) + (old + (u32)part < old);
        if (more) atomicAdd(&search.high[bin], more);
    });
    cluster_sync();
    int share = BINS / (int)cluster_size(), first = (int)cluster_rank() * share;
    u64 own = 0;
    for (int b = threadIdx.x; b < share; b += blockDim.x) {
        u64 sum = 0;
        for (u32 k = 0; k < cluster_size(); ++k) {
            const Search* other = map_shared(&search, k);
            sum += ((u64)other->high[first + b] << 32) + other->low[first + b];
        }
        search.sums[b] = sum;
        own += sum;
    }
    u64 all = total_of(search, turn, own).all;
    if (warp_index() == 0) {  // first the block that added up the bin, then the bin
        u64 need = need_of(all);
        u64 there = lane_index() < (int)cluster_size() ? *map_shared(&search.totals[turn], lane_index()) : 0;
        u64 through = before + warp_through(there);
        int block = __ffs(__ballot_sync(FULL_WARP, through >= need)) - 1;
        const u64* sums = map_shared(search.sums, block);
        u64 here = __shfl_sync(FULL_WARP, through - there, block), mine = 0;
        int run = share / 32, bin = lane_index() * run;
        for (int b = bin; b < bin + run; ++b) mine += sums[b];
        through = here + warp_through(mine);
        if (through >= need && through - mine < need) {  // true of one lane
            here = through - mine;
            while (here + sums[bin] < need) here += sums[bin++];
            search.found = Found{block * share + bin, here, sums[bin], need};
        }
    }
    __syncthreads();
    return search.found;
}

/* How far to shift 0 .. span so that BINS bins hold it. */
__device__ __forceinline__ int shift_of(u32 span) { return max(0, 21 - __clz(span)); }

/* Moves law's cut to the first element, by falling logit and rising id, with which the sum of parts reaches
 * what need_of(sum of all) says. size_of(logit): a part that is not 0. */
template <class NeedOf, class PartOf, class SizeOf>
__device__ __forceinline__ void cut_at(Search& search, int& turn, Law& law, NeedOf need_of, PartOf part_of,
                                       SizeOf size_of) {
    auto depth_bin = [&](float logit) {
        return (int)min(law.depth(logit) * -BINS_A_UNIT, (float)(BINS - 1));
    };
    Found at =
        find_bin(search, turn, law, 0, need_of, [&](int, float logit) { return depth_bin(logit); }, part_of);
    if (threadIdx.x == 0)
        search.first = 0xffffffffu, search.final = 0;  // the last search has been read by all
    __syncthreads();
    const u64 need = at.need;
    auto same = [&](u64) { return need; };
    each_id(law.count, [&](int n) {
        float logit = law.logit(n);
        if (depth_bin(logit) != at.bin) return;
        atomicMin(&search.first, order_of(logit));
        atomicMax(&search.final, order_of(logit));
    });
    cluster_sync();
    u32 low = 0xffffffffu, high = 0;
    for (u32 k = 0; k < cluster_size(); ++k) {
        low = min(low, *map_shared(&search.first, k));
        high = max(high, *map_shared(&search.final, k));
    }
    while (low < high) {
        int shift = shift_of(high - low);
        u32 from = low, to = high;
        at = find_bin(
            search, turn, law, at.before, same,
            [&](int, float logit) {
                u32 order = order_of(logit);
                return order < from || order > to ? -1 : (int)((to - order) >> shift);
            },
            part_of);
        high = to - ((u32)at.bin << shift);
        u32 width = (1u << shift) - 1;
        low = high - from > width ? high - width : from;
    }
    int first = 0, final = law.count - 1;
    if (at.before + at.inside - size_of(logit_of(low)) < need)  // all that are equal are needed
        first = final = low == law.cut ? law.last : law.count;
    while (first < final) {
        int shift = shift_of(final - first), from = first, to = final;
        at = find_bin(
            search, turn, law, at.before, same,
            [&](int n, float logit) {
                return order_of(logit) != low || n < from || n > to ? -1 : (n - from) >> shift;
            },
            part_of);
        first = from + (at.bin << shift);
        final = min(to, first + (1 << shift) - 1);
    }
    law.cut = low, law.last = first;
}

/* The law of the first `limit` logits. key: seed, sample, top_k. laws: temperature, top_p, min_p. Ids are
 * ranked by the bare logits. */
__device__ __forceinline__ Law filtered(Search& search, int& turn, const float* logits, int limit,
                                        float multiplier, float cap, const int* key, const float* laws) {
    Law law{logits, limit, -1, false, 0.f, 1.f / laws[0], 0, limit, 0, multiplier, cap, 0.f};
    Best best{-infinity(), 0x7fffffff};
    each_id(limit, [&](int n) { best = better(best, candidate(logits[n], n)); });
    best = block_best(best);
    if (threadIdx.x == 0) search.best = best;
    cluster_sync();
    for (u32 k = 0; k < cluster_size(); ++k) best = better(best, *map_shared(&search.best, k));
    law.best = best.value;
    if (SOFTCAP) law.top = soft_cap(best.value, multiplier, cap);
    law.is_broken = best.index < 0;
    if (law.is_broken || laws[0] < GREEDY_BELOW) {
        law.only = max(best.index, 0);
        return law;
    }
    int top_k = key[3];
    float top_p = laws[1];
    if (0 < top_k && top_k < limit) {
        auto one = [](int, float) { return (u64)1; };
        cut_at(search, turn, law, [&](u64) { return (u64)top_k; }, one, [](float) { return (u64)1; });
    }
    if (top_p < 1.f)
        cut_at(
            search, turn, law, [&](u64 all) { return (u64)ceil((double)top_p * (double)all); },
            [&](int n, float logit) { return law.kept(n, logit); },
            [&](float logit) { return law.mass(logit); });
    law.least = (u64)ceil((double)laws[2] * (double)MASS);
    return law;
}

/* 64 random bits of Philox 4x32-10. */
__device__ __forceinline__ u64 random_bits(const int* key, u32 position, u32 purpose) {
    u32 c0 = position, c1 = key[2], c2 = purpose, c3 = 0, low = key[0], high = key[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u32 first = __umulhi(0xD2511F53u, c0), second = __umulhi(0xCD9E8D57u, c2);
        u32 low_first = 0xD2511F53u * c0, low_second = 0xCD9E8D57u * c2;
        c0 = second ^ c1 ^ low, c1 = low_second, c2 = first ^ c3 ^ high, c3 = low_first;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
    return (u64)c0 << 32 | c1;
}

/* The first id whose running sum of parts exceeds bits * total / 2^64, in every thread of the block that has
 * it; -1 in the others. total: of these parts, with search.warps as total_of left it. */
template <class PartOf>
__device__ __forceinline__ int draw(Search& search, int count, const Total& total, u64 bits, PartOf part_of) {
    u64 drawn = __umul64hi(bits, total.all) - total.before;
    if (drawn >= total.own) return -1;  // before this block, it has wrapped around
    int warp = 0;
    while (drawn >= search.warps[warp]) drawn -= search.warps[warp++];
    for (int first = first_id(count, warp); warp_index() == warp; first += 32) {
        int n = first + lane_index();
        u64 through = warp_through(n < count ? part_of(n) : 0);
        u32 votes = __ballot_sync(FULL_WARP, through > drawn);
        if (votes) {
            if (lane_index() == 0) search.chosen = first + __ffs(votes) - 1;
            break;
        }
        drawn -= __shfl_sync(FULL_WARP, through, 31);
    }
    __syncthreads();
    return search.chosen;
}

/* The chosen id of row r, from the block where it is not -1, and its log-probability under the law and under
 * the model's own (temperature 1, no filter). total: mass of the law. is_refused: the id is -1 instead.
 * All blocks of the row take part. */
__device__ __forceinline__ void write_choice(Search& search, int& turn, Law law, int found, u64 total, int r,
                                             int* ids, float* logprob, bool is_refused) {
    bool is_writer = found >= 0 && threadIdx.x == 0;
    if (is_writer) ids[r] = is_refused ? -1 : found;
    if (!logprob) return;
    if (is_refused) {
        if (is_writer) logprob[2 * r] = logprob[2 * r + 1] = -infinity();
        return;
    }
    float share = is_writer ? (float)law.kept(found) / (float)total : 0.f;
    law.per_unit = 1.f, law.cut = 0, law.last = law.count, law.least = 0, law.only = -1;
    float every = (float)total_of(search, turn, law.count, [&](int n) { return law.kept(n); }).all / MASS;
    if (!is_writer) return;
    logprob[2 * r] = logf(share);
    logprob[2 * r + 1] = law.below(law.logit(found)) - logf(every);
}
