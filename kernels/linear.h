// y = x · W^T + bias for weights packed once (native_linear.py) into tiles of 2 · W output features.
//
// Products are summed in float32 and rounded once. A tile streams from memory once per block of rows; the block's rows, as
// units (vectors.h), stay in the second-level cache. Long rows are cut so that a tile's part stays in the first-level
// cache while all panels of MAX_ROWS rows use it; sums wait in a small buffer and go on from there.
//
// A sum takes its products in the order of depth whatever the number of rows and threads, so that a row's bits depend on
// that row alone. Few rows take several tiles at a time instead of several sums, to hide the latency of adds.
#pragma once

#include <algorithm>

#include "multiply.h"
#include "threads.h"

constexpr int64_t ROW_BYTES = PAIRED ? 512 << 10 : 256 << 10;  // of a block's rows

template <class T>
struct Linear {
    using U = Unit<T>;
    using Lane = typename Packed<T, 0>::Lane;
    static constexpr int STEP = Packed<T, 0>::STEP;
    static constexpr int64_t DEPTH = 640 * W / STEP;  // most units of a tile's part: 40 KiB, 20 KiB at W = 8

    const T* x;         // [rows, depth]
    int64_t rows, depth;
    const Lane* tiles;  // [tiles, units of depth, STEP]
    int64_t columns;
    const T* bias;      // [columns], or null
    T* y;               // [rows, columns]

    void run(int threads) const {
        int64_t stride = units() + 16;  // not a multiple of a page, which would put all rows into the same cache sets
        int64_t most = std::max<int64_t>(ROW_BYTES / 4 / units() / MAX_ROWS, 4) * MAX_ROWS;
        for (int64_t first = 0; first < rows; first += most) {
            int64_t count = std::min(most, rows - first);
            U* block = (U*)scratch<Linear>(count * stride);
            split(count, threads, [&](int64_t start, int64_t end) {
                for (int64_t r = start; r < end; r++)
                    for (int64_t i = 0; i < depth; i += W * PER_UNIT<T>)
                        store(block + r * stride + i / PER_UNIT<T>, load_units(x + (first + r) * depth + i, depth - i));
            });
            split((columns + 2 * W - 1) / (2 * W), threads, [&](int64_t start, int64_t end) {
                int64_t tile = start;
                if (count == 1)
                    for (; tile + 4 <= end; tile += 4) run_tiles<4, 1>(tile, block, stride, first, count);
                if (count <= 3)
                    for (; tile + 2 <= end; tile += 2) run_tiles<2, 3>(tile, block, stride, first, count);
                for (; tile < end; tile++) run_tiles<1, MAX_ROWS>(tile, block, stride, first, count);
            });
        }
    }

   private:
    int64_t units() const { return (depth + PER_UNIT<T> - 1) / PER_UNIT<T>; }

    // N tiles for all rows of the block: more than one only for up to MOST rows.
    template <int N, int MOST>
    void run_tiles(int64_t tile, const U* block, int64_t stride, int64_t first, int64_t count) const {
        struct Sums;
        float* sums = scratch<Sums>(count * 2 * W);
        int64_t panels = (count + MAX_ROWS - 1) / MAX_ROWS;
        int64_t parts = panels == 1 ? 1 : (units() + DEPTH - 1) / DEPTH;
        for (int64_t part = 0; part < parts; part++) {
            int64_t k = units() * part / parts, end = units() * (part + 1) / parts;
            const Lane* weights = tiles + (tile * units() + k) * STEP;
            // Memory works while panels compute: each of the first ones fetches a line per row of what they will need next.
            int64_t next = (end - k) * STEP * N;
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = count * panel / panels;
                auto add = [&](auto rows, auto packed) {
                    constexpr int R = decltype(rows)::value;
                    decltype(packed) b[N];
                    vf c[N][R][2] = {};
                    UNROLL for (int n = 0; n < N; n++) b[n] = packed, b[n].at += n * units() * STEP;
                    if (N == 1 && part)
                        UNROLL for (int r = 0; r < R; r++) {
                            const float* sum = sums + (row + r) * 2 * W;
                            c[0][r][0] = load(sum), c[0][r][1] = load(sum + W);
                        }
                    add_products<R, N>(block + row * stride + k, stride, b, end - k, c);
                    UNROLL for (int n = 0; n < N; n++)
                        UNROLL for (int r = 0; r < R; r++) {
                            float* sum = sums + (row + r) * 2 * W;
                            if (part == parts - 1)
                                finish(tile + n, first + row + r, c[n][r]);
                            else
                                store(sum, c[n][r][0]), store(sum + W, c[n][r][1]);
                        }
                };
                with_rows<MOST>((int)(count * (panel + 1) / panels - row), [&](auto rows) {
                    if (panel < std::max(STEP / 16, 1))
                        add(rows, Packed<T, 1>{weights, next + panel * 16});
                    else
                        add(rows, Packed<T, 0>{weights, 0});
                });
            }
        }
    }

    INLINE void finish(int64_t tile, int64_t row, vf (&c)[2]) const {
        for (int half = 0; half < 2; half++) {
            int64_t column = tile * 2 * W + half * W, left = columns - column;
            if (left <= 0) return;
            vf value = c[half];
            if (bias) value += load(bias + column, left);
            store(y + row * columns + column, value, left);
        }
    }
};
