// What all attention tasks share: the batch, a layer's tensors, and the online softmax of Milakov and Gimelshein (2018).
#pragma once

#include <algorithm>

#include "vectors.h"

// Keys of a tile, at most; a multiple of 2 · W.
template <class T>
constexpr int64_t KEY_TILE = PER_UNIT<T> == 2 ? 512 : 256;
constexpr int64_t TILE_UNITS = 16384;  // of a tile's keys, so that they stay in the level-2 cache

INLINE int64_t padded(int64_t count) { return (count + 2 * W - 1) / (2 * W) * 2 * W; }

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

    // Keys are taken tile by tile. Tiles begin at its multiples, a row's first one where its task's first row sees a key: so
    // in float32 the sums of a row are the same beside any other rows.
    int64_t tile() const {
        return std::min(KEY_TILE<T>, std::max<int64_t>(TILE_UNITS * PER_UNIT<T> / padded(batch.dim) / (2 * W), 1) * 2 * W);
    }

    // What weights are kept as: they are a factor of products as the values are.
    using Weight = std::conditional_t<PER_UNIT<T> == 2, bf16, float>;

    // Turns ``scores`` of keys [first, first + count) into weights of a row at ``position``, in their place; those that it
    // does not see get 0. ``count`` is rounded up to 2 · W. Updates maximum and sum; returns what the row's output so far is
    // scaled by.
    INLINE float weigh(float* scores, int64_t first, int64_t count, int64_t position, float& most, float& total) const {
        Weight* weights = (Weight*)scores;
        int64_t low = std::max<int64_t>(first_key(position) - first, 0), high = std::min(position + 1 - first, count);
        if (soft_cap)
            for (int64_t i = 0; i < count; i += W) {
                // tanh x = 1 - 2 / (e^2x + 1)
                vf e = exponential(load(scores + i) * (2.0f * scale / soft_cap));
                store(scores + i, soft_cap - 2.0f * soft_cap / (e + 1.0f));
            }
        for (int64_t i = 0; i < std::min(low, count); i++) scores[i] = -INFINITY;
        count = padded(count);
        for (int64_t i = std::max<int64_t>(high, 0); i < count; i++) scores[i] = -INFINITY;
        // What scores are still to be multiplied by, a positive number. Weights are powers of two: e^x = 2^(x · log2 e).
        float factor = 1.44269504088896341f * (soft_cap ? 1.0f : scale);
        vf maxima[2] = {splat(-INFINITY), splat(-INFINITY)}, sums_of[2] = {};
        for (int64_t i = 0; i < count; i += 2 * W)
            UNROLL for (int j = 0; j < 2; j++) maxima[j] = max(maxima[j], load(scores + i + j * W));
        float now = std::max(most, largest(max(maxima[0], maxima[1])) * factor);
        if (now == -INFINITY) {
            for (int64_t i = 0; i < count; i += W) store(weights + i, vf{});
            return 1.0f;
        }
        for (int64_t i = 0; i < count; i += 2 * W) {
            vf p[2];
            UNROLL for (int j = 0; j < 2; j++) p[j] = power_of_two(load(scores + i + j * W) * factor - now, weights);
            UNROLL for (int j = 0; j < 2; j++) store(weights + i + j * W, p[j]), sums_of[j] += p[j];
        }
        float shrink = most == now ? 1.0f : power_of_two(splat(most - now), scores)[0];
        most = now, total = total * shrink + sum(sums_of[0] + sums_of[1]);
        return shrink;
    }
};
