// Attention over paged KV (flat batch, grouped heads, sliding window, soft cap), with the online softmax of Milakov and
// Gimelshein (2018): keys are taken tile by tile; the sum so far is scaled down when a larger score appears.
//
// The queries of a request that share a KV head are ``rows``, query by query, each query's heads side by side, so that
// every key and value is loaded once for all of them. Few rows (decode, draft verification) take dot products straight
// from the cache: DecodeTask. Many rows (prefill) widen a tile of keys, transposed, and of values once, and then
// multiply as a linear layer does: PrefillTask. Only slots below a request's length are read.
#pragma once

#include <algorithm>
#include <type_traits>

#include "multiply.h"
#include "threads.h"

constexpr int64_t DECODE_ROWS = 16;    // a request with more rows per KV head is a PrefillTask
constexpr int64_t DECODE_TILE = 256;   // keys
constexpr int64_t PREFILL_TILE = 64;   // keys; a multiple of 2 · W
constexpr int64_t PREFILL_ROWS = 192;  // of a PrefillTask, at least one query

INLINE int64_t padded(int64_t dim) { return (dim + 2 * W - 1) / (2 * W) * 2 * W; }

// A step's requests; offsets in values. Filled by native.py, in this order.
struct Batch {
    const int64_t* tables;  // [requests, table_width]: block ids
    const int64_t* starts;  // [requests + 1]: first row of each request in the flat batch
    const int64_t* lengths; // [requests]
    int64_t requests, table_width;
    int64_t heads, kv_heads, dim, block_size, block_stride;
};

// What a layer adds. ``keys`` points at the layer's K in block 0; V lies kv_heads · block_size · dim behind it.
template <class T>
struct Layer {
    const Batch& batch;
    const T* query;        // [tokens, heads, dim], tokens query_stride apart
    int64_t query_stride;
    const T* keys;
    T* output;             // [tokens, heads, dim]
    float scale;
    int64_t window;        // 0: none
    float soft_cap;        // 0: none

    int64_t group() const { return batch.heads / batch.kv_heads; }
    const T* block(int64_t request, int64_t index, int64_t kv_head) const {
        return keys + batch.tables[request * batch.table_width + index] * batch.block_stride +
               kv_head * batch.block_size * batch.dim;
    }
    int64_t to_values() const { return batch.kv_heads * batch.block_size * batch.dim; }
    // The first key that a query at ``position`` sees.
    int64_t first_key(int64_t position) const {
        return window && position >= window ? position - window + 1 : 0;
    }

    // Turns ``scores`` of keys [first, first + count) into weights of a row at ``position``; those it does not see get
    // 0. ``count`` is rounded up to W. Updates maximum and sum; returns what the row's output so far is scaled by.
    INLINE float weigh(float* scores, int64_t first, int64_t count, int64_t position, float& most, float& total) const {
        int64_t low = std::max<int64_t>(first_key(position) - first, 0), high = std::min(position + 1 - first, count);
        if (soft_cap)
            for (int64_t i = 0; i < count; i += W) {
                // tanh x = 1 - 2 / (e^2x + 1)
                vf e = exponential(load(scores + i) * (2.0f * scale / soft_cap));
                store(scores + i, soft_cap - 2.0f * soft_cap / (e + 1.0f));
            }
        for (int64_t i = 0; i < std::min(low, count); i++) scores[i] = -INFINITY;
        for (int64_t i = std::max<int64_t>(high, 0); i < (count + W - 1) / W * W; i++) scores[i] = -INFINITY;
        float factor = soft_cap ? 1.0f : scale;  // what scores are still to be multiplied by, a positive number
        vf maxima = splat(-INFINITY);
        for (int64_t i = 0; i < count; i += W) maxima = max(maxima, load(scores + i));
        float now = std::max(most, largest(maxima) * factor);
        if (now == -INFINITY) {
            for (int64_t i = 0; i < count; i += W) store(scores + i, vf{});
            return 1.0f;
        }
        vf sum_of = {};
        for (int64_t i = 0; i < count; i += W) {
            vf p = exponential(load(scores + i) * factor - now);
            store(scores + i, p);
            sum_of += p;
        }
        float shrink = most == now ? 1.0f : exponential(splat(most - now))[0];
        most = now, total = total * shrink + sum(sum_of);
        return shrink;
    }
};

// All queries of one request, KV heads [kv_start, kv_end).
template <class T>
struct DecodeTask {
    const Layer<T>& layer;
    int64_t request, kv_start, kv_end;

    void run() const {
        const Batch& b = layer.batch;
        int64_t group = layer.group(), first_row = b.starts[request], queries = b.starts[request + 1] - first_row;
        int64_t rows = queries * group, all = rows * (kv_end - kv_start), width = padded(b.dim);
        int64_t length = b.lengths[request], position = length - queries;
        float* q = scratch<DecodeTask>(2 * all * width + 2 * all + all * DECODE_TILE);
        float *o = q + all * width, *scores = o + all * width, *most = scores + all * DECODE_TILE, *total = most + all;
        std::fill(o, o + all * width, 0.0f);
        std::fill(most, most + all, -INFINITY);
        std::fill(total, total + all, 0.0f);
        auto token = [&](int64_t row) { return first_row + row / group; };
        auto head = [&](int64_t g, int64_t row) { return g * group + row % group; };
        for (int64_t g = kv_start, i = 0; g < kv_end; g++)
            for (int64_t row = 0; row < rows; row++, i++) {
                const T* from = layer.query + token(row) * layer.query_stride + head(g, row) * b.dim;
                for (int64_t d = 0; d < b.dim; d += 2 * W) {
                    vf x, y;
                    load_pair(from + d, b.dim - d, x, y);
                    store(q + i * width + d, x), store(q + i * width + d + W, y);
                }
            }
        // Whole blocks where they fit. A block's heads are read one after the other, as they lie in memory.
        int64_t tile = b.block_size > DECODE_TILE ? DECODE_TILE : DECODE_TILE / b.block_size * b.block_size;
        for (int64_t start = layer.first_key(position) / b.block_size * b.block_size; start < length; start += tile) {
            int64_t end = std::min(start + tile, length);
            each_block(start, end, [&](int64_t index, int64_t slot, int64_t stop) {
                each_panel(rows, [&](auto n, int64_t g, int64_t row) {
                    constexpr int R = decltype(n)::value;
                    int64_t i = (g - kv_start) * rows + row;
                    int64_t ahead = std::min(index + 1, (length - 1) / b.block_size);
                    dots<R>(layer.block(request, index, g), layer.block(request, ahead, g), slot, stop, q + i * width, width,
                            scores + i * DECODE_TILE + index * b.block_size + slot - start);
                });
            });
            for (int64_t i = 0; i < all; i++) {
                float shrink = layer.weigh(scores + i * DECODE_TILE, start, end - start, position + i % rows / group,
                                           most[i], total[i]);
                if (shrink != 1.0f)
                    for (int64_t d = 0; d < width; d += W) store(o + i * width + d, load(o + i * width + d) * shrink);
            }
            each_block(start, end, [&](int64_t index, int64_t slot, int64_t stop) {
                each_panel(rows, [&](auto n, int64_t g, int64_t row) {
                    constexpr int R = decltype(n)::value;
                    int64_t i = (g - kv_start) * rows + row;
                    mix<R>(layer.block(request, index, g) + layer.to_values(), slot, stop,
                           scores + i * DECODE_TILE + index * b.block_size - start, o + i * width, width);
                });
            });
        }
        for (int64_t g = kv_start, i = 0; g < kv_end; g++)
            for (int64_t row = 0; row < rows; row++, i++) {
                T* to = layer.output + (token(row) * b.heads + head(g, row)) * b.dim;
                float share = 1.0f / total[i];
                for (int64_t d = 0; d < b.dim; d += 2 * W)
                    store_pair(to + d, b.dim - d, load(o + i * width + d) * share, load(o + i * width + d + W) * share);
            }
    }

   private:
    // Calls f(index of a block, first slot, end) for the blocks of keys [start, end).
    template <class F>
    INLINE void each_block(int64_t start, int64_t end, F f) const {
        int64_t size = layer.batch.block_size;
        for (int64_t key = start; key < end;) {
            int64_t index = key / size, stop = std::min(size, end - index * size);
            f(index, key % size, stop);
            key = index * size + stop;
        }
    }

    // Calls f(std::integral_constant<int, R>, KV head, first row) for up to three rows of a head at a time.
    template <class F>
    INLINE void each_panel(int64_t rows, F f) const {
        for (int64_t g = kv_start; g < kv_end; g++) {
            int64_t row = 0;
            for (; row + 3 <= rows; row += 3) f(std::integral_constant<int, 3>{}, g, row);
            if (rows - row == 2) f(std::integral_constant<int, 2>{}, g, row);
            if (rows - row == 1) f(std::integral_constant<int, 1>{}, g, row);
        }
    }

    // Scores of R rows, DECODE_TILE apart, for slots [slot, stop) of a block's keys of one head.
    template <int R>
    INLINE void dots(const T* keys, const T* ahead, int64_t slot, int64_t stop, const float* q, int64_t width, float* scores) const {
        constexpr int SLOTS = R == 1 ? 8 : 4;
        int64_t dim = layer.batch.dim;
        if (dim % (2 * W) == 0)
            for (; slot + SLOTS <= stop; slot += SLOTS, scores += SLOTS) {
                for (int64_t i = slot * dim; i < (slot + SLOTS) * dim; i += 64 / (int64_t)sizeof(T)) {
                    __builtin_prefetch(ahead + i);
                    __builtin_prefetch(ahead + layer.to_values() + i, 0, 2);
                }
                dot<R, SLOTS, false>(keys + slot * dim, q, width, scores);
            }
        else
            for (; slot + 4 <= stop; slot += 4, scores += 4) dot<R, 4, true>(keys + slot * dim, q, width, scores);
        for (; slot < stop; slot++, scores++) dot<R, 1, true>(keys + slot * dim, q, width, scores);
    }

    // TAIL: the head's size may not be a multiple of 2 · W.
    template <int R, int SLOTS, bool TAIL>
    INLINE void dot(const T* keys, const float* q, int64_t width, float* scores) const {
        int64_t dim = layer.batch.dim, d = 0;
        vf acc[R][SLOTS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < SLOTS; s++) acc[r][s] = vf{};
        for (; d + 2 * W <= dim; d += 2 * W) {
            UNROLL for (int s = 0; s < SLOTS; s++) {
                vf k0, k1;
                load_pair(keys + s * dim + d, k0, k1);
                UNROLL for (int r = 0; r < R; r++) {
                    acc[r][s] += k0 * load(q + r * width + d);
                    acc[r][s] += k1 * load(q + r * width + d + W);
                }
            }
        }
        if (TAIL && d < dim)
            UNROLL for (int s = 0; s < SLOTS; s++) {
                vf k0, k1;
                load_pair(keys + s * dim + d, dim - d, k0, k1);
                UNROLL for (int r = 0; r < R; r++)
                    acc[r][s] += k0 * load(q + r * width + d) + k1 * load(q + r * width + d + W);
            }
        UNROLL for (int r = 0; r < R; r++) {
            if constexpr (SLOTS == 1)
                scores[r * DECODE_TILE] = sum(acc[r][0]);
            else
                UNROLL for (int s = 0; s < SLOTS; s += 4)
                    *(v4_any*)(scores + r * DECODE_TILE + s) =
                        sums(acc[r][s], acc[r][s + 1], acc[r][s + 2], acc[r][s + 3]);
        }
    }

    // Adds the values of slots [slot, stop), weighted by ``p``, whose rows are DECODE_TILE apart, to R rows of ``o``.
    template <int R>
    INLINE void mix(const T* values, int64_t slot, int64_t stop, const float* p, float* o, int64_t width) const {
        constexpr int CHUNKS = R == 1 ? 4 : 2;
        int64_t dim = layer.batch.dim, d = 0;
        for (; d + CHUNKS * 2 * W <= dim; d += CHUNKS * 2 * W) mix_at<R, CHUNKS>(values + d, slot, stop, p, o + d, width, dim);
        for (; d < dim; d += 2 * W) mix_at<R, 1>(values + d, slot, stop, p, o + d, width, dim - d);
    }

    template <int R, int CHUNKS>
    INLINE void mix_at(const T* values, int64_t slot, int64_t stop, const float* p, float* o, int64_t width,
                       int64_t left) const {
        int64_t dim = layer.batch.dim;
        vf acc[R][2 * CHUNKS];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < 2 * CHUNKS; c++) acc[r][c] = load(o + r * width + c * W);
        for (; slot < stop; slot++)
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                vf v0, v1;
                if (CHUNKS > 1)
                    load_pair(values + slot * dim + c * 2 * W, v0, v1);
                else
                    load_pair(values + slot * dim, left, v0, v1);
                UNROLL for (int r = 0; r < R; r++) {
                    vf weight = splat(p[r * DECODE_TILE + slot]);
                    acc[r][2 * c] += weight * v0;
                    acc[r][2 * c + 1] += weight * v1;
                }
            }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < 2 * CHUNKS; c++) store(o + r * width + c * W, acc[r][c]);
    }
};

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
        for (int64_t start = layer.first_key(position) / W * W; start < end; start += PREFILL_TILE) {
            int64_t count = std::min(PREFILL_TILE, end - start);
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
                        multiply<R>(q + row * width, width, Plain{keys + key, PREFILL_TILE}, b.dim, c);
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
    // Keys [start, start + count) as float32: ``keys`` [dim, PREFILL_TILE], ``values`` [PREFILL_TILE, width]. What lies
    // beyond reads as zero.
    void widen(int64_t start, int64_t count, float* keys, float* values, int64_t width) const {
        int64_t dim = layer.batch.dim, size = layer.batch.block_size;
        for (int64_t key = 0; key < count; key += W) {
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
                    UNROLL for (int i = 0; i < W; i++) store(keys + (d + i) * PREFILL_TILE + key, lines[i]);
                    UNROLL for (int i = 0; i < W; i++)
                        store(values + (key + i) * width + d, load(from[i] + layer.to_values() + d));
                }
            for (; d < dim; d += W) {
                vf lines[W];
                for (int i = 0; i < W; i++) lines[i] = from[i] ? load(from[i] + d, dim - d) : vf{};
                transpose(lines);
                for (int i = 0; i < W && d + i < dim; i++) store(keys + (d + i) * PREFILL_TILE + key, lines[i]);
                for (int i = 0; i < W; i++) {
                    vf line = from[i] ? load(from[i] + layer.to_values() + d, dim - d) : vf{};
                    store(values + (key + i) * width + d, line);
                }
            }
        }
        // A panel's columns come in pairs of vectors: the second one of the last pair must be finite.
        for (int64_t key = (count + W - 1) / W * W; key < (count + 2 * W - 1) / (2 * W) * 2 * W; key += W)
            for (int64_t d = 0; d < dim; d++) store(keys + d * PREFILL_TILE + key, vf{});
    }
};

template <class T>
void attend(const Layer<T>& layer, int threads) {
    const Batch& b = layer.batch;
    int64_t queries = std::max<int64_t>(PREFILL_ROWS / layer.group(), 1);
    // Requests differ in length, so tasks are handed out one by one: a request's heads together where one thread
    // works (a block's heads are neighbours in memory), else one KV head each.
    int64_t heads = threads > 1 ? 1 : b.kv_heads;
    int64_t tasks = 0;
    std::vector<int64_t> ends;
    for (int64_t r = 0; r < b.requests; r++) {
        int64_t count = b.starts[r + 1] - b.starts[r];
        if (count * layer.group() > DECODE_ROWS)
            tasks += (count + queries - 1) / queries * b.kv_heads;
        else if (count)
            tasks += (b.kv_heads + heads - 1) / heads;
        ends.push_back(tasks);
    }
    share(tasks, threads, [&](int64_t task) {
        int64_t request = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        int64_t index = task - (request ? ends[request - 1] : 0);
        int64_t start = b.starts[request], end = b.starts[request + 1];
        if ((end - start) * layer.group() > DECODE_ROWS) {
            int64_t first = start + index / b.kv_heads * queries;
            PrefillTask<T>{layer, request, first, std::min(first + queries, end), index % b.kv_heads}.run();
        } else {
            DecodeTask<T>{layer, request, index * heads, std::min((index + 1) * heads, b.kv_heads)}.run();
        }
    });
}
