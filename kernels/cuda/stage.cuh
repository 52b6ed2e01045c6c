/* What a block of the kernels of many token rows has in shared memory at a time: TOKENS tokens and
 * WEIGHT_TILES row tiles of weights, STAGE_K inputs of each; STAGES of them. */
#pragma once

#ifndef TOKENS
#define TOKENS 256
#endif
#ifndef WEIGHT_TILES
#define WEIGHT_TILES 8
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int OUTPUTS = 16 * WEIGHT_TILES;
constexpr int STAGE_K = 64;
