// Products of rows with packed weights.
//
// Weights [outputs, inputs] are stored in panels of 16 outputs, which a core reads in order. The
// layout depends on the type T of the rows, the model's:
//   float32   [inputs][16], of float32, bfloat16 or half precision, which is widened in registers
//   bfloat16  [inputs / 2][16][2], of bfloat16, with the inputs padded with 0 to a multiple of 32,
//             as AVX512-BF16 and AMX multiply it
// Weights of 8 bits or fewer are in small_weights.h. Widening is exact: a product with 16-bit weights
// has the same bits as one with the same numbers in float32.
//
// Rule 1: the product of a row does not depend on the other rows. Every kernel adds up the terms of
// a number in the same order, whatever block it computes.
// Rule 2: the memory of rows is padded to a multiple of ROW_PAD rows. Padding rows hold arbitrary
// numbers; their results may be computed and are never read.
#pragma once

#include <type_traits>

#include "simd_amx.h"

namespace triolet {

template <class T>
constexpr long padded_depth(long depth) {
    return sizeof(T) == 4 ? depth : (depth + DEPTH_PAD - 1) / DEPTH_PAD * DEPTH_PAD;
}

// Returns the index of number ``input`` of output ``lane`` in its panel, for rows of type T.
template <class T>
static inline long panel_index(long input, long lane) {
    return sizeof(T) == 4 ? input * PANEL + lane : (input / 2 * PANEL + lane) * 2 + input % 2;
}

// --- vectors ----------------------------------------------------------------------------------

// The sums of a block, in registers. The pragmas unroll the loops over them. Otherwise GCC unrolls
// them only after it has placed the array on the stack, and then every sum goes through memory at
// the begin and the end of a block.
template <int ROWS, int PANELS>
struct Sums {
    v16 of[ROWS][PANELS];

    inline void begin(const float *from, long ld, bool is_more) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) of[m][n] = splat(0.0f);
        if (!is_more) return;
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) of[m][n] = load(from + m * ld + n * PANEL);
    }

    inline v16 get(int m, int n) const { return of[m][n]; }
    inline void set(int m, int n, v16 value) { of[m][n] = value; }

    inline void end(float *to, long ld) const {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) store(to + m * ld + n * PANEL, of[m][n]);
    }
};

// Begins to fetch a line of each of COUNT panels into a core's cache.
template <int COUNT, class T>
static inline void fetch(const T *panels, long stride, long at) {
#pragma GCC unroll 2
    for (int n = 0; n < COUNT; n++) __builtin_prefetch(panels + n * stride + at, 0, 2);
}

// Computes a block. Each step of the loop also fetches a line of each of FETCHED panels from
// ``next`` on, which are as far apart as the block's own panels.
template <int ROWS, int PANELS, int FETCHED = 0, class W>
TRIOLET_APART static void block(const float *x, long ldx, const W *w, long stride, long begin, long end,
                  float *out, long ldo, bool is_more, const W *next = nullptr) {
    Sums<ROWS, PANELS> sums;
    sums.begin(out, ldo, is_more);
    for (long k = begin; k < end; k++) {
        fetch<FETCHED>(next, stride, k * PANEL);
        v16 own[PANELS];
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) own[n] = load(w + n * stride + k * PANEL);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) sums.of[m][n] += own[n] * x[m * ldx + k];
    }
    sums.end(out, ldo);
}

template <int ROWS, int PANELS, int FETCHED = 0>
TRIOLET_APART static void block(const bf16 *x, long ldx, const bf16 *w, long stride, long begin, long end,
                  float *out, long ldo, bool is_more, const bf16 *next = nullptr) {
    Sums<ROWS, PANELS> sums;
    sums.begin(out, ldo, is_more);
    for (long k = begin; k < end; k += 2) {
        fetch<FETCHED>(next, stride, k * PANEL);
        u16v own[PANELS];
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) own[n] = load_as<u16v>(w + n * stride + k * PANEL);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            const u16v pair = splat_pair(x + m * ldx + k);
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++)
                sums.of[m][n] = add_pairs(sums.of[m][n], own[n], pair);
        }
    }
    sums.end(out, ldo);
}

// Computes blocks of ROWS rows from row ``m`` on, as many as fit, and returns the first row left.
template <int ROWS, int PANELS, class T, class W>
static long blocks_of(long m, const T *x, long ldx, long rows, const W *w, long stride, long begin,
                      long end, float *out, long ldo, bool is_more) {
    for (; rows - m >= ROWS; m += ROWS)
        block<ROWS, PANELS>(x + m * ldx, ldx, w, stride, begin, end, out + m * ldo, ldo, is_more);
    return m;
}

// Computes the first blocks of 16 to FETCHING_ROWS rows and a pair of panels, and returns the first
// row left. The first block waits for memory; those after it find its weights in the cache, and
// fetch the pair of panels at ``next`` meanwhile.
template <class T, class W>
static long fetching_blocks(const T *x, long ldx, long rows, const W *w, long stride, long begin,
                            long end, float *out, long ldo, bool is_more, const W *next) {
    long m = 0;
    auto add = [&](auto size, auto fetched, const W *from) {
        block<size.value, 2, fetched.value>(x + m * ldx, ldx, w, stride, begin, end, out + m * ldo,
                                            ldo, is_more, from);
        m += size.value;
    };
    constexpr std::integral_constant<int, 0> none;
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> both;
    constexpr std::integral_constant<int, 8> eight;
    constexpr std::integral_constant<int, 12> twelve;
    if (rows < 20) {
        add(eight, none, next);
        add(eight, both, next);
    } else if (rows < 24) {
        add(twelve, none, next);
        add(eight, both, next);
    } else if (rows < 32) {
        add(twelve, none, next);
        add(twelve, both, next);
    } else {
        add(twelve, none, next);
        add(twelve, one, next);
        if (rows < 36)
            add(eight, one, next + stride);
        else
            add(twelve, one, next + stride);
    }
    return m;
}

template <int PANELS, class T, class W>
static void rows_of_block(const T *x, long ldx, long rows, const W *w, long stride, long begin,
                          long end, float *out, long ldo, bool is_more, const W *next) {
    long m = 0;
    if constexpr (PANELS == 2 && FETCHING_ROWS) {
        if (next && rows >= 16 && rows <= FETCHING_ROWS)
            m = fetching_blocks(x, ldx, rows, w, stride, begin, end, out, ldo, is_more, next);
    }
    constexpr int MOST = std::is_same_v<T, float> ? MOST_FLOAT_ROWS : MOST_ROWS;
    if constexpr (PANELS <= 2 && MOST > 4)
        m = blocks_of<MOST, PANELS>(m, x, ldx, rows, w, stride, begin, end, out, ldo, is_more);
    if constexpr (PANELS <= 2 && MOST > 8)
        m = blocks_of<8, PANELS>(m, x, ldx, rows, w, stride, begin, end, out, ldo, is_more);
    if constexpr (PANELS <= 2 || FEW_ROWS >= 4) {
        m = blocks_of<4, PANELS>(m, x, ldx, rows, w, stride, begin, end, out, ldo, is_more);
        m = blocks_of<2, PANELS>(m, x, ldx, rows, w, stride, begin, end, out, ldo, is_more);
    }
    blocks_of<1, PANELS>(m, x, ldx, rows, w, stride, begin, end, out, ldo, is_more);
}

template <class T, class W>
static void vector_block(const T *x, long ldx, long rows, const W *w, long stride, long panels,
                         long begin, long end, float *out, long ldo, bool is_more, const W *next) {
    long n = 0;
    constexpr int PAIR = MOST_ROWS > 4 ? 2 : 1;
    constexpr int FEW = sizeof(T) == 4 && std::is_same_v<W, bf16> ? FEW_BF16_PANELS : 4;
    if (rows <= FEW_ROWS)
        for (; panels - n >= FEW; n += FEW)
            rows_of_block<FEW>(x, ldx, rows, w + n * stride, stride, begin, end, out + n * PANEL,
                               ldo, is_more, next);
    for (; panels - n >= PAIR; n += PAIR)
        rows_of_block<PAIR>(x, ldx, rows, w + n * stride, stride, begin, end, out + n * PANEL, ldo,
                            is_more, n + PAIR < panels ? w + (n + PAIR) * stride : next);
    for (; panels - n >= 1; n++)
        rows_of_block<1>(x, ldx, rows, w + n * stride, stride, begin, end, out + n * PANEL, ldo,
                         is_more, next);
}

// Computes out[rows][panels x 16] = (if ``is_more``: out +) x[rows][begin … end - 1] · the same
// inputs of ``panels`` panels, which begin ``stride`` numbers apart. Of rows in bfloat16, ``begin``
// and ``end`` are multiples of DEPTH_PAD. ``next`` are panels that the thread will probably need next,
// or null.
template <class W>
static inline void multiply(const float *x, long ldx, long rows, const W *w, long stride,
                            long panels, long begin, long end, float *out, long ldo, bool is_more,
                            const W *next = nullptr) {
    vector_block(x, ldx, rows, w, stride, panels, begin, end, out, ldo, is_more, next);
}

static inline void multiply(const bf16 *x, long ldx, long rows, const bf16 *w, long stride,
                            long panels, long begin, long end, float *out, long ldo, bool is_more,
                            const bf16 *next = nullptr) {
    if (has_amx()) {
        amx_block(x, ldx, rows, w, stride, panels, begin, end, out, ldo, is_more);
        return;
    }
    vector_block(x, ldx, rows, w, stride, panels, begin, end, out, ldo, is_more, next);
}

}  // namespace triolet
