/* reject: the token after every row of a verify pass, by rejection sampling of the draft that follows it.
 * Grid:   a cluster of blocks a row (law.cuh).
 * Moves:  as sample, and T*limit masses of the drafter's laws once, where a draft is rejected three times.
 * Source: Leviathan et al. 2023; dflash.md 4.2 rule 1.
 * Truth:  oracle.py reject. */
#include "law.cuh"

constexpr double WHOLE = 1152921504606846976.;  // 2^60: a law's share as an integer

/* logits: rows that begin `stride` floats apart, `width` rows a slot. key: (slots, 4). law: (slots, 3).
 * drafts: (slots, B). mass: (slots, B, stride). logprob: (T, 2) or null. */
extern "C" __global__ void __launch_bounds__(512, 1)
    reject(const float* logits, const int* pos, const int* key, const float* laws, const int* drafts,
           const float* mass, int* ids, float* logprob, int width, int B, int limit, int stride,
           float multiplier, float cap) {
    __shared__ Search search;
    griddep_wait();
    int r = blockIdx.x / cluster_size(), n = r / width, next = r % width + 1, turn = 0;
    if (pos[r] < 0) return;  // as all blocks of the row
    key += 4 * n, laws += 3 * n;
    u32 position = pos[r] + 1;
    Law law = filtered(search, turn, logits + (size_t)r * stride, limit, multiplier, cap, key, laws);
    auto kept = [&](int id) { return law.kept(id); };
    Total total = total_of(search, turn, limit, kept);
    const u64 all = total.all;
    int found = -1;
    if (next == width) {
        found = draw(search, limit, total, random_bits(key, position, DRAW), kept);
    } else {
        const float* drafted = mass + ((size_t)n * B + next) * stride;
        double p = WHOLE / (double)all, q = WHOLE / (double)total_of(search, turn, limit, [&](int id) {
                                                        return (u64)drafted[id];
                                                    }).all;
        int draft = drafts[n * B + next];
        double u = (double)(random_bits(key, position, ACCEPT) >> 11) * 0x1p-53;
        if (u * ((double)drafted[draft] * q) < (double)kept(draft) * p) {
            if (cluster_rank() == 0) found = draft;
        } else {
            auto left = [&](int id) {
                double more = (double)kept(id) * p - (double)drafted[id] * q;
                return more > 0. ? (u64)more : (u64)0;
            };
            u64 bits = random_bits(key, position, RESIDUAL);
            total = total_of(search, turn, limit, left);
            if (total.all) {
                found = draw(search, limit, total, bits, left);
            } else {  // the laws are one, but for rounding
                total = total_of(search, turn, limit, kept);
                found = draw(search, limit, total, bits, kept);
            }
        }
    }
    write_choice(search, turn, law, found, all, r, ids, logprob, law.is_broken);
    cluster_sync();  // nobody reads this block's memory any more
}
