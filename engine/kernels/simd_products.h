// Sums of products, as the processor has instructions for them: pairs of bfloat16, and fours of
// bytes. Also here: how many sums its registers hold, and the names of its instructions.
#pragma once

#include <climits>

#include "simd.h"

namespace triolet {

// Names of the instructions for people to read.
[[maybe_unused]] static const char *float_kind() {
#if defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2";
#elif defined(TRIOLET_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON-BF16";
#elif defined(TRIOLET_NEON)
    return "NEON";
#else
    return "vectors";
#endif
}

[[maybe_unused]] static const char *integer_kind() {
#if defined(__AVX512VNNI__)
    return "AVX512-VNNI";
#elif defined(__AVX512BW__)
    return "AVX-512";
#elif defined(__AVX512F__)
    return "vectors";
#elif defined(__AVX2__) && defined(__AVXVNNI__)
    return "AVX-VNNI";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(TRIOLET_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    return "NEON-I8MM";
#elif defined(TRIOLET_NEON) && defined(__ARM_FEATURE_DOTPROD)
    return "NEON-DOTPROD";
#elif defined(TRIOLET_NEON)
    return "NEON";
#else
    return "vectors";
#endif
}

// MOST_ROWS: the rows of a block with one or two panels in bfloat16; MOST_FLOAT_ROWS: in float32.
// FEW_ROWS: up to so many rows, a block has four panels; with rows in float32 and weights in
// bfloat16, FEW_BF16_PANELS. FETCHING_ROWS: up to so many rows, a block also fetches the next panels.
#if defined(__AVX512F__)
// With 12 rows 24 of 32 registers hold sums, and with four panels of 4 rows 16.
constexpr int MOST_ROWS = 12, MOST_FLOAT_ROWS = 12, FEW_ROWS = 4;
constexpr int FEW_BF16_PANELS = 4;
constexpr long FETCHING_ROWS = 64;  // measured: with more rows, a block does not wait for memory
// A block of integers has 6 rows and 2 panels: 12 sums of integers and 12 of floats in registers.
constexpr int SMALL_ROWS = 6, SMALL_PANELS = 2;
#else
constexpr int MOST_ROWS = 4, FEW_ROWS = 1;  // a vector takes two registers of 16, or four of 32
#if defined(__AVX2__)
constexpr int MOST_FLOAT_ROWS = 6;  // 12 sums, a panel's two vectors, and a number of a row
constexpr int FEW_BF16_PANELS = 2;  // with four, a sum is in memory: 1.7 times as long on Zen 4
#else
constexpr int MOST_FLOAT_ROWS = 4;
constexpr int FEW_BF16_PANELS = 4;
#endif
constexpr long FETCHING_ROWS = 0;
// A block of integers has 4 rows and a panel. Its sums of integers fill half of the registers or
// more, so that its sums of floats are in memory.
constexpr int SMALL_ROWS = 4, SMALL_PANELS = 1;
#endif

// For weights of 8 bits or fewer: how many rows of codes (`CodeSum`) a block computes, how many
// panels a block of a single row computes, how many bytes ahead weights and scales are fetched (0: they
// are not), and for how many rows codes of 2 and 4 bits, and of others, are not unpacked first. A single
// row reads one panel that is fetched in time faster than several side by side (measured on Zen 3 and
// Zen 4).
#if defined(__AVX512F__)
constexpr int CODE_ROWS = SMALL_ROWS, FEW_SMALL_PANELS = 1;
constexpr long SMALL_AHEAD = 1536, PACKED_ROWS = 128, LONGER_PACKED_ROWS = 64;
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
// Measured on Zen 3: with two rows the sums of floats are in registers, too.
constexpr int CODE_ROWS = 2, FEW_SMALL_PANELS = 1;
constexpr long SMALL_AHEAD = 1536, PACKED_ROWS = 16, LONGER_PACKED_ROWS = 4;
#else
constexpr int CODE_ROWS = SMALL_ROWS, FEW_SMALL_PANELS = 2;
constexpr long SMALL_AHEAD = 0, PACKED_ROWS = 4, LONGER_PACKED_ROWS = 4;
#endif

// How many keys a decode scores at once, and how many vectors of values it adds up at once: their sums
// fit the registers.
#if defined(__AVX512F__)
constexpr int KEYS_AT_ONCE = 16, VALUES_AT_ONCE = 4;
#else
constexpr int KEYS_AT_ONCE = 4, VALUES_AT_ONCE = 2;
#endif

// In vectors of several registers, GCC keeps the sums of a block in memory if it inlines the block
// into a larger function: measured on Zen 3, that takes 1.5 times as long or more.
#if defined(__AVX512F__)
#define TRIOLET_APART
#else
#define TRIOLET_APART __attribute__((noinline))
#endif

// --- pairs of bfloat16 --------------------------------------------------------------------------

// Whether the processor multiplies pairs of bfloat16.
#if defined(__AVX512BF16__) || \
    (defined(TRIOLET_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

// Adds the products of 16 pairs with 16 others to 16 sums, both products of a pair to the same sum.
TRIOLET_INLINE v16 add_pairs(v16 acc, u16v pairs, u16v others) {
#if defined(__AVX512BF16__)
    return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)others, (__m512bh)pairs);
#elif defined(TRIOLET_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return v16::each([=](int i) {
        return (v16::Part)vbfdotq_f32(acc.part[i], vreinterpretq_bf16_u32(pairs.part[i]),
                                      vreinterpretq_bf16_u32(others.part[i]));
    });
#else
    acc = multiply_add((v16)(pairs << 16), (v16)(others << 16), acc);
    return multiply_add((v16)(pairs & 0xffff0000u), (v16)(others & 0xffff0000u), acc);
#endif
}

// Returns a vector of 16 copies of the pair at ``from``.
TRIOLET_INLINE u16v splat_pair(const bf16 *from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Otherwise GCC takes the pair apart in general registers, by eight instructions instead of
    // three.
    return u16v::each([=](int) { return (u16v::Part)_mm256_broadcast_ss((const float *)from); });
#else
    return splat(load_as<uint32_t>(from));
#endif
}

// Returns 16 pairs, each of a number of ``first`` and the number of ``second`` at the same place.
TRIOLET_INLINE u16v pair_up(const bf16 *first, const bf16 *second) {
    return widen(first) | widen(second) << 16;
}

// Pairs up VECTORS vectors of ``first`` with as many of ``second``.
template <int VECTORS>
TRIOLET_INLINE void pair_up(const bf16 *first, const bf16 *second, u16v *pairs) {
#if defined(__AVX512BW__)
    if constexpr (VECTORS % 2 == 0) {
        const i16v lane = lane_numbers();
        const i16v low = lane * 0x10001 + 0x200000, high = low + 0x100010;  // 16 bits: i, 32 + i
#pragma GCC unroll 2
        for (int c = 0; c < VECTORS; c += 2) {
            const auto a = load_as<__m512i>(first + c * LANES);
            const auto b = load_as<__m512i>(second + c * LANES);
            pairs[c] = (u16v)_mm512_permutex2var_epi16(a, (__m512i)low, b);
            pairs[c + 1] = (u16v)_mm512_permutex2var_epi16(a, (__m512i)high, b);
        }
        return;
    }
#endif
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; c++) pairs[c] = pair_up(first + c * LANES, second + c * LANES);
}

// --- fours of bytes -----------------------------------------------------------------------------

// What is added to a weight's number before it is packed. `vpdpbusd` multiplies unsigned bytes with
// signed ones; other processors multiply signed ones with each other.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__AVXVNNI__)) || \
    !(defined(__AVX2__) || defined(TRIOLET_NEON))
constexpr int ZERO = 128;
#else
constexpr int ZERO = 0;
#endif

#if !defined(__AVX512F__) && defined(__AVX2__)
// Does for a register of sums what `add_quads` does.
TRIOLET_INLINE __m256i add_quads_of(__m256i acc, __m256i bytes, __m256i quad) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, bytes, quad);
#else
    // The weight's sign moves to the row's number, which is never -128. Sums of two products are at
    // most 2 * 128 * 127 then, so that `vpmaddubsw` does not saturate.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(quad, bytes));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
#elif defined(TRIOLET_NEON)
TRIOLET_INLINE int32x4_t add_quads_of(int32x4_t acc, int8x16_t bytes, int8x16_t quad) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, bytes, quad);
#else
    // The row's numbers are never -128. Sums of two products are at most 2 * 128 * 127 then, which
    // 16 bits hold.
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(quad));
    const int16x8_t high = vmull_high_s8(bytes, quad);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
#endif

// Adds to each of 16 sums the products of its four bytes with the four signed bytes of ``quad``,
// of which none is -128. The bytes are numbers plus ZERO, unsigned if that is not 0. The sums are
// exact.
TRIOLET_INLINE i16v add_quads(i16v acc, b64 bytes, int32_t quad) {
#if defined(__AVX512VNNI__)
    return (i16v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, _mm512_set1_epi32(quad));
#elif defined(__AVX512BW__)
    const __m512i low = _mm512_set1_epi16(0xff), all = _mm512_set1_epi32(quad);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8);
    __m512i sum = _mm512_madd_epi16(_mm512_and_si512((__m512i)bytes, low), even);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16((__m512i)bytes, 8),
                                                  _mm512_srai_epi16(all, 8)));
    return acc + (i16v)sum;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_set1_epi32(quad);
    return i16v::each([=](int i) {
        return (i16v::Part)add_quads_of((__m256i)acc.part[i], (__m256i)bytes.part[i], all);
    });
#elif defined(TRIOLET_NEON)
    const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    return i16v::each([=](int i) {
        return (i16v::Part)add_quads_of(acc.part[i], vreinterpretq_s8_u8(bytes.part[i]), all);
    });
#else
    const u16v four = (u16v)bytes;
    acc += (i16v)(four & 0xff) * (int32_t)(int8_t)quad;
    acc += (i16v)(four >> 8 & 0xff) * (int32_t)(int8_t)(quad >> 8);
    acc += (i16v)(four >> 16 & 0xff) * (int32_t)(int8_t)(quad >> 16);
    acc += (i16v)(four >> 24) * (int32_t)(int8_t)(quad >> 24);
    return acc;
#endif
}

// Whether a decode over int8 keys multiplies integers: with fours of bytes, that takes half of the
// instructions that widening takes.
#if defined(__AVX512VNNI__)
constexpr bool SCORES_INTEGERS = true;

// Returns in quads[i] the i-th four bytes of each of 16 rows of up to 64 bytes, plus ZERO. Bytes
// behind the first ``count`` are not read.
TRIOLET_INLINE void load_quads(const int8_t *const *rows, long offset, long count, b64 *quads) {
    const __mmask64 own = count < 64 ? (1ull << count) - 1 : ~0ull;
    const __m512i zero = _mm512_set1_epi8((char)ZERO);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(own, rows[i] + offset), zero);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {  // pairs of rows; then fours, in each 16 bytes
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // a[i + 4 n] has four i, 4 + i, 8 + i, 12 + i of rows 4 n …
        const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0b01000100);
        const __m512i high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0b11101110);
        const __m512i low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0b01000100);
        const __m512i high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0b11101110);
        quads[i] = (b64)_mm512_shuffle_i32x4(low, low2, 0b10001000);
        quads[4 + i] = (b64)_mm512_shuffle_i32x4(low, low2, 0b11011101);
        quads[8 + i] = (b64)_mm512_shuffle_i32x4(high, high2, 0b10001000);
        quads[12 + i] = (b64)_mm512_shuffle_i32x4(high, high2, 0b11011101);
    }
}
#else
constexpr bool SCORES_INTEGERS = false;

TRIOLET_INLINE void load_quads(const int8_t *const *, long, long, b64 *) {}
#endif

// One vector of sums over a block of inputs, which begins with ``start``: minus what was added to each
// weight's number, times the sum of the row's numbers.
struct WideSum {
    static constexpr bool TAKES_EIGHT = false;
    i16v own;

    inline void begin(int32_t start) { own = splat(start); }
    inline void add(b64 bytes, int32_t quad) { own = add_quads(own, bytes, quad); }
    inline i16v total(int32_t) const { return own; }
};

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
typedef Lanes<int16_t, 64, REGISTER> Pairs;  // each lane has the products of two inputs

TRIOLET_INLINE Pairs pairs_of(b64 bytes, int32_t quad) {
    const __m256i all = _mm256_set1_epi32(quad);
    return Pairs::each([=](int i) {
        return (Pairs::Part)_mm256_maddubs_epi16((__m256i)bytes.part[i], all);
    });
}

TRIOLET_INLINE i16v add_up(Pairs pairs) {
    return i16v::each([=](int i) {
        return (i16v::Part)_mm256_madd_epi16((__m256i)pairs.part[i], _mm256_set1_epi16(1));
    });
}

// A vector of sums of codes of BITS. The products of eight inputs fit 16 bits, which takes half as
// many instructions.
template <int BITS>
struct EightSum {
    static constexpr bool TAKES_EIGHT = true;
    static_assert(2 * 2 * ((1 << BITS) - 1) * 127 < 1 << 15);
    i16v own;

    inline void begin(int32_t start) { own = splat(start); }
    inline void add(b64 low, int32_t quad, b64 high, int32_t other) {
        own += add_up(pairs_of(low, quad) + pairs_of(high, other));
    }
    inline i16v total(int32_t) const { return own; }
};

// With codes of 4 bits or fewer, the products of a whole block fit 16 bits.
struct ShortSum {
    static constexpr bool TAKES_EIGHT = false;
    static_assert(2 * 15 * 127 * (32 / 4) < 1 << 15, "a block has up to 32 inputs");
    Pairs own;

    inline void begin(int32_t) { own = Pairs::splat(0); }
    inline void add(b64 bytes, int32_t quad) { own += pairs_of(bytes, quad); }
    inline i16v total(int32_t start) const { return start + add_up(own); }
};

template <int BITS>
using CodeSum = std::conditional_t<(BITS > 4), EightSum<BITS>, ShortSum>;
#else
template <int BITS>
using CodeSum = WideSum;
#endif

// The sums of ROWS rows and PANELS panels over one block of inputs.
template <int ROWS, int PANELS, class Sum>
struct QuadSums {
    Sum of[ROWS][PANELS];

    // Begins the sums. ``start`` (m) returns the start of row m.
    template <class Start>
    __attribute__((always_inline)) inline void begin(Start start) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) of[m][n].begin(start(m));
    }

    // Adds the products of eight inputs. ``low`` (n) returns the bytes of panel n for the first four,
    // and ``high`` (n) those for the others. ``from`` are the first row's numbers, and the rows are
    // ``stride`` apart.
    template <class Low, class High>
    __attribute__((always_inline)) inline void add(const int8_t *from, long stride, Low low,
                                                   High high) {
        if constexpr (Sum::TAKES_EIGHT) {
            b64 first[PANELS], second[PANELS];
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) first[n] = low(n), second[n] = high(n);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++) {
                const int32_t quad = load_as<int32_t>(from + m * stride);
                const int32_t other = load_as<int32_t>(from + m * stride + 4);
#pragma GCC unroll 4
                for (int n = 0; n < PANELS; n++) of[m][n].add(first[n], quad, second[n], other);
            }
        } else {
            add_half(from, stride, low);
            add_half(from + 4, stride, high);
        }
    }

    template <class Quads>
    __attribute__((always_inline)) inline void add_half(const int8_t *from, long stride,
                                                        Quads quads) {
        b64 own[PANELS];
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) own[n] = quads(n);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            const int32_t quad = load_as<int32_t>(from + m * stride);
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) of[m][n].add(own[n], quad);
        }
    }

    // Returns the sums of row m and panel n, when all products are added.
    inline i16v total(int m, int n, int32_t start) const { return of[m][n].total(start); }
};

#if defined(TRIOLET_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_ROW_PAIRS = true;

// The sums of `QuadSums` by ARM's matrix product of two rows and two outputs. They begin with 0, and
// each row's start is added at the end.
template <int ROWS, int PANELS>
struct PairSums {
    int32x4_t of[ROWS / 2][PANELS][LANES / 2];  // two outputs of one row, then of the other

    template <class Start>
    inline void begin(Start) {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS / 2; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++)
#pragma GCC unroll 8
                for (int i = 0; i < LANES / 2; i++) of[m][n][i] = vdupq_n_s32(0);
    }

    template <class Low, class High>
    __attribute__((always_inline)) inline void add(const int8_t *from, long stride, Low low,
                                                   High high) {
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) {
            const b64 first = low(n), second = high(n);
            int8x16_t own[LANES / 2];  // eight inputs of two outputs
#pragma GCC unroll 4
            for (int i = 0; i < LANES / 4; i++) {
                const auto a = vreinterpretq_s32_u8(first.part[i]);
                const auto b = vreinterpretq_s32_u8(second.part[i]);
                own[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
                own[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
            }
#pragma GCC unroll 8
            for (int m = 0; m < ROWS / 2; m++) {
                const int8_t *row = from + 2 * m * stride;
                const int8x16_t both = vcombine_s8(vld1_s8(row), vld1_s8(row + stride));
#pragma GCC unroll 8
                for (int i = 0; i < LANES / 2; i++)
                    of[m][n][i] = vmmlaq_s32(of[m][n][i], both, own[i]);
            }
        }
    }

    inline i16v total(int m, int n, int32_t start) const {
        const int32x4_t *own = of[m / 2][n];
        return start + i16v::each([=](int i) {
            const auto a = vreinterpretq_s64_s32(own[2 * i]);
            const auto b = vreinterpretq_s64_s32(own[2 * i + 1]);
            return (i16v::Part)vreinterpretq_s32_s64(m % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
        });
    }
};
#else
constexpr bool HAS_ROW_PAIRS = false;

template <int ROWS, int PANELS>
struct PairSums;
#endif

// The type for a block's sums on this processor.
template <int ROWS, int PANELS, class Sum>
using BlockSums = std::conditional_t<HAS_ROW_PAIRS && ROWS % 2 == 0, PairSums<ROWS, PANELS>,
                                     QuadSums<ROWS, PANELS, Sum>>;

// Returns 64 bytes whose low four bits are the low nibble of a byte, the high one, those of the next
// byte … of 32.
TRIOLET_INLINE b64 spread_nibbles(const uint8_t *from) {
#if defined(__AVX512BW__)
    const __m512i wide = _mm512_cvtepu8_epi16(load_as<__m256i>(from));
    return (b64)_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return b64::each([=](int i) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from + i));
        return (b64::Part)_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
    });
#elif defined(TRIOLET_NEON)
    return b64::each([=](int i) {
        const uint16x8_t wide = vmovl_u8(vld1_u8(from + 8 * i));
        return (b64::Part)vreinterpretq_u8_u16(vorrq_u16(wide, vshlq_n_u16(wide, 4)));
    });
#else
    uint8_t own[64];
    for (int i = 0; i < 32; i++) own[2 * i] = from[i], own[2 * i + 1] = from[i] >> 4;
    return load_as<b64>(own);
#endif
}

// Returns a table of 16 bytes as `look_up` takes it: in each 16 bytes of a vector.
static inline b64 spread_table(const uint8_t *table) {
    uint8_t own[64];
    for (int i = 0; i < 64; i++) own[i] = table[i % 16];
    return load_as<b64>(own);
}

// Returns for each byte of ``codes``, which are below 16, the byte at its place in ``table``.
TRIOLET_INLINE b64 look_up(b64 codes, b64 table) {
#if defined(__AVX512BW__)
    return (b64)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return b64::each([=](int i) {
        return (b64::Part)_mm256_shuffle_epi8((__m256i)table.part[0], (__m256i)codes.part[i]);
    });
#elif defined(TRIOLET_NEON)
    return b64::each([=](int i) {
        return (b64::Part)vqtbl1q_u8(table.part[0], codes.part[i]);
    });
#else
    uint8_t own[64], from[64];
    memcpy(own, &codes, sizeof codes);
    memcpy(from, &table, sizeof table);
    for (int i = 0; i < 64; i++) own[i] = from[own[i]];
    return load_as<b64>(own);
#endif
}

}  // namespace triolet
