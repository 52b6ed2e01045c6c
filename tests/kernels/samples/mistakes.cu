/* Kernels that are wrong on purpose: the emulator must say what is wrong, and never hang. */
#include "sm90.cuh"

extern "C" __global__ void waits_for_nobody(const u32* flag, int* out) {
    if (threadIdx.x == 5)
        while (load_acquire(flag) == 0) {
        }
    __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void diverges(int* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = 1;
    } else {
        __syncthreads();
        out[threadIdx.x] = 2;
    }
}

extern "C" __global__ void half_a_shuffle(float* out) {
    float v = out[threadIdx.x];
    if (threadIdx.x % 32 < 16)
        v += __shfl_xor_sync(0xffffffffu, v, 1);
    else
        __syncwarp();
    out[threadIdx.x] = v;
}

extern "C" __global__ void reads_past(const float* x, float* y, int n) {
    y[threadIdx.x] = x[threadIdx.x + n];
}

extern "C" __global__ void reads_nowhere(const float* x, float* y) {
    y[threadIdx.x] = x[(1ll << 40) + threadIdx.x];
}

extern "C" __global__ void misaligned(const float* x, float* y) {
    float4 v = *(const float4*)(x + 1);
    y[threadIdx.x] = v.x + v.w;
}

extern "C" __global__ void reads_shared_unwritten(float* y) {
    __shared__ float held[32];
    if (threadIdx.x < 31) held[threadIdx.x] = 1.f;
    __syncthreads();
    y[threadIdx.x] = held[threadIdx.x];
}

extern "C" __global__ void overflows_stack(float* y, int depth) {
    volatile float big[60000];
    big[depth] = 1.f;
    y[0] = big[depth];
}

extern "C" __global__ void leaves_a_copy(const float* x) {
    __shared__ __align__(16) float held[4];
    __shared__ u64 barrier;
    mbarrier_init(&barrier, 1);
    mbarrier_arrive_expect(&barrier, 16);
    bulk_load(held, x, 16, &barrier);
}

extern "C" __global__ void polls_plain_memory(const volatile int* flag, int* out) {
    while (*flag == 0) {
    }
    out[0] = 1;
}
