// Attention of many rows per KV head (prefill): multiplies as a linear layer does. See attention.h.
#pragma once

#include "attention_layer.h"
#include "multiply.h"
#include "threads.h"

constexpr int64_t PREFILL_TILE = 256;      // keys, at most; a multiple of 2 · W
constexpr int64_t PREFILL_VALUES = 16384;  // of a tile's keys, so that they stay in the level-2 cache
constexpr int64_t PREFILL_ROWS = 192;      // of a PrefillTask, at least one query

// Queries [first, last) of one request (rows of the flat batch), one KV head.
template <class T>
struct PrefillTask {
    const Layer<T>& layer;
    int64_t request, first, last, kv_head;

    void run() const {
        const Batch& b = layer.batch;
        int64_t group = layer.group(), rows = (last - first) * group, width = padded(b.dim);
        int64_t position = b.lengths[request] - b.starts[request + 1] + first, end = position + (last - first);
        float* q = scratch<PrefillTask>(2 * rows * width + 2 * rows + 2 * PREFILL_TILE * width + MAX_ROWS * PREFILL_TILE);
        float *o = q + rows * width, *keys = o + rows * width, *values = keys + PREFILL_TILE * width;
        float *scores = values + PREFILL_TILE * width, *most = scores + MAX_ROWS * PREFILL_TILE, *total = most + rows;
        std::fill(q, keys, 0.0f);
        std::fill(most, most + rows, -INFINITY);
        std::fill(total, total + rows, 0.0f);
        for (int64_t row = 0; row < rows; row++) {
            const T* from = layer.query + (first + row / group) * layer.query_stride + (kv_head * group + row % group) * b.dim;
            for (int64_t d = 0; d < b.dim; d += W) store(q + row * width + d, load(from + d, b.dim - d), b.dim - d);
        }
        int64_t panels = (rows + MAX_ROWS - 1) / MAX_ROWS;
        int64_t tile = std::min(PREFILL_TILE, std::max<int64_t>(PREFILL_VALUES / width / (2 * W), 1) * 2 * W);
        for (int64_t start = layer.first_key(position) / W * W; start < end; start += tile) {
            int64_t count = std::min(tile, end - start);
            widen(start, count, keys, values, width);
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = rows * panel / panels, next = rows * (panel + 1) / panels;
                // Keys that the panel's last query sees; its first query may see none of the tile any more.
                int64_t seen = std::min(count, position + (next - 1) / group + 1 - start);
                if (seen <= 0 || layer.first_key(position + row / group) >= start + count) continue;
                with_rows((int)(next - row), [&](auto n) {
                    constexpr int R = decltype(n)::value;
                    vf c[R][2];
                    for (int64_t key = 0; key < seen; key += 2 * W) {
                        multiply<R>(q + row * width, width, Plain{keys + key * b.dim, 2 * W}, b.dim, c);
                        UNROLL for (int r = 0; r < R; r++) store_pair(scores + r * PREFILL_TILE + key, c[r][0], c[r][1]);
                    }
                    float shrink[R];
                    for (int r = 0; r < R; r++)
                        shrink[r] = layer.weigh(scores + r * PREFILL_TILE, start, seen, position + (row + r) / group,
                                                most[row + r], total[row + r]);
                    for (int64_t d = 0; d < width; d += 2 * W) {
                        multiply<R>(scores, PREFILL_TILE, Plain{values + d, width}, seen, c);
                        UNROLL for (int r = 0; r < R; r++) {
                            float* to = o + (row + r) * width + d;
                            store_pair(to, load(to) * shrink[r] + c[r][0], load(to + W) * shrink[r] + c[r][1]);
                        }
                    }
                });
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            T* to = layer.output + ((first + row / group) * b.heads + kv_head * group + row % group) * b.dim;
            float share = 1.0f / total[row];
            for (int64_t d = 0; d < b.dim; d += W) store(to + d, load(o + row * width + d) * share, b.dim - d);
        }
    }

   private:
    // Keys [start, start + count) as float32: ``keys`` [PREFILL_TILE / 2W, dim, 2W], ``values`` [PREFILL_TILE, width]. What
    // lies beyond reads as zero.
    void widen(int64_t start, int64_t count, float* keys, float* values, int64_t width) const {
        int64_t dim = layer.batch.dim, size = layer.batch.block_size;
        for (int64_t key = 0; key < count; key += W) {
            float* column = keys + key / (2 * W) * (2 * W) * dim + key % (2 * W);
            const T* from[W];
            for (int i = 0; i < W; i++) {
                int64_t at = start + key + i;
                from[i] = key + i < count ? layer.block(request, at / size, kv_head) + at % size * dim : nullptr;
            }
            int64_t d = 0;
            if (key + W <= count)
                for (; d + W <= dim; d += W) {
                    vf lines[W];
                    UNROLL for (int i = 0; i < W; i++) lines[i] = load(from[i] + d);
                    transpose(lines);
                    UNROLL for (int i = 0; i < W; i++) store(column + (d + i) * 2 * W, lines[i]);
                    UNROLL for (int i = 0; i < W; i++)
                        store(values + (key + i) * width + d, load(from[i] + layer.to_values() + d));
                }
            for (; d < dim; d += W) {
                vf lines[W];
                for (int i = 0; i < W; i++) lines[i] = from[i] ? load(from[i] + d, dim - d) : vf{};
                transpose(lines);
                for (int i = 0; i < W && d + i < dim; i++) store(column + (d + i) * 2 * W, lines[i]);
                for (int i = 0; i < W; i++) {
                    vf line = from[i] ? load(from[i] + layer.to_values() + d, dim - d) : vf{};
                    store(values + (key + i) * width + d, line);
                }
            }
        }
        // A panel's columns come in pairs of vectors: the second one of the last pair must be finite.
        for (int64_t key = (count + W - 1) / W * W; key < (count + 2 * W - 1) / (2 * W) * 2 * W; key += W)
            for (int64_t d = 0; d < dim; d++) store(keys + (key - W) * dim + d * 2 * W + W, vf{});
    }
};
