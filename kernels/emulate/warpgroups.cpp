/* wgmma: products of four warps, under way from their wgmma to the wait that covers their group. They happen
 * at that wait, with what A's registers and B's shared memory hold then; until then their sums are NaN bits.
 * So whoever touches any of the three too early, or reads the sums, gets it wrong. */
#include <string.h>

#include "scheduler.h"

namespace emulate {

static Warp& own_warp(unsigned lanes, const char* what) {
    if (lanes != 0xffffffffu) fail("%s needs all 32 lanes", what);
    return *self()->warp;
}

static unsigned index_of(const Warp& warp) { return &warp - warp.block->warps.data(); }

/* ---- matrices ---- */

static float widen(unsigned bits) {
    unsigned wide = bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* Columns of B, or rows of A, from shared memory, k by k. The descriptor as in the PTX manual (matrix
 * descriptor format): address and strides in 16 bytes; of the layouts only 128-byte swizzle, which exchanges
 * bits 4..6 of an address by bits 7..9 of the same: columns of 64 k, or (is_turned) one k after the other, 64
 * columns of it. */
static void read_columns(uint64_t descriptor, unsigned columns, bool is_turned, float* b) {
    Block* block = self()->block;
    uint64_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1)
        fail("wgmma: layout %u, only 128-byte swizzle is emulated", (unsigned)(descriptor >> 62));
    if (descriptor >> 49 & 7 || start & 0x380 || stride % 1024)
        fail("wgmma: columns at byte %u, stride %u, are not aligned to 1024", (unsigned)start,
             (unsigned)stride);
    if ((start & 0x7f) + (is_turned ? 2 * columns : 32) > 128)
        fail("wgmma: the %s at byte %u go beyond their 64", is_turned ? "columns" : "16 k", (unsigned)start);
    const unsigned lines = is_turned ? 16 : columns, units = is_turned ? columns / 8 : 2;
    for (unsigned line = 0; line < lines; ++line)
        for (unsigned unit = 0; unit < units; ++unit) {
            uint64_t at = start + line / 8 * stride + line % 8 * 128 + 16 * unit;
            at ^= (at >> 7 & 7) << 4;
            if (at + 16 > launch.request->shared_bytes)
                fail("wgmma: column %u lies outside of shared memory", line);
            race_access(block->shared + at, 16, false, nullptr);
            for (unsigned i = 0; i < 8; ++i) {
                uint16_t bits;
                memcpy(&bits, block->shared + at + 2 * i, 2);
                const unsigned k = is_turned ? line : 8 * unit + i, column = is_turned ? 8 * unit + i : line;
                b[k * columns + column] = widen(bits);
            }
        }
}

/* One fma per k, k ascending, as in mma_bf16. */
static void happen(Warp& warp, const Wgmma& product) {
    unsigned columns = 2 * product.sums;
    std::vector<float> b(16 * columns), d(16 * columns);
    float a[16][16];
    read_columns(product.b, columns, product.is_turned, b.data());
    if (!product.a[0]) {
        std::vector<float> rows(16 * 64);
        read_columns(product.rows, 64, false, rows.data());
        for (unsigned i = 0; i < 256; ++i)
            a[i / 16][i % 16] = rows[i % 16 * 64 + index_of(warp) % 4 * 16 + i / 16];
    }
    std::vector<float>* sums[32];
    for (unsigned lane = 0; lane < 32; ++lane) {
        unsigned g = lane / 4, t = 2 * (lane % 4);
        for (unsigned i = 0; product.a[0] && i < 8;
             ++i)  // words are rows g, g + 8, and the same of the other 8 k
            a[g + i / 2 % 2 * 8][t + i % 2 + i / 4 * 8] =
                widen(product.a[lane][i / 2] >> 16 * (i % 2) & 0xffff);
        sums[lane] = &warp.flying[product.d[lane]].sums;
        for (unsigned i = 0; i < product.sums; ++i)
            d[(g + i / 2 % 2 * 8) * columns + i / 4 * 8 + t + i % 2] = (*sums[lane])[i];
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned column = 0; column < columns; ++column)
                d[row * columns + column] =
                    __builtin_fmaf(a[row][k], b[k * columns + column], d[row * columns + column]);
    for (unsigned lane = 0; lane < 32; ++lane) {
        unsigned g = lane / 4, t = 2 * (lane % 4);
        for (unsigned i = 0; i < product.sums; ++i)
            (*sums[lane])[i] = d[(g + i / 2 % 2 * 8) * columns + i / 4 * 8 + t + i % 2];
        Flying& flying = warp.flying[product.d[lane]];
        if (--flying.products) continue;
        memcpy(product.d[lane], flying.sums.data(), 4 * product.sums);
        warp.flying.erase(product.d[lane]);
    }
}

// ---- what a warp asks for ----

struct Asked {
    float* d;
    unsigned sums;
    const unsigned* a;
    uint64_t rows, b;
    bool is_turned;
};

static void ask(void* const* operands, unsigned lanes) {
    Warp& warp = own_warp(lanes, "wgmma");
    if (!warp.is_fenced) fail("wgmma without a wgmma_fence since the last wgmma_commit");
    Wgmma product{};
    for (unsigned lane = 0; lane < 32; ++lane) {
        const Asked& mine = *static_cast<Asked*>(operands[lane]);
        if (lane && (mine.b != product.b || mine.rows != product.rows || mine.sums != product.sums))
            fail("wgmma: lanes 0 and %u name different matrices", lane);
        product.rows = mine.rows, product.b = mine.b, product.is_turned = mine.is_turned;
        product.sums = mine.sums;
        product.a[lane] = mine.a, product.d[lane] = mine.d;
        Flying& flying = warp.flying[mine.d];
        if (!flying.products++) {
            flying.sums.assign(mine.d, mine.d + mine.sums);
            memset(mine.d, 0xff, 4 * mine.sums);
        }
    }
    product.group = warp.open_group;
    warp.wgmmas.push_back(product);
    std::vector<std::vector<Wgmma>>& all = warp.block->asked;
    unsigned group = index_of(warp) / 4;
    if (all.size() <= group) all.resize(group + 1);
    if (warp.asked == all[group].size()) all[group].push_back(product);
    const Wgmma& first = all[group][warp.asked++];
    if (first.b != product.b || first.rows != product.rows || first.sums != product.sums)
        fail("wgmma %u of a warpgroup: its warps name different matrices", warp.asked);
}

void wgmma(float* d, unsigned sums, const unsigned* a, uint64_t rows, uint64_t b, bool is_turned, Site site) {
    Asked mine{d, sums, a, rows, b, is_turned};
    warp_meet(0xffffffffu, "wgmma", &mine, ask, site);
}

void wgmma_fence(Site site) {
    warp_meet(
        0xffffffffu, "wgmma_fence", nullptr,
        [](void* const*, unsigned lanes) { own_warp(lanes, "wgmma_fence").is_fenced = true; }, site);
}

void wgmma_commit(Site site) {
    warp_meet(
        0xffffffffu, "wgmma_commit", nullptr,
        [](void* const*, unsigned lanes) {
            Warp& warp = own_warp(lanes, "wgmma_commit");
            warp.is_fenced = false;
            ++warp.open_group;
        },
        site);
}

static void land(void* const* operands, unsigned lanes) {
    Warp& warp = own_warp(lanes, "wgmma_wait");
    unsigned left = *static_cast<unsigned*>(operands[0]);
    size_t done = 0;
    for (; done < warp.wgmmas.size() && warp.wgmmas[done].group + left < warp.open_group; ++done)
        happen(warp, warp.wgmmas[done]);
    warp.wgmmas.erase(warp.wgmmas.begin(), warp.wgmmas.begin() + done);
}

/* The warps of a warpgroup compute together: none is done before all have asked. */
void wgmma_wait(unsigned left, Site site) {
    Warp& warp = *self()->warp;
    std::vector<Warp>& warps = warp.block->warps;
    unsigned first = index_of(warp) / 4 * 4;
    if (first + 4 > warps.size())
        fail("wgmma at %s:%d: the block ends within a warpgroup", site.file, site.line);
    for (unsigned i = first; i < first + 4; ++i)
        while (warps[i].asked < warp.asked) spin("wgmma of the other warps of its warpgroup", site);
    warp_meet(0xffffffffu, "wgmma_wait", &left, land, site);
}

}  // namespace emulate
