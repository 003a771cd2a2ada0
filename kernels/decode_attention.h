// Attention of few rows per KV head (decode, draft verification): dot products straight from the cache. See attention.h.
#pragma once

#include <type_traits>

#include "attention_layer.h"
#include "threads.h"

constexpr int64_t DECODE_ROWS = 16;   // a request with more rows per KV head is a PrefillTask
constexpr int64_t DECODE_TILE = 256;  // keys

// All queries of one request, KV heads [kv_start, kv_end).
template <class T>
struct DecodeTask {
    const Layer<T>& layer;
    int64_t request, kv_start, kv_end;

    using U = Unit<T>;
    using Weight = typename Layer<T>::Weight;
    // Vectors of units in a chunk of 2 · W values.
    static constexpr int PARTS = 2 / PER_UNIT<T>;

    void run() const {
        const Batch& b = layer.batch;
        int64_t group = layer.group(), first_row = b.starts[request], queries = b.starts[request + 1] - first_row;
        int64_t rows = queries * group, all = rows * (kv_end - kv_start), width = padded(b.dim), units = width / PER_UNIT<T>;
        int64_t length = b.lengths[request], position = length - queries;
        float* o = scratch<DecodeTask>(all * (width + units + 2 + DECODE_TILE));
        float *scores = o + all * width, *most = scores + all * DECODE_TILE, *total = most + all;
        U* q = (U*)(total + all);
        std::fill(o, o + all * width, 0.0f);
        std::fill(most, most + all, -INFINITY);
        std::fill(total, total + all, 0.0f);
        auto token = [&](int64_t row) { return first_row + row / group; };
        auto head = [&](int64_t g, int64_t row) { return g * group + row % group; };
        for (int64_t g = kv_start, i = 0; g < kv_end; g++)
            for (int64_t row = 0; row < rows; row++, i++) {
                const T* from = layer.query + token(row) * layer.query_stride + head(g, row) * b.dim;
                for (int64_t d = 0; d < b.dim; d += 2 * W) {
                    Units<T> parts[PARTS];
                    load_chunk(from + d, b.dim - d, parts);
                    UNROLL for (int p = 0; p < PARTS; p++) store(q + i * units + d / PER_UNIT<T> + p * W, parts[p]);
                }
            }
        // A block's heads are read one after the other, as they lie in memory; while one run of
        // keys or values is worked on, the next one is fetched: hardware does not look beyond a run.
        int64_t size = b.block_size, tile = std::min(layer.tile(), DECODE_TILE), end;
        for (int64_t start = layer.first_key(position) / (2 * W) * (2 * W); start < length; start = end) {
            end = std::min((start / tile + 1) * tile, length);
            int64_t after = std::min(end, length - 1) / size;
            const T* values = layer.block(request, start / size, 0) + layer.to_values();
            each_block(start, end, [&](int64_t index, int64_t slot, int64_t stop) {
                const T* at = layer.block(request, index, 0);
                const T* next = (index + 1) * size < end ? layer.block(request, index + 1, 0) : values;
                each_panel(rows, [&](auto n, int64_t g, int64_t row) {
                    constexpr int R = decltype(n)::value;
                    int64_t i = (g - kv_start) * rows + row;
                    dots<R>(at + g * size * b.dim, next - at, slot, stop, q + i * units, units,
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
                    const Weight* weights = (const Weight*)(scores + i * DECODE_TILE) + index * size - start;
                    mix<R>(at + g * size * b.dim, next - at, slot, stop, weights, o + i * width, width);
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
    INLINE void dots(const T* keys, int64_t ahead, int64_t slot, int64_t stop, const U* q, int64_t units,
                     float* scores) const {
        if constexpr (std::is_same_v<T, float>) return dots_in_order<R>(keys, ahead, slot, stop, q, units, scores);
        constexpr int SLOTS = R == 1 ? 8 : 4;
        int64_t dim = layer.batch.dim;
        if (dim % (2 * W) == 0)
            for (; slot + SLOTS <= stop; slot += SLOTS, scores += SLOTS)
                dot<R, SLOTS, false>(keys + slot * dim, ahead, dim, q, units, scores);
        else
            for (; slot + 4 <= stop; slot += 4, scores += 4)
                dot<R, 4, true>(keys + slot * dim, ahead, dim, q, units, scores);
        for (; slot < stop; slot++, scores++) dot<R, 1, true>(keys + slot * dim, ahead, dim, q, units, scores);
    }

    // The same, W keys side by side: products are added in the order of dimensions, as a PrefillTask adds them.
    template <int R>
    INLINE void dots_in_order(const float* keys, int64_t ahead, int64_t slot, int64_t stop, const float* q, int64_t units,
                              float* scores) const {
        int64_t dim = layer.batch.dim;
        for (; slot < stop; slot += W, scores += W) {
            const float* from = keys + slot * dim;
            int64_t count = std::min<int64_t>(W, stop - slot);
            vf acc[R] = {};
            auto add = [&](int64_t d, vf (&lines)[W]) __attribute__((always_inline)) {
                transpose(lines);
                UNROLL for (int i = 0; i < W; i++)
                    UNROLL for (int r = 0; r < R; r++)
                        acc[r] = add_product(acc[r], splat(q[r * units + d + i]), lines[i]);
            };
            int64_t d = 0;
            if (count == W)
                for (; d + W <= dim; d += W) {
                    vf lines[W];
                    UNROLL for (int i = 0; i < W; i++) {
                        __builtin_prefetch(from + ahead + i * dim + d);
                        lines[i] = load(from + i * dim + d);
                    }
                    add(d, lines);
                }
            for (; d < dim; d += W) {  // what is missing reads as zero, in ``q`` too
                vf lines[W] = {};
                for (int i = 0; i < count; i++) lines[i] = load(from + i * dim + d, dim - d);
                add(d, lines);
            }
            UNROLL for (int r = 0; r < R; r++) store(scores + r * DECODE_TILE, acc[r], count);
        }
    }

    // TAIL: the head's size may not be a multiple of 2 · W.
    template <int R, int SLOTS, bool TAIL>
    INLINE static void dot(const T* keys, int64_t ahead, int64_t dim, const U* q, int64_t units, float* scores) {
        fetch(keys + ahead, SLOTS * dim);
        vf acc[R][SLOTS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int s = 0; s < SLOTS; s++) acc[r][s] = vf{};
        int64_t d = 0, whole = dim / (2 * W) * (2 * W);
        each_part([&](auto part) {
            for (d = 0; d < whole; d += 2 * W) {
                Units<T> x[R];
                UNROLL for (int r = 0; r < R; r++) x[r] = load(q + r * units + d / PER_UNIT<T> + part * W);
                UNROLL for (int s = 0; s < SLOTS; s++) {
                    Units<T> k = load_part<part>(keys + s * dim + d);
                    UNROLL for (int r = 0; r < R; r++) acc[r][s] = add_product(acc[r][s], k, x[r]);
                }
            }
        });
        if (TAIL && d < dim)
            UNROLL for (int s = 0; s < SLOTS; s++) {
                Units<T> k[PARTS];
                load_chunk(keys + s * dim + d, dim - d, k);
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int p = 0; p < PARTS; p++)
                        acc[r][s] = add_product(acc[r][s], k[p], load(q + r * units + d / PER_UNIT<T> + p * W));
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

    // Adds the values of slots [slot, stop), weighted by ``p``, whose rows are DECODE_TILE floats apart, to R rows of ``o``.
    template <int R>
    INLINE void mix(const T* values, int64_t ahead, int64_t slot, int64_t stop, const float* p, float* o,
                    int64_t width) const {
        constexpr int CHUNKS = 4;
        int64_t dim = layer.batch.dim, d = 0;
        for (; d + CHUNKS * 2 * W <= dim; d += CHUNKS * 2 * W)
            each_part([&](auto half) {
                vf acc[R][CHUNKS];
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int c = 0; c < CHUNKS; c++) acc[r][c] = load(o + r * width + d + (2 * c + half) * W);
                for (int64_t i = slot; i < stop; i++) {
                    const T* from = values + i * dim + d;
                    if (!half) fetch(from + ahead, CHUNKS * 2 * W);
                    vf weight[R];
                    UNROLL for (int r = 0; r < R; r++) weight[r] = splat(p[r * DECODE_TILE + i]);
                    UNROLL for (int c = 0; c < CHUNKS; c++) {
                        vf v = load_half<half>(from + c * 2 * W);
                        UNROLL for (int r = 0; r < R; r++) acc[r][c] += weight[r] * v;
                    }
                }
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int c = 0; c < CHUNKS; c++) store(o + r * width + d + (2 * c + half) * W, acc[r][c]);
            });
        for (; d < dim; d += 2 * W) {
            vf acc[R][2];
            load_rows<R>(o + d, width, acc);
            for (int64_t i = slot; i < stop; i++) {
                vf v0, v1;
                load_pair(values + i * dim + d, dim - d, v0, v1);
                UNROLL for (int r = 0; r < R; r++) {
                    vf weight = splat(p[r * DECODE_TILE + i]);
                    acc[r][0] += weight * v0, acc[r][1] += weight * v1;
                }
            }
            store_rows<R>(o + d, width, acc);
        }
    }

    // The same with weights as bfloat16, two slots at a time.
    template <int R>
    INLINE void mix(const T* values, int64_t ahead, int64_t slot, int64_t stop, const bf16* p, float* o,
                    int64_t width) const {
        constexpr int CHUNKS = 2;
        int64_t dim = layer.batch.dim, d = 0;
        auto add = [&](int64_t i, auto count, auto& acc) {
            constexpr int N = std::extent_v<std::remove_reference_t<decltype(acc[0])>> / 2;
            Units<bf16> weight[R];
            UNROLL for (int r = 0; r < R; r++) {
                uint32_t both = 0;
                memcpy(&both, p + r * 2 * DECODE_TILE + i, count * sizeof(bf16));
                weight[r] = splat(both);
            }
            UNROLL for (int c = 0; c < N; c++) {
                const T* from = values + i * dim + d + c * 2 * W;
                int64_t left = N == 1 ? dim - d : 2 * W;
                vu first = load_units(from, left), second = count == 2 ? load_units(from + dim, left) : vu{};
                in_register(first), in_register(second);
                vu even = (first & ~HIGH) | second << 16, odd = first >> 16 | (second & HIGH);
                UNROLL for (int r = 0; r < R; r++) {
                    acc[r][2 * c] = add_product(acc[r][2 * c], weight[r], even);
                    acc[r][2 * c + 1] = add_product(acc[r][2 * c + 1], weight[r], odd);
                }
            }
        };
        auto chunks = [&](auto n) {
            vf acc[R][2 * n];
            load_rows<R>(o + d, width, acc);
            int64_t i = slot;
            for (; i + 2 <= stop; i += 2) {
                fetch(values + i * dim + d + ahead, n * 2 * W), fetch(values + (i + 1) * dim + d + ahead, n * 2 * W);
                add(i, std::integral_constant<int, 2>{}, acc);
            }
            if (i < stop) add(i, std::integral_constant<int, 1>{}, acc);
            store_rows<R>(o + d, width, acc);
        };
        for (; d + CHUNKS * 2 * W <= dim; d += CHUNKS * 2 * W) chunks(std::integral_constant<int, CHUNKS>{});
        for (; d < dim; d += 2 * W) chunks(std::integral_constant<int, 1>{});
    }

    template <int R, int N>
    INLINE static void load_rows(const float* from, int64_t width, vf (&rows)[R][N]) {
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < N; c++) rows[r][c] = load(from + r * width + c * W);
    }
    template <int R, int N>
    INLINE static void store_rows(float* to, int64_t width, const vf (&rows)[R][N]) {
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < N; c++) store(to + r * width + c * W, rows[r][c]);
    }

    // 2 · W values, of which ``count`` are left, as vectors of units; one of them, where all are left.
    INLINE static void load_chunk(const T* from, int64_t count, Units<T> (&parts)[PARTS]) {
        if constexpr (PARTS == 1)
            parts[0] = load_units(from, count);
        else
            load_pair(from, count, parts[0], parts[1]);
    }
    template <int PART>
    INLINE static Units<T> load_part(const T* from) {
        if constexpr (PARTS == 1)
            return load_units(from, 2 * W);
        else
            return load_half<PART>(from);
    }

    INLINE static void fetch(const T* p, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(p + i);
    }

    // Calls f(std::integral_constant<int, part>): both vectors of float32 at a time would not fit the registers.
    template <class F>
    INLINE static void each_part(F f) {
        f(std::integral_constant<int, 0>{});
        if constexpr (PARTS == 2) f(std::integral_constant<int, 1>{});
    }
};
