// Sampling and log probabilities over rows of float32 logits; engine/distribution.py is the specification.
//
// A row is read once for its maximum and the maxima of its chunks of 128, and once more for what the request asks:
// either all weights are summed by chunk, or the tokens that can survive the filters are collected (whole chunks are
// skipped by their maximum) and everything else happens on them. Scaled logits are at most 0, so the bits of their
// magnitude order them: thresholds of top-k and top-p are found by bisecting these bits, without a sort.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

constexpr int64_t CHUNK = 128;
constexpr float INF = std::numeric_limits<float>::infinity();

// Up to W values; what is missing reads as -inf.
INLINE vf load_padded(const float* p, int64_t count) {
    if (count >= W) return load(p);
    float part[W];
    for (int i = 0; i < W; i++) part[i] = i < count ? p[i] : -INF;
    return load(part);
}

INLINE int lanes(vi mask) {
    int count = 0;
    for (int i = 0; i < W; i++) count -= mask[i];
    return count;
}

// exp of a scaled logit; what is below 1e-37 of the best token is nothing.
INLINE vf weight_of(vf z) { return z < -86.0f ? vf{} : exponential(z); }

// What a thread keeps from row to row.
struct SamplingScratch {
    std::vector<float> maxima;     // of the chunks of a row; scaled once the row's maximum is known
    std::vector<double> running;   // sums of weights up to and with each chunk
    std::vector<float> z;          // collected tokens: scaled logits and, ascending, ids; with room for a row
    std::vector<int32_t> ids;
    std::vector<float> weights;    // of the collected tokens
    int64_t collected = 0;
};

inline SamplingScratch& sampling_scratch() {
    static thread_local SamplingScratch scratch;
    return scratch;
}

// Fills ``maxima``; returns the maximum of the row, NaN if there is one in it.
inline float find_maxima(const float* x, int64_t n, std::vector<float>& maxima) {
    maxima.resize((n + CHUNK - 1) / CHUNK);
    vf best = splat(-INF);
    vi broken = {};
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = std::min(start + CHUNK, n);
        vf a = splat(-INF), b = a;
        int64_t i = start;
        for (; i + 2 * W <= end; i += 2 * W) {
            vf first = load(x + i), second = load(x + i + W);
            broken |= (first != first) | (second != second);
            a = max(a, first), b = max(b, second);
        }
        for (; i < end; i += W) {
            vf value = load_padded(x + i, end - i);
            broken |= value != value;
            a = max(a, value);
        }
        a = max(a, b);
        best = max(best, a);
        maxima[start / CHUNK] = largest(a);
    }
    return lanes(broken) ? std::numeric_limits<float>::quiet_NaN() : largest(best);
}

// (logit - maximum) / temperature.
struct Scale {
    float maximum, temperature;
    INLINE vf operator()(vf x) const { return (x - maximum) / temperature; }
    INLINE float operator()(float x) const { return (x - maximum) / temperature; }
};

// Weights of up to 128 tokens from ``x``: their sum, and the weights where wanted.
INLINE float chunk_weights(const float* x, int64_t count, Scale scale, float* weights) {
    vf sum = {};
    for (int64_t i = 0; i < count; i += W) {
        vf w = weight_of(scale(load_padded(x + i, count - i)));
        if (weights) store(weights + i, w, count - i);
        sum += w;
    }
    return ::sum(sum);
}

// Sums by chunk into ``running``; ``maxima`` (scaled) tell which chunks weigh nothing. Without them none is skipped.
inline double sum_chunks(const float* x, int64_t n, Scale scale, const float* maxima, std::vector<double>& running) {
    running.resize((n + CHUNK - 1) / CHUNK);
    double total = 0;
    for (int64_t c = 0; c < (int64_t)running.size(); c++) {
        if (!maxima || maxima[c] >= -86.0f)
            total += chunk_weights(x + c * CHUNK, std::min(CHUNK, n - c * CHUNK), scale, nullptr);
        running[c] = total;
    }
    return total;
}

// ``target``, or the largest number below ``total`` where it is not below: no uniform selects what weighs nothing.
INLINE double below(double target, double total) { return std::min(target, std::nextafter(total, 0.0)); }

// The first of ``n`` tokens at which the running sum of weights exceeds u · total.
inline int64_t inverse_cdf(const float* x, int64_t n, Scale scale, const std::vector<double>& running, double u) {
    double target = below(u * running.back(), running.back());
    int64_t c = std::upper_bound(running.begin(), running.end(), target) - running.begin();
    c = std::min<int64_t>(c, running.size() - 1);
    if (c > 0) target -= running[c - 1];
    float weights[CHUNK];
    int64_t count = std::min(CHUNK, n - c * CHUNK);
    chunk_weights(x + c * CHUNK, count, scale, weights);
    double total = 0, sum = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    target = below(std::max(target, 0.0), total);
    for (int64_t i = 0; i < count; i++)
        if ((sum += weights[i]) > target) return c * CHUNK + i;
    return c * CHUNK + count - 1;
}

// Collects the tokens whose scaled logit is at least ``cut``, from chunks whose maximum is.
inline void collect(const float* x, int64_t n, Scale scale, float cut, SamplingScratch& s) {
    if ((int64_t)s.z.size() < n + W) s.z.resize(n + W), s.ids.resize(n + W);
    float* z = s.z.data();
    int32_t* ids = s.ids.data();
    int64_t found = 0;
    for (int64_t c = 0; c < (int64_t)s.maxima.size(); c++) {
        if (s.maxima[c] < cut) continue;
        for (int64_t i = c * CHUNK, end = std::min(i + CHUNK, n); i < end; i += W) {
            vf value = scale(load_padded(x + i, end - i));
            int64_t count = std::min<int64_t>(W, end - i);
#if defined(__AVX512F__)
            __mmask16 kept = _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(cut), _CMP_GE_OQ);
            kept &= (__mmask16)((1u << count) - 1);
            _mm512_mask_compressstoreu_ps(z + found, kept, (__m512)value);
            __m512i index = _mm512_add_epi32(_mm512_set1_epi32((int)i), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8,
                                                                                        7, 6, 5, 4, 3, 2, 1, 0));
            _mm512_mask_compressstoreu_epi32(ids + found, kept, index);
            found += __builtin_popcount(kept);
#else
            if (largest(value) < cut) continue;
            for (int64_t j = 0; j < count; j++) {
                z[found] = value[j], ids[found] = (int32_t)(i + j);
                found += value[j] >= cut;
            }
#endif
        }
    }
    s.collected = found;
}

// How many of ``z`` are at least ``limit``.
inline int64_t count_from(const float* z, int64_t n, float limit) {
    vi counts = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) counts -= load(z + i) >= limit;
    int64_t count = 0;
    for (int lane = 0; lane < W; lane++) count += counts[lane];
    for (; i < n; i++) count += z[i] >= limit;
    return count;
}

// The sum of ``weights`` where ``z`` is at least ``limit``.
inline double mass_from(const float* z, const float* weights, int64_t n, float limit) {
    double mass = 0;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = std::min(start + CHUNK, n);
        vf sum = {};
        for (int64_t i = start; i < end; i += W) {
            vf value = load_padded(z + i, end - i);
            sum += value >= limit ? load(weights + i, end - i) : vf{};
        }
        mass += ::sum(sum);
    }
    return mass;
}

INLINE float of_key(uint32_t key) {
    float magnitude;
    memcpy(&magnitude, &key, sizeof key);
    return -magnitude;
}

// The largest scaled logit, -inf if there is none, down to which ``reached`` holds; it holds for all smaller ones.
template <class F>
float threshold(F reached) {
    uint32_t low = 0, high = 0x7f800000;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (reached(of_key(middle)))
            high = middle;
        else
            low = middle + 1;
    }
    return of_key(low);
}

struct RowParameters {
    float temperature;
    int64_t top_k;
    double top_p;
    float log_min_p;
};

// Keeps of the collected tokens what is above ``limit`` and, of those at it, the ``quota`` lowest ids.
inline void keep(float limit, int64_t quota, SamplingScratch& s) {
    int64_t kept = 0;
    for (int64_t i = 0; i < s.collected; i++) {
        float z = s.z[i];
        bool stays = z > limit || (z == limit && quota-- > 0);
        s.z[kept] = z, s.ids[kept] = s.ids[i];
        kept += stays;
    }
    s.collected = kept;
}

// Drops from the collected tokens what top-p drops; of the mass ``total``, or of that of the collected ones if it is NaN.
inline void keep_nucleus(double top_p, double total, SamplingScratch& s) {
    int64_t n = s.collected;
    const float* z = s.z.data();
    if ((int64_t)s.weights.size() < n) s.weights.resize(n);
    float* weights = s.weights.data();
    double mass = 0;
    for (int64_t i = 0; i < n; i += CHUNK)
        mass += chunk_weights(z + i, std::min(CHUNK, n - i), Scale{0, 1}, weights + i);
    double needed = top_p * (std::isnan(total) ? mass : total);
    float limit = threshold([&](float level) { return mass_from(z, weights, n, level) >= needed; });
    double before = mass_from(z, weights, n, std::nextafter(limit, 1.0f));
    // A token stays if what comes before it is less than what is needed; the first one does in any case.
    double each = weight_of(splat(limit))[0];
    double quota = each > 0 ? std::ceil((needed - before) / each) : (double)n;
    keep(limit, (int64_t)std::min(std::max(quota, 1.0), (double)n), s);
}

// Collects what may belong to the nucleus, and returns the mass of the row.
inline double collect_nucleus(const float* x, int64_t n, Scale scale, double top_p, SamplingScratch& s) {
    constexpr float CUTS[] = {-2, -4, -8, -12};
    double total = 0, reached[4] = {};
    for (int64_t c = 0; c < (int64_t)s.maxima.size(); c++) {
        if (s.maxima[c] < -86.0f) continue;
        vf sum = {}, above[4] = {};
        for (int64_t i = c * CHUNK, end = std::min(i + CHUNK, n); i < end; i += W) {
            vf z = scale(load_padded(x + i, end - i)), w = weight_of(z);
            sum += w;
            UNROLL for (int cut = 0; cut < 4; cut++) above[cut] += z >= CUTS[cut] ? w : vf{};
        }
        total += ::sum(sum);
        for (int cut = 0; cut < 4; cut++)
            if (s.maxima[c] >= CUTS[cut]) reached[cut] += ::sum(above[cut]);
    }
    // Tokens below (1 - top_p) / n of the mass sum to less than 1 - top_p: they are never part of it. Half of that
    // leaves room for rounding.
    float cut = (float)std::log((1 - top_p) * total * 0.5 / (double)n);
    cut = std::min(0.0f, std::max(-87.0f, cut));
    for (int i = 3; i >= 0; i--)
        if (CUTS[i] > cut && reached[i] > top_p * total * (1 + 1e-6)) cut = CUTS[i];
    collect(x, n, scale, cut, s);
    return total;
}

// ``draws`` tokens of one row. A row without a finite maximum, or with a NaN, gives token 0.
inline void sample_row(const float* x, int64_t n, RowParameters p, const double* uniforms, int64_t draws,
                       int64_t* tokens) {
    SamplingScratch& s = sampling_scratch();
    float maximum = find_maxima(x, n, s.maxima);
    if (!std::isfinite(maximum)) {
        std::fill(tokens, tokens + draws, 0);
        return;
    }
    if (p.temperature == 0) {
        int64_t c = std::find(s.maxima.begin(), s.maxima.end(), maximum) - s.maxima.begin();
        std::fill(tokens, tokens + draws, std::find(x + c * CHUNK, x + n, maximum) - x);
        return;
    }
    Scale scale{maximum, p.temperature};
    for (float& m : s.maxima) m = scale(m);
    if (p.top_k >= n && p.top_p >= 1 && p.log_min_p == -INF) {
        sum_chunks(x, n, scale, s.maxima.data(), s.running);
        for (int64_t i = 0; i < draws; i++) tokens[i] = inverse_cdf(x, n, scale, s.running, uniforms[i]);
        return;
    }
    double total = std::numeric_limits<double>::quiet_NaN();
    if (p.top_k < n) {
        // As many chunks have a maximum from the bound on, so at least as many tokens are.
        int64_t chunks = s.maxima.size();
        float bound = -INF;
        if (p.top_k <= chunks)
            bound = threshold([&](float z) { return count_from(s.maxima.data(), chunks, z) >= p.top_k; });
        collect(x, n, scale, bound, s);
        int64_t found = s.collected;
        float limit = threshold([&](float z) { return count_from(s.z.data(), found, z) >= p.top_k; });
        keep(limit, p.top_k - count_from(s.z.data(), found, std::nextafter(limit, 1.0f)), s);
    } else if (p.top_p < 1) {
        total = collect_nucleus(x, n, scale, p.top_p, s);
    } else {
        collect(x, n, scale, p.log_min_p, s);
    }
    if (p.top_p < 1) keep_nucleus(p.top_p, total, s);
    if (p.log_min_p > -INF) keep(p.log_min_p, n, s);
    int64_t kept = s.collected;
    sum_chunks(s.z.data(), kept, Scale{0, 1}, nullptr, s.running);
    for (int64_t i = 0; i < draws; i++)
        tokens[i] = s.ids[inverse_cdf(s.z.data(), kept, Scale{0, 1}, s.running, uniforms[i])];
}

// ``parameters`` [rows, 4 + draws]: see interface.py.
inline void sample_rows(const float* logits, int64_t rows, int64_t stride, int64_t n, const double* parameters,
                        int64_t draws, int64_t* tokens, int threads) {
    share(rows, threads, [&](int64_t row) {
        const double* p = parameters + row * (4 + draws);
        RowParameters own{(float)p[0], (int64_t)p[1], p[2], (float)p[3]};
        sample_row(logits + row * stride, n, own, p + 4, draws, tokens + row * draws);
    });
}

// Log probability and rank of ``token``, and the ``top`` best tokens of a row, lower ids first where equal.
inline void logprob_row(const float* x, int64_t n, int64_t token, int64_t top, double* logprob, int64_t* rank,
                        double* values, int64_t* ids) {
    SamplingScratch& s = sampling_scratch();
    float maximum = find_maxima(x, n, s.maxima);
    double normaliser = maximum + std::log(sum_chunks(x, n, Scale{maximum, 1}, nullptr, s.running));
    *logprob = x[token] - normaliser;
    *rank = 1 + count_from(x, n, std::nextafter(x[token], INF));
    if (!top) return;
    int64_t chunks = s.maxima.size();
    float bound = -INF;
    // As many chunks have a maximum from the bound on, so at least as many tokens are.
    if (top <= chunks && maximum == maximum) {
        std::vector<float> order = s.maxima;
        std::nth_element(order.begin(), order.begin() + (top - 1), order.end(), std::greater<float>());
        bound = order[top - 1];
    }
    std::vector<std::pair<float, int64_t>> found;
    for (int64_t c = 0; c < chunks; c++)
        if (bound == -INF || s.maxima[c] >= bound)
            for (int64_t i = c * CHUNK, end = std::min(i + CHUNK, n); i < end; i++)
                if (!(x[i] < bound)) found.emplace_back(x[i] == x[i] ? x[i] : -INF, i);
    std::partial_sort(found.begin(), found.begin() + top, found.end(), [](const auto& a, const auto& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    });
    for (int64_t i = 0; i < top; i++) values[i] = found[i].first - normaliser, ids[i] = found[i].second;
}

// ``count`` pairs of a row of ``logits`` and a token; ``values`` and ``ids`` [count, top].
inline void logprob_rows(const float* logits, int64_t stride, int64_t n, const int64_t* rows, const int64_t* tokens,
                         int64_t count, int64_t top, double* logprobs, int64_t* ranks, double* values, int64_t* ids,
                         int threads) {
    share(count, threads, [&](int64_t i) {
        logprob_row(logits + rows[i] * stride, n, tokens[i], top, logprobs + i, ranks + i, values + i * top,
                    ids + i * top);
    });
}
