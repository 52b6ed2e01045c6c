/* replay: drafts[n][i] = guess[start[n]][i], a table of the plain run's ids with planned mistakes.
 * Grid:   one block; a thread an asked row.
 * Moves:  a few integers.
 * Truth:  replay.py copy_drafts. */
#include "common.cuh"

extern "C" __global__ void replay(const int* guess, const int* start, const int* rows, int* drafts, int count,
                                  int block, int positions) {
    for (int r = threadIdx.x; r < count; r += blockDim.x) {
        int n = rows[r] / block, at = start[n] < positions ? start[n] : positions - 1;
        drafts[rows[r]] = guess[at * block + rows[r] % block];
    }
}
