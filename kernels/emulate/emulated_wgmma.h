/* The wrappers of wgmma.cuh as C++ on fibers. */
#pragma once

inline void wgmma_fence(EMULATE_SITE) { emulate::wgmma_fence(site); }
template <int Tiles>
void wgmma_pin(float (&)[Tiles][4]) {}
template <int Count>
void wgmma_pin(float (&)[Count]) {}
inline void wgmma_commit(EMULATE_SITE) { emulate::wgmma_commit(site); }

template <int Left>
void wgmma_wait(EMULATE_SITE) {
    emulate::wgmma_wait(Left, site);
}

template <int Sums>
void wgmma(float (&d)[Sums], const uint4& a, u64 b, bool is_upon = true, EMULATE_SITE) {
    static_assert(Sums == 32 || Sums == 64 || Sums == 128);
    if (!is_upon)
        for (float& sum : d) sum = 0.f;
    emulate::wgmma(d, Sums, &a.x, 0, b, false, site);
}

template <int Tiles>
void wgmma(float (&d)[Tiles][4], u64 a, u64 b, EMULATE_SITE) {
    static_assert(Tiles == 18 || Tiles == 6);
    emulate::wgmma(d[0], 4 * Tiles, nullptr, a, b, false, site);
}

inline void wgmma_turned(float (&d)[8][4], const uint4& a, u64 b, EMULATE_SITE) {
    emulate::wgmma(d[0], 32, &a.x, 0, b, true, site);
}

template <int Count>
void registers_give() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}
template <int Count>
void registers_take() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}
