/* Blocks that meet: the last one merges, all wait for all, a cluster's shared memory, a dependent launch. */
#include "sm90.cuh"

#ifndef TOO_EARLY
#define TOO_EARLY 0
#endif
#ifndef LATE
#define LATE 0
#endif

/* out[0] = sum of x, in block order, whichever block comes last. partial: (grid,) f32. counter: zero. */
extern "C" __global__ void sum_last_block(const float* x, float* partial, u32* counter, float* out, int n) {
    int per = (n + gridDim.x - 1) / gridDim.x, first = blockIdx.x * per;
    float s = 0.f;
    for (int i = first + threadIdx.x; i < min(first + per, n); i += blockDim.x) s += x[i];
    s = block_sum(s);
    if (threadIdx.x == 0) partial[blockIdx.x] = s;
    if (!last_to_arrive(counter, gridDim.x)) return;
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int b = 0; b < (int)gridDim.x; ++b) total += __ldcg(partial + b);
        out[0] = total;
    }
}

/* Every block of one warp writes, all wait for all, every block reads its neighbour's. A counter a wait. */
extern "C" __global__ void neighbours(u32* counters, int* place, int* out, int rounds) {
    for (int r = 0; r < rounds; ++r, counters += 2) {
        if (threadIdx.x == 0) {
            place[blockIdx.x] = r * 100 + blockIdx.x;
            red_add_release(counters, 1);
        }
        warp_wait_for(counters, gridDim.x);
        if (threadIdx.x == 0) {
            out[r * gridDim.x + blockIdx.x] = __ldcg(place + (blockIdx.x + 1) % gridDim.x);
            red_add_release(counters + 1, 1);
        }
        warp_wait_for(counters + 1, gridDim.x);
    }
}

/* Each block of a cluster sums its part; every block then adds all parts in rank order. */
extern "C" __global__ void cluster_sum(const float* x, float* out, int n) {
    __shared__ float part;
    float s = 0.f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
    s = block_sum(s);
    if (threadIdx.x == 0) part = s;
    cluster_sync();
    float total = 0.f;
    for (u32 r = 0; r < cluster_size(); ++r) total += *map_shared(&part, r);
    if (threadIdx.x == 0) out[blockIdx.x] = total + 0.f * cluster_rank();
    cluster_sync();
}

extern "C" __global__ void produce(const float* x, float* y, int n) {
    griddep_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    griddep_launch();
    if (i < n) y[i] = 2.f * x[i];
}

/* Lets its successor start before what came before it has ended, unless LATE. */
extern "C" __global__ void between(float* other) {
    if (!LATE) griddep_launch();
    griddep_wait();
    if (LATE) griddep_launch();
    other[threadIdx.x] = 1.f;
}

/* TOO_EARLY reads what the kernel before wrote ahead of the wait, by a load or (2) by cp.async: the planted
 * mistake. */
extern "C" __global__ void consume(const float* weight, const float* y, float* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float w = i < n ? weight[i] : 0.f, v = 0.f;
    __shared__ __align__(16) float copied[32];
    if (TOO_EARLY == 1 && i < n) v = y[i];
    if (TOO_EARLY == 2 && i % 4 == 0 && i < n) cp_async_16(copied + threadIdx.x, y + i);
    griddep_wait();
    if (TOO_EARLY == 2) {
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        v = copied[threadIdx.x];
    }
    if (!TOO_EARLY && i < n) v = y[i];
    if (i < n) z[i] = w + v;
}

/* Half the block of 64 arrives, the other half waits for it. */
extern "C" __global__ void hand_over(const float* x, float* y) {
    __shared__ float held[32];
    if (warp_index() == 0) {
        held[lane_index()] = x[lane_index()];
        named_barrier_arrive(1, 64);
    } else {
        named_barrier_sync(1, 64);
        y[lane_index()] = held[31 - lane_index()];
    }
}
