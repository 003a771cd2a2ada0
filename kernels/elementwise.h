// Norms, rotary embeddings with the KV write, and gated activations. Computed in float32, rounded where interface.py
// says. T is the type of activations and KV.
#pragma once

#include "threads.h"
#include "vectors.h"

constexpr int64_t GRAIN = 1 << 15;  // values that a thread should have at least

INLINE int useful_threads(int threads, int64_t values) {
    return (int)(values / GRAIN < threads ? values / GRAIN + 1 : threads);
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
            for (int64_t i = 0; i < n; i += W) {
                vf value = load(in + i, n - i);
                if (residual) {
                    value = rounded(value + load(residual + row * n + i, n - i), in);
                    store(residual + row * n + i, value, n - i);
                }
                squares += value * value;
            }
            if (residual) in = residual + row * n;
            float scale = 1.0f / std::sqrt(sum(squares) / (float)n + eps);
            for (int64_t i = 0; i < n; i += W) {
                vf normed = rounded(load(in + i, n - i) * scale, weight);
                store(y + row * n + i, load(weight + i, n - i) * normed, n - i);
            }
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
                    for (int64_t i = 0; i < half; i += W) {
                        int64_t left = half - i;
                        vf x1 = load(x + i, left), x2 = load(x + half + i, left);
                        vf vc = load(c + i, left), vs = load(s + i, left);
                        store(x + i, x1 * vc - x2 * vs, left);
                        store(x + half + i, x2 * vc + x1 * vs, left);
                    }
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

INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }

// 0.5 · x · (1 + tanh u) = x / (1 + e^(-2u)).
INLINE vf gelu_tanh(vf x) {
    return x / (1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

// x [rows, 2 · n], gate first; y [rows, n].
template <class T, class F>
void gated(const T* x, int64_t rows, int64_t n, T* y, int threads, F activation) {
    split(rows, useful_threads(threads, rows * n), [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const T *gate = x + row * 2 * n, *up = gate + n;
            for (int64_t i = 0; i < n; i += W)
                store(y + row * n + i, activation(load(gate + i, n - i)) * load(up + i, n - i), n - i);
        }
    });
}
