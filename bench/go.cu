/* go: behind a round in a WHILE node (bench/loops.py), one block of 32 threads. The round's record goes to
 * the host's ring; there is another round unless the text has ended or `most` have run. */
typedef unsigned long long u64;

/* Of the CUDA device runtime, linked in by bench/loops.py. */
extern "C" __device__ void cudaGraphSetConditional(u64 handle, unsigned int value);

extern "C" __global__ void go(u64 loop, const int* done, const int* record, int* ring, int* rounds, int size,
                              int most) {
    int round = *rounds;
    for (int i = threadIdx.x; i < size; i += blockDim.x) ring[round * size + i] = record[i];
    __threadfence_system();  // the host may read this record before the loop has ended
    __syncwarp();
    if (threadIdx.x != 0) return;
    *rounds = round + 1;
    cudaGraphSetConditional(loop, !*done && round + 1 < most);
}
