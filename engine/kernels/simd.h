// Vectors of 16 floats, and the types bfloat16 and IEEE's half precision.
//
// Rule 1: everything that depends on the processor is in files whose names begin with "simd": here,
// in simd_products.h and in simd_amx.h. On a processor without any of these features, the compiler's
// vector extensions make correct code.
// Rule 2: a NaN stays a NaN in every conversion, because the sampler refuses rows that have one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__GNUC__) && !defined(__clang__)
// Compilers differ in how they pass vectors for which the processor has no registers. That does not
// matter here, because every function with such a vector is inlined or in this one compilation.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic push
// GCC's own header copies uninitialised vectors on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define TRIOLET_NEON 1
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "simd_lanes.h"

// A function that inner loops call. Without this GCC leaves some of them out of line, because the whole
// library is large: measured on Zen 3, a step took twice as long.
#define TRIOLET_INLINE __attribute__((always_inline)) static inline

namespace triolet {

#if defined(__AVX512F__)
typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint8_t b64 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef int8_t b16 __attribute__((vector_size(16)));
#else
#if defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
typedef Lanes<float, 64, REGISTER> v16;
typedef Lanes<uint32_t, 64, REGISTER> u16v;
typedef Lanes<int32_t, 64, REGISTER> i16v;
typedef Lanes<uint8_t, 64, REGISTER> b64;
#endif

struct bf16 {
    uint16_t bits;
};

struct f16 {  // IEEE's half precision
    uint16_t bits;
};

constexpr float F16_MOST = 65504.0f;

constexpr int LANES = 16;

#if defined(__AVX512F__)
TRIOLET_INLINE v16 splat(float value) { return value - (v16){}; }
TRIOLET_INLINE i16v splat(int32_t value) { return value - (i16v){}; }
TRIOLET_INLINE u16v splat(uint32_t value) { return value - (u16v){}; }

// Copies a number or a vector from memory.
template <class V>
TRIOLET_INLINE V load_as(const void *from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

// Returns 16 numbers of 16 bits, each with 16 zeros above.
TRIOLET_INLINE u16v widen(const void *from) {
    return __builtin_convertvector(load_as<h16>(from), u16v);
}

// Stores the lower 16 bits of each number.
TRIOLET_INLINE void store_narrow(void *to, u16v value) {
    const h16 narrow = __builtin_convertvector(value, h16);
    memcpy(to, &narrow, sizeof narrow);
}

// Stores numbers that fit 8 bits.
TRIOLET_INLINE void store_bytes(int8_t *to, i16v value) {
    const b16 narrow = __builtin_convertvector(value, b16);
    memcpy(to, &narrow, sizeof narrow);
}

TRIOLET_INLINE v16 to_floats(i16v value) { return __builtin_convertvector(value, v16); }
#else
TRIOLET_INLINE v16 splat(float value) { return v16::splat(value); }
TRIOLET_INLINE i16v splat(int32_t value) { return i16v::splat(value); }
TRIOLET_INLINE u16v splat(uint32_t value) { return u16v::splat(value); }

template <class V>
TRIOLET_INLINE V load_as(const void *from) {
    if constexpr (std::is_class_v<V>) {
        return V::from(from);
    } else {
        V value;
        memcpy(&value, from, sizeof value);
        return value;
    }
}

// A register's lanes as numbers of 16 and 8 bits.
typedef uint16_t Halves __attribute__((vector_size(REGISTER / 2)));
typedef int8_t Bytes __attribute__((vector_size(REGISTER / 4)));

TRIOLET_INLINE u16v widen(const void *from) {
    return u16v::each([=](int i) {
#if defined(__AVX2__)
        // GCC 12 converts a vector of halves in two parts, with five instructions for this one.
        const __m128i whole = _mm_loadu_si128((const __m128i *)from + i);
        return (u16v::Part)_mm256_cvtepu16_epi32(whole);
#else
        Halves own;
        memcpy(&own, (const char *)from + i * sizeof own, sizeof own);
        return __builtin_convertvector(own, u16v::Part);
#endif
    });
}

TRIOLET_INLINE void store_narrow(void *to, u16v value) {
#pragma GCC unroll 4
    for (int i = 0; i < u16v::PARTS; i++) {
        const auto narrow = __builtin_convertvector(value.part[i], Halves);
        memcpy((char *)to + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

TRIOLET_INLINE void store_bytes(int8_t *to, i16v value) {
    // The numbers become 16 bits first, because every processor halves a width with one instruction.
#pragma GCC unroll 4
    for (int i = 0; i < i16v::PARTS; i++) {
        const auto half = __builtin_convertvector((u16v::Part)value.part[i], Halves);
        const auto narrow = __builtin_convertvector(half, Bytes);
        memcpy(to + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

TRIOLET_INLINE v16 to_floats(i16v value) {
    return v16::each([=](int i) { return __builtin_convertvector(value.part[i], v16::Part); });
}
#endif

// Returns 0, 1, … 15.
static inline i16v lane_numbers() {
    static const int32_t own[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_as<i16v>(own);
}

TRIOLET_INLINE v16 load(const float *from) { return load_as<v16>(from); }

TRIOLET_INLINE v16 load(const bf16 *from) { return (v16)(widen(from) << 16); }

TRIOLET_INLINE v16 load(const f16 *from) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return v16::each([=](int i) {
        return (v16::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + i));
    });
#elif defined(TRIOLET_NEON)
    return v16::each([=](int i) {
        return (v16::Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits + 4 * i)));
    });
#else
    u16v half = widen(from);
    u16v rest = half & 0x7fff;
    v16 magnitude = (v16)(rest << 13) * 0x1p112f;  // exact, also below the normal numbers
    u16v beyond = (u16v)(rest > 0x7bff) & 0x7f800000;  // infinity, or a NaN
    return (v16)((u16v)magnitude | beyond | (half & 0x8000) << 16);
#endif
}

// Converts 16 bytes.
TRIOLET_INLINE v16 load(const int8_t *from) {
#if defined(__AVX512F__)
    return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
    return v16::each([=](int i) {
        const __m128i own = _mm_loadl_epi64((const __m128i *)(from + 8 * i));
        return (v16::Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(own));
    });
#else
    return v16::each([=](int i) {
        Bytes own;
        memcpy(&own, from + i * sizeof own, sizeof own);
        return __builtin_convertvector(own, v16::Part);
    });
#endif
}

// Converts the low nibbles of 16 bytes, or the high ones.
template <bool ARE_HIGH>
TRIOLET_INLINE v16 load_nibbles(const uint8_t *from) {
#if defined(__AVX512F__)
    const auto both = load_as<__m128i>(from);
    const auto own = _mm_and_si128(ARE_HIGH ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));
    return (v16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(own));
#elif defined(__AVX2__)
    return v16::each([=](int i) {
        const __m128i both = _mm_loadl_epi64((const __m128i *)(from + 8 * i));
        const auto own = _mm_and_si128(ARE_HIGH ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));
        return (v16::Part)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(own));
    });
#else
    return v16::each([=](int i) {
        uint8_t own __attribute__((vector_size(sizeof(Bytes))));
        memcpy(&own, from + i * sizeof own, sizeof own);
        return __builtin_convertvector(ARE_HIGH ? own >> 4 : own & 15, v16::Part);
    });
#endif
}

// Copies a vector to memory.
template <class V>
TRIOLET_INLINE void store_as(void *to, V value) {
#if defined(__AVX512F__)
    memcpy(to, &value, sizeof value);
#else
    value.to(to);
#endif
}

TRIOLET_INLINE void store(float *to, v16 value) { store_as(to, value); }

TRIOLET_INLINE void store(bf16 *to, v16 value) {
#if defined(__AVX512BF16__)
    auto narrow = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &narrow, sizeof narrow);
#else
    u16v bits = (u16v)value;
    u16v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    u16v is_nan = (u16v)(value != value);
    rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
    store_narrow(to, rounded);
#endif
}

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline float to_float(f16 value) {
    uint32_t bits = (uint32_t)(value.bits & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f;
    if ((value.bits & 0x7fff) > 0x7bff) magnitude = value.bits & 0x3ff ? NAN : INFINITY;
    return value.bits & 0x8000 ? -magnitude : magnitude;
}

static inline void store_one(float *to, float value) { *to = value; }

static inline void store_one(bf16 *to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = (uint16_t)bits;
}

TRIOLET_INLINE v16 pick(i16v where, v16 yes, v16 no) {
    return (v16)((where & (i16v)yes) | (~where & (i16v)no));
}

TRIOLET_INLINE v16 max16(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return v16::each([=](int i) { return (v16::Part)_mm256_max_ps(a.part[i], b.part[i]); });
#else
    return pick(a > b, a, b);
#endif
}

// Rounds to the nearest number, ties to even. A finite number that is too large becomes the largest.
TRIOLET_INLINE void store(f16 *to, v16 value) {
    const v16 least = splat(-F16_MOST);
    const i16v is_finite = ((i16v)value & 0x7fffffff) < 0x7f800000;
    value = pick(is_finite, -max16(least, -max16(least, value)), value);
#if defined(__AVX512F__)
    const __m256i own = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &own, sizeof own);
#elif defined(__AVX2__) && defined(__F16C__)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i *)to + i,
                         _mm256_cvtps_ph((__m256)value.part[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(TRIOLET_NEON)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        vst1_u16(&to->bits + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(value.part[i])));
#else
    const u16v bits = (u16v)value & 0x7fffffff;
    // Below the normal numbers, an addition rounds; otherwise the carry into the kept bits does.
    const u16v small = (u16v)((v16)bits + 0.5f) - 0x3f000000;
    const u16v normal = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    const i16v is_small = (i16v)bits < 0x38800000;
    u16v half = (u16v)pick(is_small, (v16)small, (v16)normal);
    half = (u16v)pick(is_finite, (v16)half, (v16)splat((uint32_t)0x7c00));
    half |= (u16v)(value != value) & 0x200;
    store_narrow(to, half | (((u16v)value >> 16) & 0x8000));
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
    i16v lane = lane_numbers();
    i16v is_second = (lane & STRIDE) != 0;
    __m512i same = (__m512i)(lane + (is_second & 16));
    __m512i other = (__m512i)((lane ^ STRIDE) + (is_second & 16));
    return (v16)_mm512_permutex2var_ps((__m512)a, same, (__m512)b) +
           (v16)_mm512_permutex2var_ps((__m512)a, other, (__m512)b);
#else
    return fold_lanes<STRIDE>(a, b);
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
TRIOLET_INLINE v16 multiply_add(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return v16::each([=](int i) {
        return (v16::Part)_mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
    });
#elif defined(TRIOLET_NEON)
    return v16::each([=](int i) {
        return (v16::Part)vfmaq_f32(c.part[i], a.part[i], b.part[i]);
    });
#else
    return a * b + c;
#endif
}

// Rounds numbers of at most 2^21 to the nearest integers, ties to even.
TRIOLET_INLINE i16v to_integers(v16 value) {
#if defined(__AVX512F__)
    return (i16v)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
    return i16v::each([=](int i) { return (i16v::Part)_mm256_cvtps_epi32(value.part[i]); });
#elif defined(TRIOLET_NEON)
    return i16v::each([=](int i) { return (i16v::Part)vcvtnq_s32_f32(value.part[i]); });
#else
    return (i16v)(value + 12582912.0f) - 0x4b400000;  // rounds by the mantissa's end
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Combines the 16 numbers of a vector, two by two, until one is left. ``combine`` takes and returns
// registers of four numbers.
template <class V, class Combine>
TRIOLET_INLINE int32_t reduce(V value, Combine combine) {
    const __m256i low = (__m256i)value.part[0], high = (__m256i)value.part[1];
    __m128i own = combine(
        combine(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high)),
        combine(_mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1)));
    own = combine(own, _mm_shuffle_epi32(own, 0b01001110));
    own = combine(own, _mm_shuffle_epi32(own, 0b10110001));
    return _mm_cvtsi128_si32(own);
}
#endif

// Returns the largest magnitude as the bits of a float. Those of a NaN are above all others.
TRIOLET_INLINE uint32_t highest_magnitude(u16v bits) {
    bits &= 0x7fffffff;
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)bits);
#elif defined(__AVX2__)
    return (uint32_t)reduce(bits, [](__m128i a, __m128i b) __attribute__((always_inline)) {
        return _mm_max_epu32(a, b);
    });
#else
    uint32_t own[LANES], best = 0;
    memcpy(own, &bits, sizeof own);
    for (int i = 0; i < LANES; i++) best = own[i] > best ? own[i] : best;
    return best;
#endif
}

// Returns the sum of 16 integers.
TRIOLET_INLINE int32_t sum(i16v value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#elif defined(__AVX2__)
    return reduce(value, [](__m128i a, __m128i b) __attribute__((always_inline)) {
        return _mm_add_epi32(a, b);
    });
#else
    int32_t own[LANES], total = 0;
    memcpy(own, &value, sizeof own);
    for (int i = 0; i < LANES; i++) total += own[i];
    return total;
#endif
}

// Tells the processor that its thread spins.
static inline void spin() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace triolet
