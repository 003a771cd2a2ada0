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

constexpr int64_t DECODE_ROWS = 16;        // a request with more rows per KV head is a PrefillTask
constexpr int64_t DECODE_TILE = 256;       // keys
constexpr int64_t PREFILL_TILE = 256;      // keys, at most; a multiple of 2 · W
constexpr int64_t PREFILL_VALUES = 16384;  // of a tile's keys, so that they stay in the level-2 cache
constexpr int64_t PREFILL_ROWS = 192;      // of a PrefillTask, at least one query

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
        // What scores are still to be multiplied by, a positive number. Weights are powers of two: e^x = 2^(x · log2 e).
        float factor = 1.44269504088896341f * (soft_cap ? 1.0f : scale);
        vf maxima = splat(-INFINITY);
        for (int64_t i = 0; i < count; i += W) maxima = max(maxima, load(scores + i));
        float now = std::max(most, largest(maxima) * factor);
        if (now == -INFINITY) {
            for (int64_t i = 0; i < count; i += W) store(scores + i, vf{});
            return 1.0f;
        }
        vf sum_of = {};
        for (int64_t i = 0; i < count; i += W) {
            vf p = power_of_two(load(scores + i) * factor - now);
            store(scores + i, p);
            sum_of += p;
        }
        float shrink = most == now ? 1.0f : power_of_two(splat(most - now))[0];
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
        // Whole blocks where they fit. A block's heads are read one after the other, as they lie in memory; while one run of
        // keys or values is worked on, the next one is fetched: hardware does not look beyond a run.
        int64_t size = b.block_size, tile = size > DECODE_TILE ? DECODE_TILE : DECODE_TILE / size * size;
        for (int64_t start = layer.first_key(position) / size * size; start < length; start += tile) {
            int64_t end = std::min(start + tile, length), after = std::min(end, length - 1) / size;
            const T* values = layer.block(request, start / size, 0) + layer.to_values();
            each_block(start, end, [&](int64_t index, int64_t slot, int64_t stop) {
                const T* at = layer.block(request, index, 0);
                const T* next = (index + 1) * size < end ? layer.block(request, index + 1, 0) : values;
                each_panel(rows, [&](auto n, int64_t g, int64_t row) {
                    constexpr int R = decltype(n)::value;
                    int64_t i = (g - kv_start) * rows + row;
                    dots<R>(at + g * size * b.dim, next - at, slot, stop, q + i * width, width,
                            scores + i * DECODE_TILE + index * size + slot - start);
                });
            });
            for (int64_t i = 0; i < all; i++) {
                float shrink = layer.weigh(scores + i * DECODE_TILE, start, end - start, position + i % rows / group,
                                           most[i], total[i]);
                if (shrink != 1.0f)
                    for (int64_t d = 0; d < width; d += W) store(o + i * width + d, load(o + i * width + d) * shrink);
            }
            each_block(start, end, [&](int64_t index, int64_t slot, int64_t stop) {
                const T* at = layer.block(request, index, 0) + layer.to_values();
                const T* next = (index + 1) * size < end ? layer.block(request, index + 1, 0) + layer.to_values()
                                                         : layer.block(request, after, 0);
                each_panel(rows, [&](auto n, int64_t g, int64_t row) {
                    constexpr int R = decltype(n)::value;
                    int64_t i = (g - kv_start) * rows + row;
                    mix<R>(at + g * size * b.dim, next - at, slot, stop, scores + i * DECODE_TILE + index * size - start,
                           o + i * width, width);
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
    INLINE void dots(const T* keys, int64_t ahead, int64_t slot, int64_t stop, const float* q, int64_t width, float* scores) const {
        constexpr int SLOTS = R == 1 ? 8 : 4;
        int64_t dim = layer.batch.dim;
        if (dim % (2 * W) == 0)
            for (; slot + SLOTS <= stop; slot += SLOTS, scores += SLOTS)
                dot<R, SLOTS, false>(keys + slot * dim, ahead, dim, q, width, scores);
        else
            for (; slot + 4 <= stop; slot += 4, scores += 4) dot<R, 4, true>(keys + slot * dim, ahead, dim, q, width, scores);
        for (; slot < stop; slot++, scores++) dot<R, 1, true>(keys + slot * dim, ahead, dim, q, width, scores);
    }

    // TAIL: the head's size may not be a multiple of 2 · W.
    template <int R, int SLOTS, bool TAIL>
    INLINE static void dot(const T* keys, int64_t ahead, int64_t dim, const float* q, int64_t width, float* scores) {
        fetch(keys + ahead, SLOTS * dim);
        vf acc[R][SLOTS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < SLOTS; s++) acc[r][s] = vf{};
        int64_t d = 0, whole = dim / (2 * W) * (2 * W);
        each_half([&](auto half) {
            for (d = 0; d < whole; d += 2 * W) {
                vf x[R];
                UNROLL for (int r = 0; r < R; r++) x[r] = load(q + r * width + d + half * W);
                UNROLL for (int s = 0; s < SLOTS; s++) {
                    vf k = load_half<half>(keys + s * dim + d);
                    UNROLL for (int r = 0; r < R; r++) acc[r][s] += k * x[r];
                }
            }
        });
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
    INLINE void mix(const T* values, int64_t ahead, int64_t slot, int64_t stop, const float* p, float* o, int64_t width) const {
        constexpr int PAIRS = 4;
        int64_t dim = layer.batch.dim, d = 0;
        for (; d + PAIRS * 2 * W <= dim; d += PAIRS * 2 * W)
            each_half([&](auto half) {
                vf acc[R][PAIRS];
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int c = 0; c < PAIRS; c++) acc[r][c] = load(o + r * width + d + (2 * c + half) * W);
                for (int64_t i = slot; i < stop; i++) {
                    const T* from = values + i * dim + d;
                    if (!half) fetch(from + ahead, PAIRS * 2 * W);
                    vf weight[R];
                    UNROLL for (int r = 0; r < R; r++) weight[r] = splat(p[r * DECODE_TILE + i]);
                    UNROLL for (int c = 0; c < PAIRS; c++) {
                        vf v = load_half<half>(from + c * 2 * W);
                        UNROLL for (int r = 0; r < R; r++) acc[r][c] += weight[r] * v;
                    }
                }
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int c = 0; c < PAIRS; c++) store(o + r * width + d + (2 * c + half) * W, acc[r][c]);
            });
        for (; d < dim; d += 2 * W) {
            vf acc[R][2];
            UNROLL for (int r = 0; r < R; r++) acc[r][0] = load(o + r * width + d), acc[r][1] = load(o + r * width + d + W);
            for (int64_t i = slot; i < stop; i++) {
                vf v0, v1;
                load_pair(values + i * dim + d, dim - d, v0, v1);
                UNROLL for (int r = 0; r < R; r++) {
                    vf weight = splat(p[r * DECODE_TILE + i]);
                    acc[r][0] += weight * v0, acc[r][1] += weight * v1;
                }
            }
            UNROLL for (int r = 0; r < R; r++) store(o + r * width + d, acc[r][0]), store(o + r * width + d + W, acc[r][1]);
        }
    }

    INLINE static void fetch(const T* p, int64_t count) {
        UNROLL for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(p + i);
    }

    // Calls f(std::integral_constant<int, half>): both vectors of a pair at a time would not fit the registers.
    template <class F>
    INLINE static void each_half(F f) {
        f(std::integral_constant<int, 0>{});
        f(std::integral_constant<int, 1>{});
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
