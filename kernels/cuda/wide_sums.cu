/* wide_sums: each slice's sums of the products in f32, for kernels that end rows (wide_rows.cu,
 * wide_whole.cu, wide_heads.cu); with a scale, the logits of the head.
 * Grid:   wide.cuh.
 * Moves:  N*K*2 + T*N*4 bytes a slice.
 * Truth:  oracle.py product, head_logits. */
#include "wide_sinks.cuh"

/* Two matrices whose groups follow each other. */
struct TwoMatrices {
    OneMatrix first, second;

    /* Worked out where it is used: no register keeps it meanwhile. */
    __device__ __forceinline__ int first_groups() const {
        return (opaque(first.outputs) + OUTPUTS - 1) / OUTPUTS;
    }
    __device__ __forceinline__ RowTiles operator()(int group) const {
        const int groups = first_groups();
        return group < groups ? first(group) : second(group - groups);
    }
};

struct KeepSums {
    const TwoMatrices& matrices;
    const float* scale;
    float* y;
    int rows;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const int groups = matrices.first_groups();
        const bool is_first = unit.group < groups;
        const int group = is_first ? unit.group : unit.group - groups;
        const int own = is_first ? matrices.first.outputs : matrices.second.outputs;
        const int outputs = matrices.first.outputs + matrices.second.outputs;
        const int n = group * OUTPUTS + 16 * warp_index() + lane_index() / 4;
        float* to = y + (size_t)unit.slice * rows * outputs + (is_first ? 0 : matrices.first.outputs) + n;
        const bool has_low = n < own, has_high = n + 8 < own;
        each_token(unit, rows, scale, outputs, sums, [&](size_t at, float low, float high) {
            if (has_low) to[at] = low;
            if (has_high) to[at + 8] = high;
        });
    }
};

/* y: (slices, rows, outputs + v_outputs). v: null where v_outputs is 0. scale: null, or of each row. groups:
 * of both matrices. */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide_sums(const u16* w, const u16* v, const bf16* x, const float* scale, float* y, u32* counters,
              float* handed, int rows, int cols, int outputs, int v_outputs, int groups) {
    const Work work{x, handed, counters, rows, cols, groups};
    const TwoMatrices matrices{OneMatrix{w, outputs, cols}, OneMatrix{v, v_outputs, cols}};
    wide(work, matrices, KeepSums{matrices, scale, y, rows});
}
