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

// B as packed weights of type T: STEP lanes for each row k, of one unit of 2 · W columns. While it is worked on, LINES cache
// lines of each row are fetched ``ahead`` lanes further on.
template <class T, int LINES>
struct Packed {
    static constexpr bool HALVES = std::is_same_v<T, bf16> && !PAIRED;  // two columns in a lane
    static constexpr int STEP = HALVES ? W : 2 * W;
    using Lane = std::conditional_t<std::is_same_v<T, float>, float, uint32_t>;
    const Lane* at;
    int64_t ahead;

    template <class V>
    INLINE void get(int64_t k, V& a, V& b) const {
        const Lane* p = at + k * STEP;
        UNROLL for (int i = 0; i < LINES; i++) __builtin_prefetch(p + ahead + i * 16);
        if constexpr (HALVES) {
            vu both = load(p);  // column i in the lower half of lane i, column W + i in the upper half
            a = (vf)(both << 16), b = (vf)(both & HIGH);
        } else {
            a = load(p), b = load(p + W);
        }
    }
};

// Adds A · B to C for N panels B of 2 · W columns; A [R, depth] has rows ``stride`` apart; A and B in units. A sum takes its
// products one by one, in the order of depth, for any R and N: a row's bits must not depend on the rows beside it.
template <int R, int N, class U, class B>
INLINE void add_products(const U* a, int64_t stride, const B (&b)[N], int64_t depth, vf (&c)[N][R][2]) {
    for (int64_t k = 0; k < depth; k++) {
        UNROLL for (int n = 0; n < N; n++) {
            decltype(splat(*a)) b0, b1;
            b[n].get(k, b0, b1);
            UNROLL for (int r = 0; r < R; r++) {
                auto x = splat(a[r * stride + k]);
                c[n][r][0] = add_product(c[n][r][0], x, b0);
                c[n][r][1] = add_product(c[n][r][1], x, b1);
            }
        }
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
