// Vectors of 16 floats, and the type bfloat16.
//
// Rule 1: everything that depends on the processor is here or in matmul.h. On a processor without
// any of these features, the compiler's vector extensions make correct code.
// Rule 2: a NaN stays a NaN in every conversion, because the sampler refuses rows that have one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// Compilers differ in how they pass vectors for which the processor has no registers. That does not
// matter here, because every function with such a vector is inlined or in this one compilation.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic push
// GCC's own header copies uninitialised vectors on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace triolet {

typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

constexpr int LANES = 16;

static inline v16 splat(float value) { return value - (v16){}; }

template <class V>
static inline V load_as(const void *from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline v16 load(const float *from) { return load_as<v16>(from); }

static inline v16 load(const bf16 *from) {
    u16v wide = __builtin_convertvector(load_as<h16>(from), u16v) << 16;
    return (v16)wide;
}

static inline void store(float *to, v16 value) { memcpy(to, &value, sizeof value); }

static inline void store(bf16 *to, v16 value) {
#if defined(__AVX512BF16__)
    auto narrow = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &narrow, sizeof narrow);
#else
    u16v bits = (u16v)value;
    u16v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    u16v is_nan = (u16v)(value != value);
    rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
    h16 narrow = __builtin_convertvector(rounded, h16);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline void store_one(float *to, float value) { *to = value; }

static inline void store_one(bf16 *to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = (uint16_t)bits;
}

static inline v16 pick(i16v where, v16 yes, v16 no) {
    return (v16)((where & (i16v)yes) | (~where & (i16v)no));
}

static inline v16 max16(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

static inline float sum(v16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float parts[LANES], total = 0.0f;
    memcpy(parts, &value, sizeof parts);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    total = parts[0];
    return total;
#endif
}

static inline float highest(v16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float parts[LANES], best;
    memcpy(parts, &value, sizeof parts);
    best = parts[0];
    for (int i = 1; i < LANES; i++) best = parts[i] > best ? parts[i] : best;
    return best;
#endif
}

// e^r for |r| <= ln 2 / 2, to about 1 ulp. Source: Cephes `expf`.
static inline v16 exp_of_rest(v16 r) {
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x = 2^n e^r. A result below the normal numbers is 0; a NaN stays a NaN.
static inline v16 exp16(v16 x) {
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f, PER_LN2 = 1.44269504f;
#if defined(__AVX512F__)
    // Masked lanes cost nothing; a result below the normal numbers would cost a hundred cycles. The
    // comparison is "not less than", so that a NaN is not masked.
    const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    v16 n = (v16)_mm512_roundscale_ps((__m512)(x * PER_LN2), _MM_FROUND_TO_NEAREST_INT);
    v16 rest = exp_of_rest(x - n * LN2_HIGH - n * LN2_LOW);
    return (v16)_mm512_maskz_scalef_ps(is_seen, (__m512)rest, (__m512)n);
#else
    i16v is_low = x < -87.0f;
    v16 top = pick(x > 88.0f, splat(88.0f), x);
    v16 safe = pick(is_low, splat(0.0f), top);
    v16 n = safe * PER_LN2 + 12582912.0f;  // rounds to nearest by the mantissa's end
    i16v whole = (i16v)n - 0x4b400000;
    n -= 12582912.0f;
    v16 scale = (v16)((whole + 127) << 23);
    return pick(is_low, splat(0.0f), exp_of_rest(safe - n * LN2_HIGH - n * LN2_LOW) * scale);
#endif
}

// tanh by e^2x. For small x, where 1 - 2 / (e^2x + 1) would cancel, by its series.
static inline v16 tanh16(v16 x) {
    v16 big = 1.0f - 2.0f / (exp16(x + x) + 1.0f);
    v16 s = x * x;
    v16 small = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f
        + s * 0.0218694885f)));
    i16v is_small = (x < 0.35f) & (x > -0.35f);
    return pick(is_small, small, pick(x > 40.0f, splat(1.0f), big));
}

// One step of `sums`. Lane i becomes (i & STRIDE) ? b[i] + b[i ^ STRIDE] : a[i] + a[i ^ STRIDE].
template <int STRIDE>
static inline v16 fold(v16 a, v16 b) {
#if defined(__AVX512F__)
    i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i16v is_second = (lane & STRIDE) != 0;
    __m512i same = (__m512i)(lane + (is_second & 16));
    __m512i other = (__m512i)((lane ^ STRIDE) + (is_second & 16));
    return (v16)_mm512_permutex2var_ps((__m512)a, same, (__m512)b) +
           (v16)_mm512_permutex2var_ps((__m512)a, other, (__m512)b);
#else
    float first[LANES], second[LANES], out[LANES];
    memcpy(first, &a, sizeof first);
    memcpy(second, &b, sizeof second);
    for (int i = 0; i < LANES; i++)
        out[i] = (i & STRIDE) ? second[i] + second[i ^ STRIDE] : first[i] + first[i ^ STRIDE];
    return load(out);
#endif
}

// Returns the sums of 16 vectors, that of parts[i] in lane i. Overwrites ``parts``.
static inline v16 sums(v16 *parts) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) parts[i] = fold<1>(parts[2 * i], parts[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) parts[i] = fold<2>(parts[2 * i], parts[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) parts[i] = fold<4>(parts[2 * i], parts[2 * i + 1]);
    return fold<8>(parts[0], parts[1]);
}

}  // namespace triolet
