/* wide_sums: each slice's sums of the products in f32, for kernels that end rows (wide_rows.cu,
 * wide_whole.cu, wide_heads.cu); with a scale, the logits of the head.
 * Grid:   wide.cuh.
 * Moves:  N*K*2 + T*N*4 bytes a slice.
 * Truth:  oracle.py product, head_logits. */
#include "wide.cuh"

/* Two matrices whose groups follow each other. */
struct TwoMatrices {
    OneMatrix first, second;
    int first_groups;

    __device__ __forceinline__ RowTiles operator()(int group) const {
        return group < first_groups ? first(group) : second(group - first_groups);
    }
};

struct KeepSums {
    const TwoMatrices& matrices;
    const float* scale;
    float* y;
    int rows;

    __device__ __forceinline__ void operator()(const Unit& unit, const float (&sums)[SUMS]) const {
        const bool is_first = unit.group < matrices.first_groups;
        const int group = is_first ? unit.group : unit.group - matrices.first_groups;
        const int own = is_first ? matrices.first.outputs : matrices.second.outputs;
        const int outputs = matrices.first.outputs + matrices.second.outputs;
        const int n = group * OUTPUTS + 16 * warp_index() + lane_index() / 4;
        float* to = y + (size_t)unit.slice * rows * outputs + (is_first ? 0 : matrices.first.outputs) + n;
        each_token(unit, rows, scale, sums, [&](int token, float low, float high) {
            if (n < own) to[(size_t)token * outputs] = low;
            if (n + 8 < own) to[(size_t)token * outputs + 8] = high;
        });
    }
};

/* y: (slices, rows, outputs + v_outputs). v: null where v_outputs is 0. scale: null, or of each row. */
extern "C" __global__ void __launch_bounds__(THREADS)
    wide_sums(const u16* w, const u16* v, const bf16* x, const float* scale, float* y, u32* counters,
              float* handed, int rows, int cols, int outputs, int v_outputs) {
    const int first = (outputs + OUTPUTS - 1) / OUTPUTS, second = (v_outputs + OUTPUTS - 1) / OUTPUTS;
    const Work work{x, handed, counters, rows, cols, first + second};
    const TwoMatrices matrices{OneMatrix{w, outputs, cols}, OneMatrix{v, v_outputs, cols}, first};
    wide(work, matrices, KeepSums{matrices, scale, y, rows});
}
