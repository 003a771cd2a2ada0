// Norms, rotary embeddings with the KV write, and gated activations. Computed in float32, rounded where interface.py
// says. T is the type of activations and KV.
#pragma once

#include "threads.h"
#include "vectors.h"

constexpr int64_t GRAIN = 1 << 15;  // values that a thread should have at least

INLINE int useful_threads(int threads, int64_t values) {
    return (int)(values / GRAIN < threads ? values / GRAIN + 1 : threads);
}

// Calls f(i, values left) for each vector of a row of ``n`` values; what is left is known to be W in all but the last call.
template <class F>
INLINE void each_vector(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, (int64_t)W);
    if (i < n) f(i, n - i);
}

// Rows of ``n`` values: ``inner`` of them contiguous, groups of that ``x_stride`` apart. With ``residual`` (contiguous)
// the sum replaces it and is what is normed. ``y`` is contiguous. V is the type of the weight.
template <class T, class V>
void rms_norm(const T* x, int64_t x_stride, int64_t outer, int64_t inner, int64_t n, T* residual, const V* weight,
              float eps, T* y, int threads) {
    split(outer * inner, useful_threads(threads, outer * inner * n), [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const T* in = x + row / inner * x_stride + row % inner * n;
            vf squares = {};
            each_vector(n, [&](int64_t i, int64_t left) {
                vf value = load(in + i, left);
                if (residual) {
                    value = rounded(value + load(residual + row * n + i, left), in);
                    store(residual + row * n + i, value, left);
                }
                squares += value * value;
            });
            if (residual) in = residual + row * n;
            float scale = 1.0f / std::sqrt(sum(squares) / (float)n + eps);
            each_vector(n, [&](int64_t i, int64_t left) {
                vf normed = rounded(load(in + i, left) * scale, weight);
                store(y + row * n + i, load(weight + i, left) * normed, left);
            });
        }
    });
}

struct RotaryWrite {
    int64_t tokens, heads, kv_heads, dim;    // heads: query and key heads
    int64_t query_key_stride, value_stride;  // values between tokens
    const int64_t* slots;                    // [tokens]
    int64_t block_size, block_stride;        // block_stride: values between blocks

    // ``kv`` points at the layer's keys in block 0.
    template <class T>
    void run(T* query_key, const T* value, const T* cos, const T* sin, T* kv, int threads) const {
        int64_t half = dim / 2, written = kv_heads * block_size * dim;
        split(tokens, useful_threads(threads, tokens * heads * dim), [&](int64_t start, int64_t end) {
            for (int64_t t = start; t < end; t++) {
                const T *c = cos + t * half, *s = sin + t * half;
                for (int64_t h = 0; h < heads; h++) {
                    T* x = query_key + t * query_key_stride + h * dim;
                    each_vector(half, [&](int64_t i, int64_t left) {
                        vf x1 = load(x + i, left), x2 = load(x + half + i, left);
                        vf vc = load(c + i, left), vs = load(s + i, left);
                        store(x + i, x1 * vc - x2 * vs, left);
                        store(x + half + i, x2 * vc + x1 * vs, left);
                    });
                }
                T* slot = kv + slots[t] / block_size * block_stride + slots[t] % block_size * dim;
                const T* key = query_key + t * query_key_stride + (heads - kv_heads) * dim;
                for (int64_t g = 0; g < kv_heads; g++) {
                    memcpy(slot + g * block_size * dim, key + g * dim, dim * sizeof(T));
                    memcpy(slot + written + g * block_size * dim, value + t * value_stride + g * dim, dim * sizeof(T));
                }
            }
        });
    }
};

// Precise enough for a result that is kept as T.
template <class T>
INLINE vf silu(vf x, const T* as) { return x * reciprocal(1.0f + exponential(-x, as), as); }

// 0.5 · x · (1 + tanh u) = x / (1 + e^(-2u)).
template <class T>
INLINE vf gelu_tanh(vf x, const T* as) {
    return x * reciprocal(1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x), as), as);
}

// x [rows, 2 · n], gate first; y [rows, n].
template <class T, class F>
void gated(const T* x, int64_t rows, int64_t n, T* y, int threads, F activation) {
    split(rows, useful_threads(threads, rows * n), [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++)
            each_vector(n, [&](int64_t i, int64_t left) {
                const T *gate = x + row * 2 * n + i, *up = gate + n;
                store(y + row * n + i, activation(load(gate, left)) * load(up, left), left);
            });
    });
}
