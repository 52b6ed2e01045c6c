/* Planted races in shared memory, and the same accesses in order. */
#include "sm90.cuh"

extern "C" __global__ void neighbour(int* out, int is_ordered) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    if (is_ordered) __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}

/* A shuffle brings the lanes together, but orders no memory. */
extern "C" __global__ void lanes(int* out, int is_ordered) {
    __shared__ int s[32];
    s[threadIdx.x] = threadIdx.x;
    __shfl_xor_sync(FULL_WARP, 0, 1);
    if (is_ordered) __syncwarp();
    out[threadIdx.x] = s[31 - threadIdx.x];
}

/* Warp 0 writes, one lane arrives for it, warp 1 waits and reads; written again before it says so. */
extern "C" __global__ void hand_over(int* out, int is_ordered, int is_read) {
    __shared__ int s[32];
    __shared__ u64 full, empty;
    if (threadIdx.x == 0) mbarrier_init(&full, 1), mbarrier_init(&empty, 32);
    __syncthreads();
    if (warp_index() == 0) {
        s[threadIdx.x] = threadIdx.x;
        if (is_ordered) __syncwarp();
        if (threadIdx.x == 0) mbarrier_arrive(&full);
        if (is_read) mbarrier_wait(&empty, 0);
        s[threadIdx.x] = 7;
    } else {
        mbarrier_wait(&full, 0);
        out[lane_index()] = s[31 - lane_index()];
        mbarrier_arrive(&empty);
    }
}

/* A block writes into its neighbour's shared memory. */
extern "C" __global__ void across(int* out, int is_ordered) {
    __shared__ int s[32];
    cluster_sync();
    map_shared(s, cluster_rank() ^ 1)[threadIdx.x] = threadIdx.x;
    if (is_ordered)
        cluster_sync();
    else
        __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
    cluster_sync();
}
