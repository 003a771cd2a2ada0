// Vectors of the widest width that the compiler was told of, through GCC's and clang's vector extensions: the kernels
// are written once, and the compiler flags (native_library.py) decide whether they become SSE, AVX2, AVX-512 or NEON.
//
// bfloat16 is the upper half of a float32. Values come in order (load) or as a pair of vectors (load_pair), which is
// cheaper: a 32-bit lane holds two neighbours, and a shift and a mask separate even from odd positions. What does not
// depend on the order inside a chunk of 2 · W values, such as a dot product, uses pairs.
//
// Processors with AVX-512 BF16 add the products of two neighbours to a float32 sum in one instruction. There inner loops
// multiply *units* of two bfloat16 in a 32-bit lane; elsewhere, and for float32 always, a unit is one value in float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#define INLINE inline __attribute__((always_inline))
// Before each loop over vectors that are to stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef float v4 __attribute__((vector_size(16)));
// The same at any address.
typedef vf vf_any __attribute__((aligned(1), may_alias));
typedef vu vu_any __attribute__((aligned(1), may_alias));
typedef vh vh_any __attribute__((aligned(1), may_alias));
typedef v4 v4_any __attribute__((aligned(1), may_alias));

struct bf16 {
    uint16_t bits;
};

constexpr uint32_t HIGH = 0xffff0000u;

#if defined(__AVX512BF16__)
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

// The unit of values of type T, and how many values it has.
template <class T>
using Unit = std::conditional_t<PAIRED && std::is_same_v<T, bf16>, uint32_t, float>;
template <class T>
constexpr int PER_UNIT = std::is_same_v<Unit<T>, float> ? 1 : 2;
// W units.
template <class T>
using Units = std::conditional_t<PER_UNIT<T> == 1, vf, vu>;

// Keeps the compiler from loading ``x`` again for each use.
INLINE void in_register([[maybe_unused]] vu& x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#endif
}

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat(uint32_t x) { return x - vu{}; }
#if defined(__AVX512F__)
INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }
#endif

// sum + a · b, lane by lane; a lane of integers is a pair of bfloat16, whose two products are added.
INLINE vf add_product(vf sum, vf a, vf b) { return sum + a * b; }
INLINE vf add_product(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & HIGH) * (vf)(b & HIGH);
#endif
}

// Rounds to bfloat16, to nearest even, in the lower half of each lane. NaN stays NaN.
INLINE vu round_low(vf x) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu u = (vu)x;
    vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return (vu)(x == x ? (vi)rounded : (vi)(u | 0x400000u)) >> 16;
#endif
}

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE vu load(const uint32_t* p) { return *(const vu_any*)p; }
// GCC 12 converts vectors of 16-bit integers in several steps; the instructions that do it in one are named here.
INLINE vu extended(const bf16* p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector(*(const vh_any*)p, vu);
#endif
}
INLINE void store_low(bf16* p, vu x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
#else
    *(vh_any*)p = __builtin_convertvector(x, vh);
#endif
}
INLINE vf load(const bf16* p) { return (vf)(extended(p) << 16); }
INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
INLINE void store(uint32_t* p, vu x) { *(vu_any*)p = x; }
INLINE void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_low(p, round_low(x));
#endif
}

// Up to W values: the rest reads as zero and is not written. ``count`` is W in all but the last call of a row.
template <class T>
INLINE vf load(const T* p, int64_t count) {
    if (count >= W) return load(p);
    T part[W] = {};
    memcpy(part, p, count * sizeof(T));
    return load(part);
}

template <class T>
INLINE void store(T* p, vf x, int64_t count) {
    if (count >= W) return store(p, x);
    T part[W];
    store(part, x);
    memcpy(p, part, count * sizeof(T));
}

// 2 · W values as two vectors, in an order of the type's own.
INLINE void load_pair(const float* p, vf& a, vf& b) { a = load(p), b = load(p + W); }
INLINE void load_pair(const bf16* p, vf& a, vf& b) {
    vu both = *(const vu_any*)p;
    a = (vf)(both << 16), b = (vf)(both & HIGH);
}
// The first or the second vector of such a pair.
template <int HALF>
INLINE vf load_half(const float* p) { return load(p + HALF * W); }
template <int HALF>
INLINE vf load_half(const bf16* p) {
    vu both = *(const vu_any*)p;
    return (vf)(HALF ? both & HIGH : both << 16);
}
INLINE void store_pair(float* p, vf a, vf b) { store(p, a), store(p + W, b); }
INLINE void store_pair(bf16* p, vf a, vf b) {
    *(vu_any*)p = round_low(a) | round_low(b) << 16;
}

template <class T>
INLINE void load_pair(const T* p, int64_t count, vf& a, vf& b) {
    if (count >= 2 * W) return load_pair(p, a, b);
    T part[2 * W] = {};
    memcpy(part, p, count * sizeof(T));
    load_pair(part, a, b);
}

template <class T>
INLINE void store_pair(T* p, int64_t count, vf a, vf b) {
    if (count >= 2 * W) return store_pair(p, a, b);
    T part[2 * W];
    store_pair(part, a, b);
    memcpy(p, part, count * sizeof(T));
}

// W units from ``p``, where ``count`` values are left; the rest reads as zero.
INLINE vf load_units(const float* p, int64_t count) { return load(p, count); }
INLINE Units<bf16> load_units(const bf16* p, int64_t count) {
    if (!PAIRED) return (Units<bf16>)load(p, count);
    if (count >= 2 * W) return (Units<bf16>)*(const vu_any*)p;
    bf16 part[2 * W] = {};
    memcpy(part, p, count * sizeof(bf16));
    return (Units<bf16>)*(const vu_any*)part;
}

// The value that a type would keep.
INLINE vf rounded(vf x, const float*) { return x; }
INLINE vf rounded(vf x, const bf16*) { return (vf)(round_low(x) << 16); }

#ifdef __clang__
#define SHUFFLE1(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#define SHUFFLE2(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE1(a, ...) __builtin_shuffle(a, (vi){__VA_ARGS__})
#define SHUFFLE2(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Sums of neighbours of ``a``, then of ``b``, within each group of four lanes.
INLINE vf add_neighbours(vf a, vf b) {
#if defined(__AVX512F__)
    return SHUFFLE2(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           SHUFFLE2(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif defined(__AVX2__)
    return SHUFFLE2(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE2(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
    return SHUFFLE2(a, b, 0, 2, 4, 6) + SHUFFLE2(a, b, 1, 3, 5, 7);
#endif
}

// The sum of the lanes of each of four vectors.
INLINE v4 sums(vf a, vf b, vf c, vf d) {
    vf x = add_neighbours(add_neighbours(a, b), add_neighbours(c, d));
#if defined(__AVX512F__)
    x += SHUFFLE1(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += SHUFFLE1(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif defined(__AVX2__)
    x += SHUFFLE1(x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
    v4 low;
    memcpy(&low, &x, sizeof low);
    return low;
}

INLINE float sum(vf x) { return sums(x, x, x, x)[0]; }

INLINE float largest(vf x) {
#if defined(__AVX512F__)
    x = max(x, SHUFFLE1(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = max(x, SHUFFLE1(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#elif defined(__AVX2__)
    x = max(x, SHUFFLE1(x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
    v4 m;
    memcpy(&m, &x, sizeof m);
    float a = m[0] > m[1] ? m[0] : m[1], b = m[2] > m[3] ? m[2] : m[3];
    return a > b ? a : b;
}

// Lanes of ``a`` and ``b`` in turn: those of the lower halves, or of the upper halves.
INLINE vf interleave_low(vf a, vf b) {
#if defined(__AVX512F__)
    return SHUFFLE2(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return SHUFFLE2(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return SHUFFLE2(a, b, 0, 4, 1, 5);
#endif
}
INLINE vf interleave_high(vf a, vf b) {
#if defined(__AVX512F__)
    return SHUFFLE2(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE2(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE2(a, b, 2, 6, 3, 7);
#endif
}

// Transposes W rows of W lanes in log2(W) perfect shuffles.
template <class V>
INLINE void transpose(V (&rows)[W]) {
    UNROLL for (int step = 1; step < W; step *= 2) {
        V next[W];
        UNROLL for (int i = 0; i < W / 2; i++) {
            next[2 * i] = (V)interleave_low((vf)rows[i], (vf)rows[i + W / 2]);
            next[2 * i + 1] = (V)interleave_high((vf)rows[i], (vf)rows[i + W / 2]);
        }
        UNROLL for (int i = 0; i < W; i++) rows[i] = next[i];
    }
}

// e^x within 2 units in the last place; 0 below -87, the largest result is e^88. Range reduction and polynomial are
// those of Cephes' expf (Moshier, 1992): x = n · ln 2 + r, e^r by a polynomial, times 2^n through the exponent.
INLINE vf exponential(vf x) {
    vf bounded = min(splat(88.0f), max(splat(-87.0f), x));  // NaN passes
    vf n = bounded * 1.44269504088896341f + 12582912.0f;  // adding 1.5 · 2^23 rounds to an integer
    vi exponent = ((vi)n - 0x4b400000 + 127) << 23;
    n -= 12582912.0f;
    vf r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p *= (vf)exponent;
    return x < -87.0f ? vf{} : p;
}

// 2^x for x <= 0, within 2 units in the last place; 0 from -126 down. The polynomial is that of Cephes' exp2f (Moshier,
// 1992).
INLINE vf power_of_two(vf x, const float*) {
    vf bounded = max(splat(-126.0f), x);  // NaN passes
    vf shifted = bounded + 12582912.0f;  // adding 1.5 · 2^23 rounds to an integer
    vf r = bounded - (shifted - 12582912.0f);
    vf p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    return bounded <= -126.0f ? vf{} : (vf)((vi)p + ((vi)shifted << 23));
}

INLINE vf exponential(vf x, const float*) { return exponential(x); }
INLINE vf reciprocal(vf x, const float*) { return 1.0f / x; }

// The same for results that are kept as bfloat16: within 2^-13, by a polynomial of degree 3 on [0, 1).
#if defined(__AVX512F__)
INLINE vf power_of_two(vf x, const bf16*) {
    constexpr int FLOOR = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    vf r = (vf)_mm512_reduce_ps((__m512)x, FLOOR);  // x - floor(x)
    vf p = splat(0.0780242756f);
    p = p * r + 0.22606726f;
    p = p * r + 0.695833623f;
    p = p * r + 0.999925196f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // p · 2^floor(x)
}
INLINE vf exponential(vf x, const bf16* as) { return power_of_two(x * 1.44269504088896341f, as); }
INLINE vf reciprocal(vf x, const bf16*) { return (vf)_mm512_rcp14_ps((__m512)x); }
#else
INLINE vf power_of_two(vf x, const bf16*) { return power_of_two(x, (const float*)nullptr); }
INLINE vf exponential(vf x, const bf16*) { return exponential(x); }
INLINE vf reciprocal(vf x, const bf16*) { return 1.0f / x; }
#endif
