// The inner loop of linear layers and of attention over long chunks: R rows times 2 · W columns, kept in registers.
#pragma once

#include "vectors.h"

// Most rows whose accumulators fit the registers beside two vectors of B.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif

// B as rows of float32, ``stride`` apart.
struct Plain {
    const float* at;
    int64_t stride;
    INLINE void get(int64_t k, vf& a, vf& b) const { a = load(at + k * stride), b = load(at + k * stride + W); }
};

// B as packed bfloat16: lane i of row k holds column i in its lower half and column W + i in its upper half.
struct Packed {
    const uint32_t* at;
    INLINE void get(int64_t k, vf& a, vf& b) const {
        vu both = *(const vu_any*)(at + k * W);
        a = (vf)(both << 16), b = (vf)(both & HIGH);
    }
};

// C = A · B for A [R, depth], rows ``stride`` apart. Few rows are summed in several parts, to hide the latency of adds.
template <int R, class B>
INLINE void multiply(const float* a, int64_t stride, B b, int64_t depth, vf (&c)[R][2]) {
    constexpr int PARTS = R == 1 ? 4 : R <= 3 ? 2 : 1;
    vf part[PARTS][R][2];
    UNROLL for (int u = 0; u < PARTS; u++) UNROLL for (int r = 0; r < R; r++) part[u][r][0] = part[u][r][1] = vf{};
    int64_t k = 0;
    for (; k + PARTS <= depth; k += PARTS) {
        UNROLL for (int u = 0; u < PARTS; u++) {
            vf b0, b1;
            b.get(k + u, b0, b1);
            UNROLL for (int r = 0; r < R; r++) {
                vf x = splat(a[r * stride + k + u]);
                part[u][r][0] += x * b0;
                part[u][r][1] += x * b1;
            }
        }
    }
    for (; k < depth; k++) {
        vf b0, b1;
        b.get(k, b0, b1);
        UNROLL for (int r = 0; r < R; r++) {
            vf x = splat(a[r * stride + k]);
            part[0][r][0] += x * b0;
            part[0][r][1] += x * b1;
        }
    }
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
