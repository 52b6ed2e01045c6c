/* What the next kernel reads first, asked into L2 by this one: memory would idle until its blocks have started. */
#pragma once
#include "sm90.cuh"

struct Coming {
    const void* at;  // 16-byte aligned
    int bytes;       // a multiple of 16; 0: nothing

    /* This part's share, by one thread, once its own loads have come: they must not wait behind these. */
    __device__ __forceinline__ void ask(int part, int parts) const {
        int share = (bytes / 16 + parts - 1) / parts * 16, begin = part * share;
        if (begin < bytes) bulk_prefetch_l2((const char*)at + begin, min(share, bytes - begin));
    }
};
