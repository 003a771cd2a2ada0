// y = x · W^T + bias for bfloat16 weights, packed once (native_linear.py) into tiles of 2 · W output features.
//
// Products are summed in float32 and rounded once. A tile streams from memory once per block of rows; the block's rows, as
// units (vectors.h), stay in the second-level cache. Long rows are cut so that a tile's part stays in the first-level
// cache while all panels of MAX_ROWS rows use it; partial sums wait in a small buffer.
#pragma once

#include <algorithm>

#include "multiply.h"
#include "threads.h"

constexpr int64_t ROW_BYTES = PAIRED ? 512 << 10 : 256 << 10;  // of a block's rows
constexpr int64_t DEPTH = PAIRED ? 320 : 640;                  // most units of a tile's part: 40 KiB, 20 KiB at W = 8

struct Linear {
    using U = Unit<bf16>;
    static constexpr int STEP = Packed<0>::STEP;

    const bf16* x;          // [rows, depth]
    int64_t rows, depth;
    const uint32_t* tiles;  // [tiles, units of depth, STEP]
    int64_t columns;
    const bf16* bias;       // [columns], or null
    bf16* y;                // [rows, columns]

    void run(int threads) const {
        int64_t stride = units() + 16;  // not a multiple of a page, which would put all rows into the same cache sets
        int64_t most = std::max<int64_t>(ROW_BYTES / 4 / units() / MAX_ROWS, 4) * MAX_ROWS;
        for (int64_t first = 0; first < rows; first += most) {
            int64_t count = std::min(most, rows - first);
            U* block = (U*)scratch<Linear>(count * stride);
            split(count, threads, [&](int64_t start, int64_t end) {
                for (int64_t r = start; r < end; r++)
                    for (int64_t i = 0; i < depth; i += W * PER_UNIT<bf16>)
                        store(block + r * stride + i / PER_UNIT<bf16>, load_units(x + (first + r) * depth + i, depth - i));
            });
            split((columns + 2 * W - 1) / (2 * W), threads, [&](int64_t start, int64_t end) {
                for (int64_t tile = start; tile < end; tile++) run_tile(tile, block, stride, first, count);
            });
        }
    }

   private:
    int64_t units() const { return (depth + PER_UNIT<bf16> - 1) / PER_UNIT<bf16>; }

    void run_tile(int64_t tile, const U* block, int64_t stride, int64_t first, int64_t count) const {
        struct Sums;
        float* sums = scratch<Sums>(count * 2 * W);
        int64_t panels = (count + MAX_ROWS - 1) / MAX_ROWS;
        int64_t parts = panels == 1 ? 1 : (units() + DEPTH - 1) / DEPTH;
        for (int64_t part = 0; part < parts; part++) {
            int64_t k = units() * part / parts, end = units() * (part + 1) / parts;
            const uint32_t* weights = tiles + (tile * units() + k) * STEP;
            // Memory works while panels compute: each of the first ones fetches a line per row of what they will need next.
            int64_t next = (end - k) * STEP;
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = count * panel / panels;
                auto add = [&](auto n, auto b) {
                    constexpr int R = decltype(n)::value;
                    vf c[R][2];
                    multiply<R>(block + row * stride + k, stride, b, end - k, c);
                    UNROLL for (int r = 0; r < R; r++) {
                        float* sum = sums + (row + r) * 2 * W;
                        if (part) c[r][0] += load(sum), c[r][1] += load(sum + W);
                        if (part == parts - 1)
                            finish(tile, first + row + r, c[r]);
                        else
                            store(sum, c[r][0]), store(sum + W, c[r][1]);
                    }
                };
                with_rows((int)(count * (panel + 1) / panels - row), [&](auto n) {
                    if (panel < std::max(STEP / 16, 1))
                        add(n, Packed<1>{weights, next + panel * 16});
                    else
                        add(n, Packed<0>{weights, 0});
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
