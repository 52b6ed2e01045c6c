/* attend: o = softmax(scale q k^T) v over the keys a row sees, in chunks of 128 keys cut at absolute
 *         positions. A thread reads a key's K elements alone: its neighbours' lines are in L1 by then. Keys
 *         that are not seen are not read, so nothing is masked; a row's bits depend on its own keys only. A
 *         head's sink comes first: where a walk begins.
 * Grid:   (H, T), 128 threads: a thread a key of the chunk, then a thread a component; shared: K + 128
 *         floats.
 * Moves:  the cached K and V once a query head; bound by the walk over chunks, which nothing splits.
 * Source: models.md 1, 4, playbook 4; the running maximum is Milakov & Gimelshein 2018.
 * Truth:  oracle.py attend. */
#include "plain.cuh"

constexpr int CHUNK = 128;
constexpr int MOST = 4;  // components a thread can own: K <= 512

extern "C" __global__ void __launch_bounds__(CHUNK)
    attend(const ACTIVATION* q, const ACTIVATION* cache_k, const ACTIVATION* cache_v, const int* slot,
           const int* pos, const int* begin, const int* end, int window, int causal, float scale,
           const float* sinks, ACTIVATION* o, int G, int S, int K) {
    extern __shared__ float room[];
    float *query = room, *p = room + K;
    int h = blockIdx.x, t = blockIdx.y, H = gridDim.x, at = pos[t], me = threadIdx.x;
    q += ((size_t)t * H + h) * K;
    o += ((size_t)t * H + h) * K;
    int first = window ? min(begin[t], max(0, at - window + 1)) : 0;
    int last = causal ? at + 1 : (window ? min(end[t], at + window) : end[t]);
    if (at < 0) first = last = 0;
    size_t head = ((size_t)(at < 0 ? 0 : slot[t]) * G + h / (H / G)) * S;
    for (int i = me; i < K; i += CHUNK) query[i] = to_f32(q[i]);
    float top = sinks ? sinks[h] : -3.4e38f, total = sinks ? 1.f : 0.f, sum[MOST] = {};
    for (int chunk = first / CHUNK * CHUNK; chunk < last; chunk += CHUNK) {
        int from = max(first - chunk, 0), to = min(last - chunk, CHUNK);
        const ACTIVATION *keys = cache_k + head * K, *values = cache_v + head * K;
        bool is_seen = from <= me && me < to;
        float score = -infinity();
        __syncthreads();  // the query is there; the last chunk's p has been read
        if (is_seen) {
            const ACTIVATION* own = keys + (size_t)((chunk + me) % S) * K;
            float dot = 0.f;
            for (int i = 0; i < K; ++i) dot = fmaf(query[i], to_f32(own[i]), dot);
            score = scale * dot;
        }
        float best = fmaxf(top, block_max(score));
        p[me] = is_seen ? expf(score - best) : 0.f;
        float keep = expf(top - best);
        total = total * keep + block_sum(p[me]);  // its barriers also show p to the block
#pragma unroll
        for (int c = 0; c < MOST; ++c) {
            int i = me + c * CHUNK;
            if (i >= K) break;
            float weighted = 0.f;
            for (int k = from; k < to; ++k)
                weighted = fmaf(p[k], to_f32(values[(size_t)((chunk + k) % S) * K + i]), weighted);
            sum[c] = sum[c] * keep + weighted;
        }
        top = best;
    }
#pragma unroll
    for (int c = 0; c < MOST; ++c)
        if (me + c * CHUNK < K) o[me + c * CHUNK] = from_f32<ACTIVATION>(last > first ? sum[c] / total : 0.f);
}
