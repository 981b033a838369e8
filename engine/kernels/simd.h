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
#if defined(__AVX512F__) || defined(__AVX2__)
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
typedef uint8_t b64 __attribute__((vector_size(64)));
typedef int8_t b16 __attribute__((vector_size(16)));

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

// --- integers -----------------------------------------------------------------------------------

// Returns a * b + c with one rounding where the processor has such an instruction, so that every
// kernel that computes a number rounds it alike.
static inline v16 multiply_add(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline v16 to_floats(i16v value) { return __builtin_convertvector(value, v16); }

// Rounds numbers of at most 2^21 to the nearest integers, ties to even.
static inline i16v to_integers(v16 value) {
#if defined(__AVX512F__)
    return (i16v)_mm512_cvtps_epi32((__m512)value);
#else
    return (i16v)(value + 12582912.0f) - 0x4b400000;  // rounds by the mantissa's end
#endif
}

// Returns the largest magnitude as the bits of a float. Those of a NaN are above all others.
static inline uint32_t highest_magnitude(u16v bits) {
    bits &= 0x7fffffff;
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)bits);
#else
    uint32_t best = 0;
    for (int i = 0; i < LANES; i++) best = bits[i] > best ? bits[i] : best;
    return best;
#endif
}

// Converts 16 finite numbers of IEEE's half precision.
static inline v16 load_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps(load_as<__m256i>(from));
#else
    u16v half = __builtin_convertvector(load_as<h16>(from), u16v);
    v16 magnitude = (v16)((half & 0x7fff) << 13) * 0x1p112f;  // exact, also below the normal numbers
    return (v16)((u16v)magnitude | (half & 0x8000) << 16);
#endif
}

static inline float to_float_of_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

// Returns the name of the instructions that `add_quads` uses, for people to read.
[[maybe_unused]] static const char *integer_kind() {
#if defined(__AVX512VNNI__)
    return "AVX512-VNNI";
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    return "AVX-VNNI";
#elif defined(__AVX512BW__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "vectors";
#endif
}

#if defined(__AVX2__)
// Does for half of the sums what `add_quads` does.
static inline __m256i add_half_quads(__m256i acc, __m256i bytes, __m256i quad) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, bytes, quad);
#else
    // `vpmaddubsw` would saturate. Even and odd bytes are multiplied as numbers of 16 bits.
    const __m256i low = _mm256_set1_epi16(0xff);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(bytes, low), even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8),
                                                   _mm256_srai_epi16(quad, 8)));
#endif
}
#endif

// Adds to each of 16 sums the products of its four bytes, which are unsigned, with the four signed
// bytes of ``quad``. The sums are exact.
static inline i16v add_quads(i16v acc, b64 bytes, int32_t quad) {
#if defined(__AVX512VNNI__)
    return (i16v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, _mm512_set1_epi32(quad));
#elif defined(__AVX512BW__) && !(defined(__AVX2__) && defined(__AVXVNNI__))
    const __m512i low = _mm512_set1_epi16(0xff), all = _mm512_set1_epi32(quad);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8);
    __m512i sum = _mm512_madd_epi16(_mm512_and_si512((__m512i)bytes, low), even);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16((__m512i)bytes, 8),
                                                  _mm512_srai_epi16(all, 8)));
    return acc + (i16v)sum;
#elif defined(__AVX2__)
    __m256i sums_[2], parts[2];
    memcpy(sums_, &acc, sizeof acc);
    memcpy(parts, &bytes, sizeof bytes);
    for (int i = 0; i < 2; i++) sums_[i] = add_half_quads(sums_[i], parts[i], _mm256_set1_epi32(quad));
    return load_as<i16v>(sums_);
#else
    const u16v four = (u16v)bytes;
    acc += (i16v)(four & 0xff) * (int32_t)(int8_t)quad;
    acc += (i16v)(four >> 8 & 0xff) * (int32_t)(int8_t)(quad >> 8);
    acc += (i16v)(four >> 16 & 0xff) * (int32_t)(int8_t)(quad >> 16);
    acc += (i16v)(four >> 24) * (int32_t)(int8_t)(quad >> 24);
    return acc;
#endif
}

// Returns a table of 16 bytes as `look_up` takes it: in each 16 bytes of a vector.
static inline b64 spread_table(const uint8_t *table) {
    uint8_t own[64];
    for (int i = 0; i < 64; i++) own[i] = table[i % 16];
    return load_as<b64>(own);
}

// Returns for each byte of ``codes``, which are below 16, the byte at its place in ``table``.
static inline b64 look_up(b64 codes, b64 table) {
#if defined(__AVX512BW__)
    return (b64)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    __m256i parts[2], tables[2];
    memcpy(parts, &codes, sizeof codes);
    memcpy(tables, &table, sizeof table);
    for (int i = 0; i < 2; i++) parts[i] = _mm256_shuffle_epi8(tables[i], parts[i]);
    return load_as<b64>(parts);
#else
    uint8_t own[64], from[64];
    memcpy(own, &codes, sizeof codes);
    memcpy(from, &table, sizeof table);
    for (int i = 0; i < 64; i++) own[i] = from[own[i]];
    return load_as<b64>(own);
#endif
}

}  // namespace triolet
