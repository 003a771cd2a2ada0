// The inner loop of linear layers and of attention over long chunks: R rows times 2 · W columns, kept in registers.
#pragma once

#include "vectors.h"

// Most rows whose accumulators fit the registers beside two vectors of B.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif

// B as rows of units, ``stride`` apart.
template <class U>
struct Plain {
    const U* at;
    int64_t stride;
    template <class V>
    INLINE void get(int64_t k, V& a, V& b) const { a = load(at + k * stride), b = load(at + k * stride + W); }
};

// B as packed weights: STEP lanes for each row k, of one unit of 2 · W columns. While it is worked on, LINES cache lines of
// each row are fetched ``ahead`` lanes further on.
template <int LINES>
struct Packed {
    static constexpr int STEP = PAIRED ? 2 * W : W;
    const uint32_t* at;
    int64_t ahead;

    template <class V>
    INLINE void get(int64_t k, V& a, V& b) const {
        const uint32_t* p = at + k * STEP;
        UNROLL for (int i = 0; i < LINES; i++) __builtin_prefetch(p + ahead + i * 16);
        if constexpr (PAIRED) {
            a = load(p), b = load(p + W);
        } else {
            vu both = load(p);  // column i in the lower half of lane i, column W + i in the upper half
            a = (vf)(both << 16), b = (vf)(both & HIGH);
        }
    }
};

// C = A · B for A [R, depth], rows ``stride`` apart; A and B in units. Few rows are summed in several parts, to hide the
// latency of adds.
template <int R, class U, class B>
INLINE void multiply(const U* a, int64_t stride, B b, int64_t depth, vf (&c)[R][2]) {
    constexpr int PARTS = R == 1 ? 4 : R <= 3 ? 2 : 1;
    vf part[PARTS][R][2];
    UNROLL for (int u = 0; u < PARTS; u++) UNROLL for (int r = 0; r < R; r++) part[u][r][0] = part[u][r][1] = vf{};
    auto add = [&](int u, int64_t k) __attribute__((always_inline)) {
        decltype(splat(*a)) b0, b1;
        b.get(k, b0, b1);
        UNROLL for (int r = 0; r < R; r++) {
            auto x = splat(a[r * stride + k]);
            part[u][r][0] = add_product(part[u][r][0], x, b0);
            part[u][r][1] = add_product(part[u][r][1], x, b1);
        }
    };
    int64_t k = 0;
    for (; k + PARTS <= depth; k += PARTS) UNROLL for (int u = 0; u < PARTS; u++) add(u, k + u);
    for (; k < depth; k++) add(0, k);
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int u = 1; u < PARTS; u++) part[0][r][0] += part[u][r][0], part[0][r][1] += part[u][r][1];
        c[r][0] = part[0][r][0], c[r][1] = part[0][r][1];
    }
}

// Calls f(std::integral_constant<int, rows>) for rows in [1, MAX_ROWS].
template <int R = MAX_ROWS, class F>
INLINE void with_rows(int rows, F f) {
    if constexpr (R > 1) {
        if (rows < R) return with_rows<R - 1>(rows, f);
    }
    f(std::integral_constant<int, R>{});
}
