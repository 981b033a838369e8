// Products of rows with weights of 8 or 4 bits, by exact sums of integers.
//
// A weight is scale * number, or scale * number + offset. ``group`` inputs of an output share scale
// and offset, which are stored in half precision as [panels][groups][16]. The numbers are int8, kept
// as number + ZERO (see simd_products.h), in panels of 16 outputs:
//   8 bits    [inputs / 4][16][4]
//   4 bits    [inputs / 8][16][4], where a byte has the code of input i of 8 below, and that of
//             i + 4 above; a table of 16 numbers says which one a code stands for (most often
//             code - CENTRE, which needs no table)
// with the inputs padded to a multiple of 32. `vpdpbusd` and `sdot` multiply this order as it is.
//
// Rows are rounded to int8, too: the largest number of a block of 32 inputs (16, if the groups are
// no multiple of 32) becomes 127. A block's sum of products is an exact integer. It is multiplied by
// the row's scale and the weights' scale, and added to the float32 sum of the blocks before it.
//
// Rule 1: the product of a row does not depend on the other rows (see matmul.h): blocks are added
// in the order of the inputs, by the same operations, whatever kernel computes them.
// Rule 2: a NaN or an infinity in a row makes the row's results NaN.
#pragma once

#include "matmul.h"
#include "team.h"

namespace triolet {

constexpr long SMALL_DEPTH_PAD = 32;
constexpr int64_t PACKED_LAYOUT = 1;  // raised when panels, scales or offsets are laid out anew
constexpr float INT8_MAX_MAGNITUDE = 127.0f;

// The numbers of a weight that has no scales: of the rows' type, or narrower than rows in float32.
// Mirrored by `engine.worker.forward.kernel_structs.WEIGHT_KINDS`.
enum WeightKind { WEIGHTS_OF_ROWS = 0, WEIGHTS_BF16 = 1, WEIGHTS_F16 = 2 };

// Mirrored by `engine.worker.forward.kernel_structs.Linear`.
struct Linear {
    const void *weight;       // in panels, see the top of this file and of matmul.h
    const float *bias;        // [outputs] or null
    const uint16_t *scales;   // of weights of 8 or 4 bits, else null
    const uint16_t *offsets;  // likewise, or null
    const int8_t *table;      // 16 numbers of weights of 4 bits, else null
    int64_t outputs, inputs, group;
    int64_t kind;  // a `WeightKind`
};

// Calls ``use`` with the weights as numbers of their type. Weights of 8 or 4 bits are not among them.
template <class T, class Use>
static inline void with_weights(const void *weights, int64_t kind, Use use) {
    if constexpr (std::is_same_v<T, float>) {
        if (kind == WEIGHTS_BF16) return use((const bf16 *)weights);
        if (kind == WEIGHTS_F16) return use((const f16 *)weights);
    }
    use((const T *)weights);
}

static inline long small_depth(long inputs) {
    return (inputs + SMALL_DEPTH_PAD - 1) / SMALL_DEPTH_PAD * SMALL_DEPTH_PAD;
}

// Returns how many groups an output has, with those of the padding.
static inline long num_groups(long inputs, long group) {
    return (small_depth(inputs) + group - 1) / group;
}

// Returns how many inputs of a row share a scale.
static inline long block_of(const Linear &linear) { return linear.group % 32 ? 16 : 32; }

// Returns whether the codes of a layer are its numbers plus CENTRE, so that no table is needed.
static inline bool is_centred(const Linear &linear) {
    if (!linear.table) return false;
    for (int i = 0; i < 16; i++)
        if (linear.table[i] != i - CENTRE) return false;
    return true;
}

// --- rows ---------------------------------------------------------------------------------------

// Rounded rows. One thread's task may read what other threads have rounded.
struct Rounded {
    int8_t *numbers;    // [rows][depth]
    float *row_scales;  // [rows][blocks]
    float *totals;      // [rows][blocks] the sum of a block's rounded inputs: scale * numbers
    int32_t *sums_;     // [rows][blocks] the sum of a block's numbers
    long depth, block;

    long blocks() const { return depth / block; }
};

constexpr long FINEST_BLOCK = 16;

// Rounds one block of at most 32 numbers, of which ``count`` exist.
template <class T>
static inline void round_block(const T *from, long count, const Rounded &to, long row, long index) {
    constexpr int MOST = 2;
    const int vectors = (int)(to.block / LANES);
    int8_t *numbers = to.numbers + row * to.depth + index * to.block;
    const long at = row * to.blocks() + index;
    v16 values[MOST];
    uint32_t most = 0;
    for (int i = 0; i < vectors; i++) {
        if (count - i * LANES >= LANES) {
            values[i] = load(from + i * LANES);
        } else {
            float own[LANES] = {};
            for (long j = i * LANES; j < count; j++) own[j - i * LANES] = to_float(from[j]);
            values[i] = load(own);
        }
        const uint32_t highest = highest_magnitude((u16v)values[i]);
        most = highest > most ? highest : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const bool is_finite = most < 0x7f800000, is_zero = largest < 1e-30f;  // 127 / 1e-30 is finite
    const v16 factor = splat(is_finite && !is_zero ? INT8_MAX_MAGNITUDE / largest : 0.0f);
    i16v wholes = splat(0);
    for (int i = 0; i < vectors; i++) {
        const i16v whole = is_finite ? to_integers(values[i] * factor) : splat(0);
        store_bytes(numbers + i * LANES, whole);
        wholes += whole;
    }
    const int32_t total = sum(wholes);
    const float row_scale = !is_finite ? NAN : is_zero ? 0.0f : largest / INT8_MAX_MAGNITUDE;
    to.row_scales[at] = row_scale;
    to.totals[at] = row_scale * (float)total;
    to.sums_[at] = total;
}

// Called by all members of a team. Rounds rows for a layer; returns when all are rounded.
template <class T>
static void round_rows(const T *x, long ldx, long rows, long inputs, const Rounded &to) {
    const long blocks = to.blocks();
    share_evenly(rows * blocks, [&](long i) {
        const long row = i / blocks, index = i % blocks;
        const long first = index * to.block, left = inputs - first;
        round_block(x + row * ldx + first, left < to.block ? left : to.block, to, row, index);
    });
}

// --- products -----------------------------------------------------------------------------------

// Some panels of a layer, from one of their inputs on.
struct SmallPanels {
    const uint8_t *weight;    // of input ``begin`` of the first panel
    long stride;              // bytes between panels
    const uint16_t *scales, *offsets;  // of the first panel's first group; offsets may be null
    long groups, group;       // of a panel
    alignas(16) uint8_t table[16];  // of weights of 4 bits that are not centred, with ZERO added
    bool is_centred;
};

// Returns the numbers of the first four of 8 inputs of a panel, of which ``codes`` are the first 64
// bytes.
template <int BITS, bool IS_CENTRED>
static inline b64 low_quads(b64 codes, b64 table) {
    if constexpr (BITS == 8) return codes;
    return IS_CENTRED ? codes & 15 : look_up(codes & 15, table);
}

// Returns the numbers of the other four inputs. In 8 bits they are the 64 bytes from ``from`` + 64 on.
template <int BITS, bool IS_CENTRED>
static inline b64 high_quads(const uint8_t *from, b64 codes, b64 table) {
    if constexpr (BITS == 8) return load_as<b64>(from + 64);
    const b64 high = (b64)((u16v)codes >> 4) & 15;
    return IS_CENTRED ? high : look_up(high, table);
}

// Fetches the BYTES bytes that are SMALL_AHEAD behind ``from`` into L2, where this processor gains by
// it.
template <int BYTES>
static inline void fetch_ahead(const void *from) {
    if constexpr (SMALL_AHEAD)
        for (long byte = 0; byte < BYTES; byte += 64)
            __builtin_prefetch((const uint8_t *)from + SMALL_AHEAD + byte, 0, 2);
}

// The sums of a block of rows and panels in memory, with the names of `Sums`.
template <int ROWS, int PANELS>
struct SumsInMemory {
    float *to;
    long ld;

    inline void begin(float *to_, long ld_, bool is_more) {
        to = to_, ld = ld_;
        if (is_more) return;
        for (int m = 0; m < ROWS; m++)
            for (int n = 0; n < PANELS; n++) set(m, n, splat(0.0f));
    }

    inline v16 get(int m, int n) const { return load(to + m * ld + n * PANEL); }
    inline void set(int m, int n, v16 value) { store(to + m * ld + n * PANEL, value); }
    inline void end(float *, long) const {}
};

// The sums of a block: in registers if these hold them beside the sums of integers, else in memory.
template <int ROWS, int PANELS>
using SmallSums = std::conditional_t<(SMALL_PANELS > 1 || ROWS * PANELS <= 2), Sums<ROWS, PANELS>,
                                     SumsInMemory<ROWS, PANELS>>;

// Computes ROWS rows from ``row`` on by PANELS panels: the inputs ``begin`` to ``end`` - 1, which
// begin and end with blocks.
template <int BITS, bool IS_CENTRED, int ROWS, int PANELS>
TRIOLET_APART static void small_block(const Rounded &x, long row, const SmallPanels &w, long begin,
                                      long end, float *out, long ldo, bool is_more) {
    constexpr long BYTES_OF_8 = BITS * PANEL;
    const long blocks = x.blocks();
    const int8_t *numbers = x.numbers + row * x.depth;
    const float *row_scales = x.row_scales + row * blocks, *totals = x.totals + row * blocks;
    const int32_t *sums_ = x.sums_ + row * blocks;
    SmallSums<ROWS, PANELS> sums;
    sums.begin(out, ldo, is_more);
    long group = begin / w.group, next = (group + 1) * w.group;
    const uint8_t *weight = w.weight;
    const b64 table = spread_table(w.table);
    long index = begin / x.block;
    for (long k = begin; k < end; k += x.block, index++) {
        if (k >= next) group++, next += w.group;
        const auto start = [&](int m) __attribute__((always_inline)) {
            constexpr int ADDED = IS_CENTRED ? CENTRE : ZERO;
            return ADDED ? -ADDED * sums_[m * blocks + index] : 0;
        };
        BlockSums<ROWS, PANELS, IS_CENTRED> whole;
        whole.begin(start);
        for (int n = 0; n < PANELS; n++)
            fetch_ahead<sizeof(uint16_t) * PANEL>(w.scales + (n * w.groups + group) * PANEL);
        for (long c = 0; c < x.block; c += 8, weight += BYTES_OF_8) {
            for (int n = 0; n < PANELS; n++) fetch_ahead<BYTES_OF_8>(weight + n * w.stride);
            b64 codes[PANELS];
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) codes[n] = load_as<b64>(weight + n * w.stride);
            whole.add(
                numbers + k + c, x.depth,
                [&](int n) __attribute__((always_inline)) {
                    return low_quads<BITS, IS_CENTRED>(codes[n], table);
                },
                [&](int n) __attribute__((always_inline)) {
                    return high_quads<BITS, IS_CENTRED>(weight + n * w.stride, codes[n], table);
                });
        }
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) {
            const long at = (n * w.groups + group) * PANEL;
            const v16 scale = load((const f16 *)w.scales + at);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++)
                sums.set(m, n,
                         multiply_add(to_floats(whole.total(m, n, start(m))),
                                      scale * row_scales[m * blocks + index], sums.get(m, n)));
            if (!w.offsets) continue;
            const v16 offset = load((const f16 *)w.offsets + at);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++)
                sums.set(m, n,
                         multiply_add(offset, splat(totals[m * blocks + index]), sums.get(m, n)));
        }
    }
    sums.end(out, ldo);
}

// Computes blocks of ROWS rows from row ``m`` on, as many as fit, and returns the first row left.
template <int BITS, bool IS_CENTRED, int ROWS, int PANELS>
static long small_blocks(long m, const Rounded &x, long row, long rows, const SmallPanels &w,
                         long begin, long end, float *out, long ldo, bool is_more) {
    for (; rows - m >= ROWS; m += ROWS)
        small_block<BITS, IS_CENTRED, ROWS, PANELS>(x, row + m, w, begin, end, out + m * ldo, ldo,
                                                    is_more);
    return m;
}

template <int BITS, bool IS_CENTRED, int PANELS>
static void small_rows(const Rounded &x, long row, long rows, const SmallPanels &w, long begin,
                       long end, float *out, long ldo, bool is_more) {
    long m = 0;
    auto add = [&](auto size) {
        m = small_blocks<BITS, IS_CENTRED, size.value, PANELS>(m, x, row, rows, w, begin, end, out,
                                                               ldo, is_more);
    };
    if constexpr (PANELS <= SMALL_PANELS) {
        constexpr int MOST = IS_CENTRED ? CENTRED_ROWS : SMALL_ROWS;
        if constexpr (MOST > 4) add(std::integral_constant<int, MOST>{});
        if constexpr (MOST >= 4) add(std::integral_constant<int, 4>{});
    }
    if constexpr (PANELS == 1 || SMALL_PANELS > 1)
        add(std::integral_constant<int, 2>{});
    add(std::integral_constant<int, 1>{});
}

static inline SmallPanels behind(const SmallPanels &w, long panels) {
    SmallPanels other = w;
    const long skipped = panels * w.groups * PANEL;
    other.weight += panels * w.stride;
    other.scales += skipped;
    if (w.offsets) other.offsets += skipped;
    return other;
}

// Computes out[rows][panels x 16] = (if ``is_more``: out +) the product of rows and panels over the
// inputs ``begin`` to ``end`` - 1.
template <int BITS, bool IS_CENTRED>
static void multiply_small(const Rounded &x, long row, long rows, const SmallPanels &w, long panels,
                           long begin, long end, float *out, long ldo, bool is_more) {
    long n = 0;
    auto take = [&](auto count) {
        for (; panels - n >= count.value; n += count.value)
            small_rows<BITS, IS_CENTRED, count.value>(x, row, rows, behind(w, n), begin, end,
                                                      out + n * PANEL, ldo, is_more);
    };
    if (rows <= SMALL_PANELS) take(std::integral_constant<int, FEW_SMALL_PANELS>{});
    if constexpr (SMALL_PANELS > 1) take(std::integral_constant<int, SMALL_PANELS>{});
    take(std::integral_constant<int, 1>{});
}

// Calls the function above for the layer's kind of codes: centred, or with a table.
template <int BITS>
static void multiply_small(const Rounded &x, long row, long rows, const SmallPanels &w, long panels,
                           long begin, long end, float *out, long ldo, bool is_more) {
    (w.is_centred ? multiply_small<BITS, true> : multiply_small<BITS, false>)(
        x, row, rows, w, panels, begin, end, out, ldo, is_more);
}

// Returns all panels of a layer from ``panel`` on.
static inline SmallPanels panels_of(const Linear &linear, long panel) {
    SmallPanels own;
    own.stride = small_depth(linear.inputs) * PANEL / (linear.table ? 2 : 1);
    own.weight = (const uint8_t *)linear.weight + panel * own.stride;
    own.group = linear.group;
    own.groups = num_groups(linear.inputs, linear.group);
    own.scales = linear.scales + panel * own.groups * PANEL;
    own.offsets = linear.offsets ? linear.offsets + panel * own.groups * PANEL : nullptr;
    own.is_centred = is_centred(linear);
    for (int i = 0; i < 16; i++) own.table[i] = linear.table ? (uint8_t)(linear.table[i] + ZERO) : 0;
    return own;
}

// Converts ``count`` inputs of a panel from 4 to 8 bits.
template <bool IS_CENTRED>
static inline void unpack(const uint8_t *from, const uint8_t *table, long count, uint8_t *to) {
    const b64 own = spread_table(table);
    for (long k = 0; k < count; k += 8, from += 4 * PANEL, to += 8 * PANEL) {
        const b64 codes = load_as<b64>(from);
        store_as(to, low_quads<4, IS_CENTRED>(codes, own));
        store_as(to + 64, high_quads<4, IS_CENTRED>(from, codes, own));
    }
}

// Returns one weight of a layer with weights of 8 or 4 bits.
static inline float small_weight(const Linear &linear, long output, long input) {
    const long panel = output / PANEL, lane = output % PANEL;
    const long at = (panel * num_groups(linear.inputs, linear.group) + input / linear.group) * PANEL + lane;
    const uint8_t *weight = (const uint8_t *)linear.weight;
    const long first = panel * small_depth(linear.inputs) * PANEL;
    int number;
    if (linear.table) {
        const uint8_t byte = weight[first / 2 + (input / 8 * PANEL + lane) * 4 + input % 4];
        number = linear.table[input % 8 < 4 ? byte & 15 : byte >> 4];
    } else {
        number = (int8_t)(weight[first + (input / 4 * PANEL + lane) * 4 + input % 4] - ZERO);
    }
    const float value = to_float(((const f16 *)linear.scales)[at]) * (float)number;
    return linear.offsets ? value + to_float(((const f16 *)linear.offsets)[at]) : value;
}

}  // namespace triolet
