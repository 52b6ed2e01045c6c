/* sample, propose: ids[pick[i]] = a draw from the filtered law of the first `limit` logits of row i.
 * Grid:   a cluster of blocks a picked row (law.cuh).
 * Moves:  M*limit floats that the head wrote, from L2 once, then 3 times from L1 and 3 to 5 times more a
 *         filter that has to search.
 * Truth:  oracle.py sample, propose. */
#include "law.cuh"

/* logits: rows that begin `stride` floats apart. key: (slots, 4). law: (slots, 3). logprob: (T, 2) or null.
 * mass: (T, stride) or null: gets the masses of row r. */
extern "C" __global__ void __launch_bounds__(512, 1)
    sample(const float* logits, const int* pick, const int* slot, const int* pos, const int* key,
           const float* laws, int* ids, float* logprob, float* mass, int purpose, int limit, int stride,
           float multiplier, float cap) {
    __shared__ Search search;
    griddep_wait();
    int i = blockIdx.x / cluster_size(), r = pick[i], turn = 0;
    if (pos[r] < 0) return;  // as all blocks of the row
    key += 4 * slot[r], laws += 3 * slot[r];
    Law law = filtered(search, turn, logits + (size_t)i * stride, limit, multiplier, cap, key, laws);
    auto kept = [&](int n) { return law.kept(n); };
    Total total = total_of(search, turn, limit, kept);
    u32 position = pos[r] + (purpose == DRAW);  // a draft is for the row's own
    int found = draw(search, limit, total, random_bits(key, position, purpose), kept);
    // A draft may be anything: of a drafter without a law it is id 0, for certain.
    write_choice(search, turn, law, found, total.all, r, ids, logprob, law.is_broken && purpose == DRAW);
    if (mass) {
        mass += (size_t)r * stride;
        each_id(limit, [&](int n) { mass[n] = (float)law.kept(n); });
        for (int n = limit + threadIdx.x; n < stride && cluster_rank() == 0; n += blockDim.x) mass[n] = 0.f;
    }
    cluster_sync();  // nobody reads this block's memory any more
}
