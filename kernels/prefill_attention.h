// Attention of many rows per KV head (prefill): multiplies as a linear layer does. See attention.h.
#pragma once

#include "attention_layer.h"
#include "multiply.h"
#include "threads.h"

constexpr int64_t PREFILL_ROWS = PAIRED ? 384 : 192;  // of a PrefillTask, at least one query

// Queries [first, last) of one request (rows of the flat batch), one KV head.
template <class T>
struct PrefillTask {
    const Layer<T>& layer;
    int64_t request, first, last, kv_head;

    using U = Unit<T>;
    static constexpr int64_t PER = PER_UNIT<T>, TILE = KEY_TILE<T>;

    void run() const {
        const Batch& b = layer.batch;
        int64_t group = layer.group(), rows = (last - first) * group, width = padded(b.dim), units = width / PER;
        int64_t position = b.lengths[request] - b.starts[request + 1] + first, end = position + (last - first);
        float* o = scratch<PrefillTask>(rows * (width + units + 2) + 2 * TILE * units + MAX_ROWS * TILE);
        float *scores = o + rows * width, *most = scores + MAX_ROWS * TILE, *total = most + rows;
        U *q = (U*)(total + rows), *keys = q + rows * units, *values = keys + TILE * units;
        std::fill(o, o + rows * width, 0.0f);
        std::fill(most, most + rows, -INFINITY);
        std::fill(total, total + rows, 0.0f);
        for (int64_t row = 0; row < rows; row++) {
            const T* from = layer.query + (first + row / group) * layer.query_stride + (kv_head * group + row % group) * b.dim;
            for (int64_t u = 0; u < units; u += W)
                store(q + row * units + u, load_units(from + u * PER, std::max<int64_t>(b.dim - u * PER, 0)));
        }
        int64_t panels = (rows + MAX_ROWS - 1) / MAX_ROWS;
        int64_t tile = layer.tile(), count;
        for (int64_t start = layer.first_key(position) / (2 * W) * (2 * W); start < end; start += count) {
            count = std::min(tile - start % tile, end - start);
            pack(start, count, keys, values, width);
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = rows * panel / panels, next = rows * (panel + 1) / panels;
                // Keys that the panel's last query sees; its first query may see none of the tile any more.
                int64_t seen = std::min(count, position + (next - 1) / group + 1 - start);
                if (seen <= 0 || layer.first_key(position + row / group) >= start + count) continue;
                with_rows((int)(next - row), [&](auto n) {
                    constexpr int R = decltype(n)::value;
                    for (int64_t key = 0; key < seen; key += 2 * W) {
                        vf c[1][R][2] = {};
                        Plain<U> b[] = {{keys + key * depth(), 2 * W}};
                        add_products<R>(q + row * units, units, b, depth(), c);
                        UNROLL for (int r = 0; r < R; r++)
                            store_pair(scores + r * TILE + key, c[0][r][0], c[0][r][1]);
                    }
                    float shrink[R];
                    for (int r = 0; r < R; r++)
                        shrink[r] = layer.weigh(scores + r * TILE, start, seen, position + (row + r) / group,
                                                most[row + r], total[row + r]);
                    for (int64_t d = 0; d < width; d += 2 * W) {
                        float* to = o + row * width + d;
                        Plain<U> b[] = {{values + d, width}};
                        vf c[1][R][2];
                        UNROLL for (int r = 0; r < R; r++) {
                            c[0][r][0] = load(to + r * width) * shrink[r];
                            c[0][r][1] = load(to + r * width + W) * shrink[r];
                        }
                        add_products<R>((const U*)scores, TILE, b, (seen + PER - 1) / PER, c);
                        UNROLL for (int r = 0; r < R; r++) store_pair(to + r * width, c[0][r][0], c[0][r][1]);
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
    // Units of a key.
    int64_t depth() const { return (layer.batch.dim + PER - 1) / PER; }

    // Keys [start, start + count) in units of head dimensions, transposed: ``keys`` [TILE / 2W, depth, 2W]; in units of
    // neighbouring keys: ``values`` [TILE / PER, width]. What lies beyond reads as zero.
    void pack(int64_t start, int64_t count, U* keys, U* values, int64_t width) const {
        int64_t dim = layer.batch.dim, size = layer.batch.block_size, units = depth();
        for (int64_t key = 0; key < count; key += W) {
            U* column = keys + key / (2 * W) * (2 * W) * units + key % (2 * W);
            const T* from[W];
            int64_t index = (start + key) / size, slot = (start + key) % size;
            const T* block = layer.block(request, index, kv_head);
            for (int i = 0; i < W; i++, slot++) {
                if (slot == size && key + i < count) block = layer.block(request, ++index, kv_head), slot = 0;
                from[i] = key + i < count ? block + slot * dim : nullptr;
            }
            int64_t u = 0;
            if (key + W <= count)
                for (; (u + W) * PER <= dim; u += W) {
                    Units<T> lines[W];
                    UNROLL for (int i = 0; i < W; i++) lines[i] = load_units(from[i] + u * PER, W * PER);
                    transpose(lines);
                    UNROLL for (int i = 0; i < W; i++) store(column + (u + i) * 2 * W, lines[i]);
                }
            for (; u < units; u += W) {
                Units<T> lines[W];
                for (int i = 0; i < W; i++)
                    lines[i] = from[i] ? load_units(from[i] + u * PER, dim - u * PER) : Units<T>{};
                transpose(lines);
                for (int i = 0; i < W && u + i < units; i++) store(column + (u + i) * 2 * W, lines[i]);
            }
            auto pack_values = [&](auto whole) {
                auto line = [&](int i, int64_t d) {
                    return whole || from[i] ? load(from[i] + layer.to_values() + d, whole ? W : dim - d) : vf{};
                };
                for (int i = 0; i < W; i += PER)
                    for (int64_t d = 0; d < dim; d += W) {
                        U* to = values + (key + i) / PER * width + d;
                        if constexpr (PER == 2)
                            store(to, (vu)line(i, d) >> 16 | (vu)line(i + 1, d));
                        else
                            store(to, line(i, d));
                    }
            };
            if (key + W <= count && dim % W == 0)
                pack_values(std::true_type{});
            else
                pack_values(std::false_type{});
        }
        // A panel's columns come in pairs of vectors: the second one of the last pair must be finite.
        for (int64_t key = (count + W - 1) / W * W; key < (count + 2 * W - 1) / (2 * W) * 2 * W; key += W)
            for (int64_t u = 0; u < units; u++) store(keys + (key - W) * units + u * 2 * W + W, splat((U)0));
    }
};
