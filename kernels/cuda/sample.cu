/* sample: ids[pick[i]] = a draw from the filtered law of the first `limit` logits of row i; oracle.py has the
 * law. Grid:   one block a picked row, any multiple of 32 threads; 16 KB shared. Moves:  M*limit floats that
 * the head wrote, 3 times without filters, about 5 times more a filter that has to search; bound by L2. How:
 * masses are integers, so no order of adding shows, nor does the number of threads. The last id that a filter
 * keeps is found by histograms of 2048 bins: over depth below the best, then over the order of the logits in
 * one bin, then over ids where logits are equal. No sort. Source: Salmon et al. 2011 (Philox). Truth:
 * oracle.py sample. */
#include "common.cuh"

constexpr int BINS = 2048;
constexpr float BINS_A_UNIT = 64.f, MASS = 8796093022208.f /* 2^43 */, GREEDY_BELOW = 1e-5f;

/* A number that orders as the logit does; -0 and 0 are one. */
__device__ __forceinline__ u32 order_of(float logit) {
    u32 bits = __float_as_uint(logit + 0.f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Law {
    const float* logits;
    int count;
    float best, temperature;
    u32 cut;    // order of the last logit that the filters keep
    int last;   // and of the ids with that logit, the last one
    u64 least;  // mass that min_p asks for

    __device__ __forceinline__ float logit(int n) const {
        float value = logits[n];
        return value == value ? value : -infinity();
    }
    __device__ __forceinline__ float depth(float logit) const {
        float z = logit == best ? 0.f : (logit - best) / temperature;
        return z > -80.f ? z : -80.f;
    }
    __device__ __forceinline__ u64 mass(float logit) const {
        return (u64)(exp2_fast(depth(logit) * 1.44269504f) * MASS + 0.5f);
    }
    __device__ __forceinline__ u64 kept(int n) const {
        float value = logit(n);
        u32 order = order_of(value);
        if (order < cut || (order == cut && n > last)) return 0;
        u64 found = mass(value);
        return found >= least ? found : 0;
    }
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

struct Search {
    u32 low[BINS], high[BINS];  // halves of a bin's sum: shared memory adds 32 bits at a time
    u64 warps[32], before;
    u32 first, final;
    int bin;
};

/* The bin in which the sum of parts reaches `need`, and in search.before the sum before it.
 * bin_of(n, logit): -1 for what does not count. part_of(logit): what it adds. */
template <class BinOf, class PartOf>
__device__ __forceinline__ int find_bin(Search& search, const Law& law, u64 need, BinOf bin_of,
                                        PartOf part_of) {
    u64 before = search.before;
    __syncthreads();  // all have read it
    for (int b = threadIdx.x; b < BINS; b += blockDim.x) search.low[b] = search.high[b] = 0;
    if (threadIdx.x == 0) search.bin = BINS - 1;
    __syncthreads();
    for (int n = threadIdx.x; n < law.count; n += blockDim.x) {
        float logit = law.logit(n);
        int bin = bin_of(n, logit);
        u64 part = bin < 0 ? 0 : part_of(logit);
        if (part == 0) continue;
        u32 old = atomicAdd(&search.low[bin], (u32)part);
        u32 more = (u32)(part >> 32) + (old + (u32)part < old);
        if (more) atomicAdd(&search.high[bin], more);
    }
    __syncthreads();
    int share = (BINS + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * share,
        end = min(begin + share, BINS);
    auto sum = [&](int b) { return (u64)search.high[b] << 32 | search.low[b]; };
    u64 own = 0;
    for (int b = begin; b < end; ++b) own += sum(b);
    u64 through = warp_through(own);
    if (lane_index() == 31) search.warps[warp_index()] = through;
    __syncthreads();
    u64 here = before + through - own;
    for (int w = 0; w < warp_index(); ++w) here += search.warps[w];
    if (here < need && here + own >= need) {  // true of one thread
        int b = begin;
        while (here + sum(b) < need) here += sum(b++);
        search.bin = b;
        search.before = here;
    }
    __syncthreads();
    return search.bin;
}

/* How far to shift 0 .. span so that BINS bins hold it. */
__device__ __forceinline__ int shift_of(u32 span) { return max(0, 21 - __clz(span)); }

/* Moves law's cut to the first element, by falling logit and rising id, with which the sum of parts reaches
 * need. floor: parts below it cannot be the answer. */
template <class PartOf>
__device__ __forceinline__ void cut_at(Search& search, Law& law, u64 need, u64 floor, PartOf part_of) {
    __syncthreads();
    if (threadIdx.x == 0) search.before = 0, search.first = 0xffffffffu, search.final = 0;
    __syncthreads();
    auto depth_bin = [&](float logit) {
        return (int)min(law.depth(logit) * -BINS_A_UNIT, (float)(BINS - 1));
    };
    int bin = find_bin(
        search, law, need, [&](int, float logit) { return depth_bin(logit); },
        [&](float logit) {
            u64 part = part_of(logit);
            return part < floor ? 0 : part;
        });
    for (int n = threadIdx.x; n < law.count; n += blockDim.x) {
        float logit = law.logit(n);
        if (depth_bin(logit) != bin) continue;
        atomicMin(&search.first, order_of(logit));
        atomicMax(&search.final, order_of(logit));
    }
    __syncthreads();
    u32 low = search.first, high = search.final;
    while (low < high) {
        int shift = shift_of(high - low);
        u32 from = low, to = high;
        int at = find_bin(
            search, law, need,
            [&](int, float logit) {
                u32 order = order_of(logit);
                return order < from || order > to ? -1 : (int)((to - order) >> shift);
            },
            part_of);
        high = to - ((u32)at << shift);
        u32 width = (1u << shift) - 1;
        low = high - from > width ? high - width : from;
    }
    int first = 0, final = law.count - 1;
    while (first < final) {
        int shift = shift_of(final - first), from = first, to = final;
        int at = find_bin(
            search, law, need,
            [&](int n, float logit) {
                return order_of(logit) != low || n < from || n > to ? -1 : (n - from) >> shift;
            },
            part_of);
        first = from + (at << shift);
        final = min(to, first + (1 << shift) - 1);
    }
    law.cut = low, law.last = first;
}

/* Sum of the masses that law keeps; search.warps[w] gets the share of warp w: ids from w * part on. */
__device__ __forceinline__ u64 total_of(Search& search, const Law& law, int part) {
    int begin = warp_index() * part, end = min(begin + part, law.count);
    u64 own = 0;
    for (int n = begin + lane_index(); n < end; n += 32) own += law.kept(n);
    own = warp_total(own);
    __syncthreads();  // the array's last readers are done
    if (lane_index() == 0) search.warps[warp_index()] = own;
    __syncthreads();
    u64 total = 0;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) total += search.warps[w];
    return total;
}

/* The first id whose running sum of masses exceeds `drawn`. For one warp. */
__device__ __forceinline__ int find_id(const Law& law, int begin, u64 drawn) {
    for (int first = begin;; first += 32) {
        int n = first + lane_index();
        u64 through = warp_through(n < law.count ? law.kept(n) : 0);
        u32 votes = __ballot_sync(FULL_WARP, through > drawn);
        if (votes) return first + __ffs(votes) - 1;
        drawn -= __shfl_sync(FULL_WARP, through, 31);
    }
}

/* 64 random bits of Philox 4x32-10. */
__device__ __forceinline__ u64 random_bits(u32 low, u32 high, u32 position, u32 number) {
    u32 c0 = position, c1 = number, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u32 first = __umulhi(0xD2511F53u, c0), second = __umulhi(0xCD9E8D57u, c2);
        u32 low_first = 0xD2511F53u * c0, low_second = 0xCD9E8D57u * c2;
        c0 = second ^ c1 ^ low, c1 = low_second, c2 = first ^ c3 ^ high, c3 = low_first;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
    return (u64)c0 << 32 | c1;
}

/* logits: rows that begin `stride` floats apart. key: (slots, 4). law: (slots, 3). logprob: (T, 2) or null.
 */
extern "C" __global__ void __launch_bounds__(1024)
    sample(const float* logits, const int* pick, const int* slot, const int* pos, const int* key,
           const float* laws, int* ids, float* logprob, int limit, int stride) {
    __shared__ Search search;
    __shared__ int chosen;
    int r = pick[blockIdx.x];
    if (pos[r] < 0) return;
    key += 4 * slot[r], laws += 3 * slot[r];
    Law law{logits + (size_t)blockIdx.x * stride, limit, 0.f, laws[0], 0, limit, 0};
    Best best{-infinity(), 0x7fffffff};
    for (int n = threadIdx.x; n < limit; n += blockDim.x) best = better(best, Best{law.logit(n), n});
    best = block_best(best);
    law.best = best.value;
    bool is_nothing = !(best.value > -3.4e38f), is_greedy = law.temperature < GREEDY_BELOW;
    if (is_nothing) best.index = 0;
    float share = 1.f;
    int part = (limit + blockDim.x - 1) / blockDim.x * 32;  // ids a warp
    if (!is_nothing && !is_greedy) {
        int top_k = key[3];
        float top_p = laws[1];
        if (0 < top_k && top_k < limit) cut_at(search, law, top_k, 0, [](float) { return (u64)1; });
        if (top_p < 1.f) {
            u64 need = (u64)ceil((double)top_p * (double)total_of(search, law, part));
            // All that weighs less than the floor weighs less than what top_p leaves over.
            u64 floor = (u64)((1.f - top_p) * MASS / limit * 0.5f);
            cut_at(search, law, need, floor, [&](float logit) { return law.mass(logit); });
        }
        law.least = (u64)ceil((double)laws[2] * (double)MASS);
        u64 total = total_of(search, law, part);
        u64 drawn = __umul64hi(random_bits(key[0], key[1], pos[r] + 1, key[2]), total);
        int warp = 0;
        while (drawn >= search.warps[warp]) drawn -= search.warps[warp++];
        if (warp_index() == warp) {
            int found = find_id(law, warp * part, drawn);
            if (lane_index() == 0) chosen = found;
        }
        __syncthreads();
        best.index = chosen;
        share = (float)law.kept(chosen) / (float)total;
    }
    if (threadIdx.x == 0) ids[r] = best.index;
    if (!logprob) return;
    law.temperature = 1.f, law.cut = 0, law.last = limit, law.least = 0;
    float every = (float)total_of(search, law, part) / MASS;
    if (threadIdx.x != 0) return;
    logprob[2 * r] = is_nothing ? -infinity() : logf(share);
    float found = law.logit(best.index), below = found == law.best ? 0.f : found - law.best;
    logprob[2 * r + 1] = is_nothing ? -infinity() : below - logf(every);
}
