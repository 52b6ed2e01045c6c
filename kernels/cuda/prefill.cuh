/* The frames of the *_prefill kernels: tokens times packed weights transposed, for many token rows. Either
 * one gives Product (what a block computes), prefill(product, sink), OUTPUTS and THREADS; a sink gets a
 * token's sums. WGMMA: tokens come as lay_prefill.cu lays them, and only sm_90a has the instruction. */
#pragma once
#ifdef WGMMA
#include "prefill_wgmma.cuh"
#else
#include "prefill_mma.cuh"
#endif
