// The plain C interface of the CPU kernels, called through ctypes by native.py. ``lower`` chooses bfloat16 over float32
// for activations and KV, ``lower_weight`` for a norm's weight. Sizes and strides are in values.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "sampling.h"

namespace {

template <class T>
void linear(const void* x, int64_t rows, int64_t depth, const void* tiles, int64_t columns, const void* bias, void* y,
            int threads) {
    using Lane = typename Linear<T>::Lane;
    Linear<T>{(const T*)x, rows, depth, (const Lane*)tiles, columns, (const T*)bias, (T*)y}.run(threads);
}

template <class T, class V>
void norm(const void* x, int64_t stride, int64_t outer, int64_t inner, int64_t n, void* residual, const void* weight,
          float eps, void* y, int threads) {
    rms_norm((const T*)x, stride, outer, inner, n, (T*)residual, (const V*)weight, eps, (T*)y, threads);
}

template <class T>
void attend_as(const Batch& batch, const void* query, int64_t query_stride, const void* keys, void* output, float scale,
               int64_t window, float soft_cap, int threads) {
    attend(Layer<T>{batch, (const T*)query, query_stride, (const T*)keys, (T*)output, scale, window, soft_cap}, threads);
}

template <class T>
void gated_as(const void* x, int64_t rows, int64_t n, void* y, int gelu, int threads) {
    if (gelu)
        gated((const T*)x, rows, n, (T*)y, threads, [](vf v) { return gelu_tanh(v, (const T*)nullptr); });
    else
        gated((const T*)x, rows, n, (T*)y, threads, [](vf v) { return silu(v, (const T*)nullptr); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Lanes of a vector, and whether a unit of bfloat16 is a pair: linear layers are packed for them.
int tp_width() { return W; }
int tp_paired() { return PAIRED; }

void tp_linear(int lower, const void* x, int64_t rows, int64_t depth, const void* tiles, int64_t columns,
               const void* bias, void* y, int threads) {
    (lower ? linear<bf16> : linear<float>)(x, rows, depth, tiles, columns, bias, y, threads);
}

void tp_rms_norm(int lower, int lower_weight, const void* x, int64_t stride, int64_t outer, int64_t inner, int64_t n,
                 void* residual, const void* weight, float eps, void* y, int threads) {
    auto run = lower ? (lower_weight ? norm<bf16, bf16> : norm<bf16, float>)
                     : (lower_weight ? norm<float, bf16> : norm<float, float>);
    run(x, stride, outer, inner, n, residual, weight, eps, y, threads);
}

void tp_rotary_write(int lower, void* query_key, int64_t query_key_stride, const void* value, int64_t value_stride,
                     const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                     void* kv, int64_t block_size, int64_t block_stride, const int64_t* slots, int threads) {
    RotaryWrite work{tokens, heads, kv_heads, dim, query_key_stride, value_stride, slots, block_size, block_stride};
    if (lower)
        work.run((bf16*)query_key, (const bf16*)value, (const bf16*)cos, (const bf16*)sin, (bf16*)kv, threads);
    else
        work.run((float*)query_key, (const float*)value, (const float*)cos, (const float*)sin, (float*)kv, threads);
}

void tp_gated(int lower, int gelu, const void* x, int64_t rows, int64_t n, void* y, int threads) {
    (lower ? gated_as<bf16> : gated_as<float>)(x, rows, n, y, gelu, threads);
}

void tp_attention(int lower, const Batch* batch, const void* query, int64_t query_stride, const void* keys,
                  void* output, float scale, int64_t window, float soft_cap, int threads) {
    (lower ? attend_as<bf16> : attend_as<float>)(*batch, query, query_stride, keys, output, scale, window, soft_cap,
                                                 threads);
}

void tp_sample(const float* logits, int64_t rows, int64_t stride, int64_t vocab, const double* parameters,
               int64_t draws, int64_t* tokens, int threads) {
    sample_rows(logits, rows, stride, vocab, parameters, draws, tokens, threads);
}

void tp_logprobs(const float* logits, int64_t stride, int64_t vocab, const int64_t* rows, const int64_t* tokens,
                 int64_t count, int64_t top, double* logprobs, int64_t* ranks, double* values, int64_t* ids,
                 int threads) {
    logprob_rows(logits, stride, vocab, rows, tokens, count, top, logprobs, ranks, values, ids, threads);
}

}  // extern "C"
#pragma GCC visibility pop
