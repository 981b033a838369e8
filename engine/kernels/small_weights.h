// Products of rows with weights of 8 bits, or 2 to 6, by exact sums of integers.
//
// A weight is scale * number, or scale * number + offset. ``group`` inputs of an output share scale
// and offset. The numbers are in panels of 16 outputs, with the inputs padded to a multiple of 32:
//   8 bits    [inputs / 4][16][4], as number + ZERO (see simd_products.h)
//   4 bits    [inputs / 8][16][4], where a byte has the code of input i of 8 below, and that of
//             i + 4 above
//   5 bits    for 32 inputs, their lower 4 bits as above, and [16][4] bytes: bit j of one is the
//             upper bit of input 4 * j + i
//   6 bits    for 16 inputs likewise, with the two upper bits of input 4 * j + i from bit 2 * j on
//   2 bits    [inputs / 16][16][4], where a byte has the code of input 4 * j + i of 16 from bit 2 * j
//             on
//   3 bits    for 16 inputs, their lower 2 bits as above, and [16][2] bytes: bits j and 4 + j of one
//             are the upper bits of inputs 4 * j + i and 4 * j + i + 1
// A code stands for itself minus ``centre`` or, of 4 bits, for one of a table of 16 numbers.
// `vpdpbusd` and `sdot` multiply this order as it is.
//
// Scales and offsets are in half precision, as [panels][groups][16]. If they are nested, they are
// int8 times a factor in half precision, which `NESTED` inputs share. Then a panel has for every
// NESTED inputs the 16 factors of its scales (and of its offsets), and for each group its 16 scales
// (and its offsets). Of 2 bits, both are nibbles of one byte, the scale below.
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

namespace triolet {

constexpr long SMALL_DEPTH_PAD = 32;
constexpr int64_t PACKED_LAYOUT = 2;  // raised when panels, scales or offsets are laid out anew
constexpr long NESTED = 256;  // inputs that share a factor
constexpr float INT8_MAX_MAGNITUDE = 127.0f;

// The numbers of a weight that has no scales: of the rows' type, or narrower than rows in float32.
// Mirrored by `engine.worker.forward.kernel_structs.WEIGHT_KINDS`.
enum WeightKind { WEIGHTS_OF_ROWS = 0, WEIGHTS_BF16 = 1, WEIGHTS_F16 = 2 };

// Mirrored by `engine.worker.forward.kernel_structs.Linear`.
// A layer may consist of ``parts``, whose weights have forms of their own, and then has no weight.
// The parts' panels follow one another or, if the layer ``alternates``, take turns.
struct Linear {
    const void *weight;      // in panels, see the top of this file and of matmul.h
    const float *bias;       // [outputs] or null
    const uint8_t *scales;   // null if the weights have more than 8 bits
    const uint8_t *offsets;  // null if there are none; nested ones are among the scales
    const int8_t *table;     // the 16 numbers of codes that have no centre, else null
    const Linear *parts;
    int64_t outputs, inputs, group;
    int64_t kind;  // a `WeightKind`
    int64_t bits, centre;
    int64_t nested;  // 1: the scales are nested; 2: and the offsets; 3: both, in nibbles; 0: neither
    int64_t num_parts, alternates;
};

// Calls ``use`` with the weights as numbers of their type. Weights of 8 bits or fewer are not among them.
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

// Returns what the bytes of a layer's weights have more than their numbers, when they are multiplied.
static inline int32_t added_of(const Linear &linear) {
    return linear.bits == 8 || linear.table ? ZERO : (int32_t)linear.centre;
}

// Returns how many bytes a panel's numbers have.
static inline long panel_bytes(long bits, long inputs) {
    return small_depth(inputs) * PANEL * bits / 8;
}

// Returns how many factors NESTED inputs of an output have, and how many bytes a group has.
static inline long factors_of(long nested) { return nested > 1 ? 2 : 1; }
static inline long bytes_of_group(long nested) { return nested == 2 ? 2 : 1; }

// Returns how many bytes NESTED inputs of a panel have in their scales and offsets.
static inline long nested_bytes(long group, long nested) {
    return PANEL * (factors_of(nested) * (long)sizeof(uint16_t) +
                    bytes_of_group(nested) * (NESTED / group));
}

// Returns how many bytes the scales of a panel have; as many have its offsets, unless they are nested.
static inline long scale_bytes(long inputs, long group, long nested) {
    if (!nested) return num_groups(inputs, group) * PANEL * (long)sizeof(uint16_t);
    return (small_depth(inputs) + NESTED - 1) / NESTED * nested_bytes(group, nested);
}

// Where the nested scales of a panel are. Groups have 16 or 32 inputs.
struct NestedPlaces {
    long stride, nested;
    int shift;

    NestedPlaces(long group, long nested_)
        : stride(nested_bytes(group, nested_)), nested(nested_), shift(group == 16 ? 4 : 5) {}

    // Returns where the factors of an input are, and the scales (and then the offsets) of its group.
    long factors(long input) const { return input / NESTED * stride; }
    long scales(long input) const {
        return factors(input) + PANEL * (factors_of(nested) * (long)sizeof(uint16_t) +
                                         bytes_of_group(nested) * (input % NESTED >> shift));
    }
};

// How many inputs' codes lie together in a panel.
template <int BITS>
constexpr long TOGETHER = BITS == 5 ? 32 : BITS == 4 || BITS == 8 ? 8 : 16;

// --- rows ---------------------------------------------------------------------------------------

// Rounded rows. One thread's task may read what other threads have rounded.
struct Rounded {
    int8_t *numbers;    // [rows][depth]
    float *row_scales;  // [rows][blocks]
    float *totals;      // [rows][blocks] the sum of a block's rounded inputs: scale * numbers
    int32_t *starts;    // [rows][blocks] the sum of a block's numbers times -added
    long depth, block;
    int32_t added;      // what the weights' bytes have more than their numbers

    long blocks() const { return depth / block; }
};

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
    to.starts[at] = -to.added * total;
}

// Rounds block ``i`` of all blocks of rows.
template <class T>
static inline void round_block_of(const T *x, long ldx, long inputs, long i, const Rounded &to) {
    const long row = i / to.blocks(), index = i % to.blocks();
    const long first = index * to.block, left = inputs - first;
    round_block(x + row * ldx + first, left < to.block ? left : to.block, to, row, index);
}

// --- products -----------------------------------------------------------------------------------

// Some panels of a layer, from one of their inputs on.
struct SmallPanels {
    const uint8_t *weight;  // the numbers of input ``begin`` in the first panel
    const uint8_t *scales, *offsets;  // those of the first panel's first group; offsets may be null
    long stride, scale_stride;        // bytes between panels, and between their scales
    long group, nested, bits;
    bool has_table;
    alignas(16) uint8_t table[16];  // with ZERO added
};

static inline bool has_offsets(const SmallPanels &w) { return w.offsets || w.nested > 1; }

// Returns the scales of a group of panel ``n``, which begin at ``at``, and have factors at ``factors``
// if they are nested.
TRIOLET_INLINE v16 scale_of(const SmallPanels &w, int n, long factors, long at) {
    const uint8_t *own = w.scales + n * w.scale_stride;
    if (!w.nested) return load((const f16 *)(own + at));
    return load((const f16 *)(own + factors)) *
           (w.nested == 3 ? load_nibbles<false>(own + at) : load((const int8_t *)(own + at)));
}

// Returns the offsets of a group, as `scale_of` does. They exist.
TRIOLET_INLINE v16 offset_of(const SmallPanels &w, int n, long factors, long at) {
    if (!w.nested) return load((const f16 *)(w.offsets + n * w.scale_stride + at));
    const uint8_t *own = w.scales + n * w.scale_stride;
    return load((const f16 *)(own + factors) + PANEL) *
           (w.nested == 3 ? load_nibbles<true>(own + at) : load((const int8_t *)(own + at) + PANEL));
}

// Returns the bytes of the inputs 4 * QUAD to 4 * QUAD + 3 of the TOGETHER inputs of a panel that
// begin at ``from``: their codes, or their numbers plus ZERO.
template <int BITS, bool HAS_TABLE, int QUAD>
TRIOLET_INLINE b64 quad_of(const uint8_t *from, b64 table) {
    if constexpr (BITS == 8) return load_as<b64>(from + 64 * QUAD);
    if constexpr (BITS < 4) {
        const u16v all = load_as<u16v>(from);
        const b64 low = (b64)(all >> 2 * QUAD) & 3;
        if constexpr (BITS == 2) return low;
        const u16v upper = (u16v)spread_nibbles(from + 64);
        return low | ((b64)(QUAD < 3 ? upper << (2 - QUAD % 3) : upper >> 1) & 4);
    }
    const b64 pair = load_as<b64>(from + QUAD / 2 * 64);
    const b64 low = (QUAD % 2 ? (b64)((u16v)pair >> 4) : pair) & 15;
    if constexpr (BITS == 4) return HAS_TABLE ? look_up(low, table) : low;
    const u16v upper = load_as<u16v>(from + TOGETHER<BITS> * 8);
    constexpr int UP = 4 - QUAD * (BITS - 4);
    const u16v moved = UP > 0 ? upper << (UP > 0 ? UP : 0) : upper >> (UP > 0 ? 0 : -UP);
    return low | ((b64)moved & (uint8_t)((1 << BITS) - 16));
}

// Calls ``use`` with 0, 1, … as constants.
template <class Use, int... I>
TRIOLET_INLINE void each_constant(std::integer_sequence<int, I...>, Use use) {
    (use(std::integral_constant<int, I>{}), ...);
}

// Fetches the BYTES bytes that are AHEAD behind ``from`` into L2, where this processor gains by it.
template <int BYTES, long AHEAD = SMALL_AHEAD>
static inline void fetch_ahead(const void *from) {
    if constexpr (AHEAD)
        for (long byte = 0; byte < BYTES; byte += 64)
            __builtin_prefetch((const uint8_t *)from + AHEAD + byte, 0, 2);
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

// Adds a block's sums of integers of panel ``n``. Scales of rows are ``stride`` numbers apart.
template <int ROWS, class Floats, class Whole, class Start>
TRIOLET_INLINE void add_whole(Floats &sums, const Whole &whole, int n, Start start, v16 scale,
                              const float *row_scales, long stride) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
        sums.set(m, n,
                 multiply_add(to_floats(whole.total(m, n, start(m))),
                              scale * row_scales[m * stride], sums.get(m, n)));
}

// Adds a block's offsets of panel ``n`` times the rows' totals, which are ``stride`` numbers apart.
template <int ROWS, class Floats>
TRIOLET_INLINE void add_offset(Floats &sums, int n, v16 offset, const float *totals, long stride) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++)
        sums.set(m, n, multiply_add(offset, splat(totals[m * stride]), sums.get(m, n)));
}

// Computes ROWS rows from ``row`` on by PANELS panels: the inputs ``begin`` to ``end`` - 1, which
// begin and end with blocks.
template <int BITS, bool HAS_TABLE, class Sum, int ROWS, int PANELS>
TRIOLET_APART static void small_block(const Rounded &x, long row, const SmallPanels &w, long begin,
                                      long end, float *out, long ldo, bool is_more) {
    constexpr long INPUTS = TOGETHER<BITS>, BYTES = INPUTS * BITS * PANEL / 8;
    // Measured on Zen 4 with twice the distance: Q5_0 is read 1.12 times as fast, Q5_K as before, and
    // Q4_0 0.83 times.
    constexpr long AHEAD = BITS == 5 ? 2 * SMALL_AHEAD : SMALL_AHEAD;
    const long blocks = x.blocks();
    const int8_t *numbers = x.numbers + row * x.depth;
    const float *row_scales = x.row_scales + row * blocks, *totals = x.totals + row * blocks;
    const int32_t *starts = x.starts + row * blocks;
    SmallSums<ROWS, PANELS> sums;
    sums.begin(out, ldo, is_more);
    long group = begin / w.group, next = (group + 1) * w.group;
    const uint8_t *weight = w.weight;
    const b64 table = spread_table(w.table);
    const NestedPlaces places(x.block, w.nested);
    const bool is_offset = has_offsets(w);
    long index = begin / x.block;
    for (long k = begin; k < end; k += x.block, index++) {
        if (k >= next) group++, next += w.group;
        const auto start = [&](int m) __attribute__((always_inline)) {
            return starts[m * blocks + index];
        };
        BlockSums<ROWS, PANELS, Sum> whole;
        whole.begin(start);
        const long factors = places.factors(k);
        const long at = w.nested ? places.scales(k) : group * PANEL * (long)sizeof(f16);
        for (int n = 0; n < PANELS; n++)
            fetch_ahead<sizeof(f16) * PANEL>(w.scales + n * w.scale_stride + at);
        for (long c = 0; c < x.block; c += INPUTS, weight += BYTES) {
            for (int n = 0; n < PANELS; n++) fetch_ahead<BYTES, AHEAD>(weight + n * w.stride);
            each_constant(std::make_integer_sequence<int, INPUTS / 8>{}, [&](auto eight)
                          __attribute__((always_inline)) {
                constexpr int QUAD = 2 * decltype(eight)::value;
                whole.add(
                    numbers + k + c + 4 * QUAD, x.depth,
                    [&](int n) __attribute__((always_inline)) {
                        return quad_of<BITS, HAS_TABLE, QUAD>(weight + n * w.stride, table);
                    },
                    [&](int n) __attribute__((always_inline)) {
                        return quad_of<BITS, HAS_TABLE, QUAD + 1>(weight + n * w.stride, table);
                    });
            });
        }
#pragma GCC unroll 4
        for (int n = 0; n < PANELS; n++) {
            const v16 scale = scale_of(w, n, factors, at);
            add_whole<ROWS>(sums, whole, n, start, scale, row_scales + index, blocks);
            if (!is_offset) continue;
            add_offset<ROWS>(sums, n, offset_of(w, n, factors, at), totals + index, blocks);
        }
    }
    sums.end(out, ldo);
}

// Computes blocks of ROWS rows from row ``m`` on, as many as fit, and returns the first row left.
template <int BITS, bool HAS_TABLE, class Sum, int ROWS, int PANELS>
static long small_blocks(long m, const Rounded &x, long row, long rows, const SmallPanels &w,
                         long begin, long end, float *out, long ldo, bool is_more) {
    for (; rows - m >= ROWS; m += ROWS)
        small_block<BITS, HAS_TABLE, Sum, ROWS, PANELS>(x, row + m, w, begin, end, out + m * ldo,
                                                        ldo, is_more);
    return m;
}

template <int BITS, bool HAS_TABLE, class Sum, int PANELS>
static void small_rows(const Rounded &x, long row, long rows, const SmallPanels &w, long begin,
                       long end, float *out, long ldo, bool is_more) {
    long m = 0;
    auto add = [&](auto size) {
        m = small_blocks<BITS, HAS_TABLE, Sum, size.value, PANELS>(m, x, row, rows, w, begin, end,
                                                                   out, ldo, is_more);
    };
    if constexpr (PANELS <= SMALL_PANELS) {
        constexpr int MOST = std::is_same_v<Sum, WideSum> ? SMALL_ROWS : CODE_ROWS;
        if constexpr (MOST > 4) add(std::integral_constant<int, MOST>{});
        if constexpr (MOST >= 4) add(std::integral_constant<int, 4>{});
    }
    if constexpr (PANELS == 1 || SMALL_PANELS > 1)
        add(std::integral_constant<int, 2>{});
    add(std::integral_constant<int, 1>{});
}

static inline SmallPanels behind(const SmallPanels &w, long panels) {
    SmallPanels other = w;
    other.weight += panels * w.stride;
    other.scales += panels * w.scale_stride;
    if (w.offsets) other.offsets += panels * w.scale_stride;
    return other;
}

// Computes out[rows][panels x 16] = (if ``is_more``: out +) the product of rows and panels over the
// inputs ``begin`` to ``end`` - 1.
template <int BITS, bool HAS_TABLE, class Sum>
static void multiply_small(const Rounded &x, long row, long rows, const SmallPanels &w, long panels,
                           long begin, long end, float *out, long ldo, bool is_more) {
    long n = 0;
    auto take = [&](auto count) {
        for (; panels - n >= count.value; n += count.value)
            small_rows<BITS, HAS_TABLE, Sum, count.value>(x, row, rows, behind(w, n), begin, end,
                                                          out + n * PANEL, ldo, is_more);
    };
    if (rows <= SMALL_PANELS) take(std::integral_constant<int, FEW_SMALL_PANELS>{});
    if constexpr (SMALL_PANELS > 1) take(std::integral_constant<int, SMALL_PANELS>{});
    take(std::integral_constant<int, 1>{});
}

// Calls ``use`` with the bits of the panels' form and whether they have a table, as constants.
template <class Use>
static void with_form(const SmallPanels &w, Use use) {
    constexpr std::false_type no;
    switch (w.bits) {
        case 4:
            if (w.has_table) return use(std::integral_constant<int, 4>{}, std::true_type{});
            return use(std::integral_constant<int, 4>{}, no);
        case 2: return use(std::integral_constant<int, 2>{}, no);
        case 3: return use(std::integral_constant<int, 3>{}, no);
        case 5: return use(std::integral_constant<int, 5>{}, no);
        case 6: return use(std::integral_constant<int, 6>{}, no);
        default: use(std::integral_constant<int, 8>{}, no);
    }
}

// The type of the sums of bytes that stand for codes of BITS.
template <int BITS, bool HAS_TABLE>
using SumOf = std::conditional_t<HAS_TABLE || BITS == 8, WideSum, CodeSum<BITS>>;

// Returns all panels of a layer from ``panel`` on.
static inline SmallPanels panels_of(const Linear &linear, long panel) {
    SmallPanels own;
    own.bits = linear.bits;
    own.has_table = linear.table;
    own.group = linear.group;
    own.nested = linear.nested;
    own.stride = panel_bytes(linear.bits, linear.inputs);
    own.scale_stride = scale_bytes(linear.inputs, linear.group, linear.nested);
    own.weight = (const uint8_t *)linear.weight;
    own.scales = linear.scales;
    own.offsets = linear.offsets;
    for (int i = 0; i < 16; i++) own.table[i] = linear.table ? (uint8_t)(linear.table[i] + ZERO) : 0;
    return behind(own, panel);
}

// --- tiles --------------------------------------------------------------------------------------

// Weights that many rows are multiplied with: PANELS panels of some inputs, a block of inputs behind
// the other. A block has its scales and offsets as [PANELS][16] floats each, then its weights as
// [BLOCK / 4][PANELS][64] bytes. What does not depend on a row is so computed once for all of them:
// measured on Zen 4, products of Q4_K take 0.9 times as long.
template <int PANELS, int BLOCK, bool HAS_OFFSETS>
struct Tile {
    static constexpr long BYTES_AT = (HAS_OFFSETS ? 2 : 1) * PANELS * PANEL * (long)sizeof(float);
    static constexpr long BYTES = BYTES_AT + BLOCK * PANELS * PANEL;

    // Fills ``to`` with the inputs ``begin`` to ``end`` - 1 of panels.
    template <int BITS, bool HAS_TABLE>
    static void fill(const SmallPanels &w, long begin, long end, uint8_t *to) {
        // Codes of 5 bits, whose TOGETHER is 32, have no blocks of 16.
        constexpr long INPUTS = TOGETHER<BITS> < BLOCK ? TOGETHER<BITS> : BLOCK;
        const b64 table = spread_table(w.table);
        const NestedPlaces places(BLOCK, w.nested);
        for (long k = begin; k < end; k += BLOCK, to += BYTES)
            for (int n = 0; n < PANELS; n++) {
                const long factors = places.factors(k);
                const long at = w.nested ? places.scales(k) : k / w.group * PANEL * (long)sizeof(f16);
                store((float *)to + n * PANEL, scale_of(w, n, factors, at));
                if (HAS_OFFSETS)
                    store((float *)to + (PANELS + n) * PANEL, offset_of(w, n, factors, at));
                uint8_t *bytes = to + BYTES_AT + n * 64;
                const uint8_t *from = w.weight + n * w.stride + k * PANEL * BITS / 8;
                for (long c = 0; c < BLOCK; c += INPUTS, from += INPUTS * BITS * PANEL / 8)
                    each_constant(std::make_integer_sequence<int, INPUTS / 4>{}, [&](auto quad)
                                  __attribute__((always_inline)) {
                        store_as(bytes, quad_of<BITS, HAS_TABLE, decltype(quad)::value>(from, table));
                        bytes += PANELS * 64;
                    });
            }
    }

    // Computes ROWS rows from ``row`` on by a tile of the inputs ``begin`` to ``end`` - 1, as
    // `small_block` does.
    template <class Sum, int ROWS>
    TRIOLET_APART static void multiply(const Rounded &x, long row, const uint8_t *tile, long begin,
                                       long end, float *out, long ldo, bool is_more) {
        const long blocks = x.depth / BLOCK;
        const int8_t *numbers = x.numbers + row * x.depth + begin;
        long at = row * blocks + begin / BLOCK;
        SmallSums<ROWS, PANELS> sums;
        sums.begin(out, ldo, is_more);
        for (const int8_t *last = numbers + (end - begin); numbers < last;
             numbers += BLOCK, at++, tile += BYTES) {
            const int32_t *starts = x.starts + at;
            const float *row_scales = x.row_scales + at, *totals = x.totals + at;
            const auto start = [&](int m) __attribute__((always_inline)) {
                return starts[m * blocks];
            };
            BlockSums<ROWS, PANELS, Sum> whole;
            whole.begin(start);
#pragma GCC unroll 1  // measured with AVX2: unrolled, it takes up to 1.4 times as long
            for (int quad = 0; quad < BLOCK / 4; quad += 2) {
                const uint8_t *bytes = tile + BYTES_AT + quad * PANELS * 64;
                whole.add(
                    numbers + 4 * quad, x.depth,
                    [&](int n) __attribute__((always_inline)) {
                        return load_as<b64>(bytes + n * 64);
                    },
                    [&](int n) __attribute__((always_inline)) {
                        return load_as<b64>(bytes + (PANELS + n) * 64);
                    });
            }
#pragma GCC unroll 4
            for (int n = 0; n < PANELS; n++) {
                const v16 scale = load((const float *)tile + n * PANEL);
                add_whole<ROWS>(sums, whole, n, start, scale, row_scales, blocks);
                if (!HAS_OFFSETS) continue;
                const v16 offset = load((const float *)tile + (PANELS + n) * PANEL);
                add_offset<ROWS>(sums, n, offset, totals, blocks);
            }
        }
        sums.end(out, ldo);
    }

    // Computes ``rows`` rows from ``row`` on by a tile.
    template <class Sum>
    static void multiply_all(const Rounded &x, long row, long rows, const uint8_t *tile, long begin,
                             long end, float *out, long ldo, bool is_more) {
        long m = 0;
        auto add = [&](auto size) {
            for (; rows - m >= size.value; m += size.value)
                multiply<Sum, size.value>(x, row + m, tile, begin, end, out + m * ldo, ldo, is_more);
        };
        constexpr int MOST = std::is_same_v<Sum, WideSum> ? SMALL_ROWS : CODE_ROWS;
        add(std::integral_constant<int, MOST>{});
        if constexpr (MOST > 4) add(std::integral_constant<int, 4>{});
        add(std::integral_constant<int, 1>{});
    }
};

// Returns the number of a layer's weight.
static inline int small_number(const Linear &linear, long output, long input) {
    const long bits = linear.bits, upper = bits - 4, at = output % PANEL * 4 + input % 4;
    const uint8_t *panel =
        (const uint8_t *)linear.weight + output / PANEL * panel_bytes(bits, linear.inputs);
    if (bits == 8) return (int8_t)(panel[input / 4 * 64 + at] - ZERO);
    const long inputs = bits == 4 ? TOGETHER<4> : bits == 5 ? TOGETHER<5> : TOGETHER<6>;
    const long quad = input % inputs / 4;
    const uint8_t *from = panel + input / inputs * inputs * PANEL * bits / 8 + at;
    if (bits < 4) {
        int code = from[0] >> 2 * quad & 3;
        if (bits == 3) code |= (from[64 - at + at / 2] >> (quad + at % 2 * 4) & 1) << 2;
        return code - (int)linear.centre;
    }
    int code = from[quad / 2 * 64] >> quad % 2 * 4 & 15;
    if (upper) code |= (from[inputs * 8] >> quad * upper & ((1 << upper) - 1)) << 4;
    return linear.table ? linear.table[code] : code - (int)linear.centre;
}

// Returns one weight of a layer with weights of 8 bits or fewer.
static inline float small_weight(const Linear &linear, long output, long input) {
    const long group = linear.group, lane = output % PANEL;
    const long first = output / PANEL * scale_bytes(linear.inputs, group, linear.nested);
    const float number = (float)small_number(linear, output, input);
    if (linear.nested) {
        const NestedPlaces places(group, linear.nested);
        const f16 *factors = (const f16 *)(linear.scales + first + places.factors(input)) + lane;
        const int8_t *scales = (const int8_t *)linear.scales + first + places.scales(input) + lane;
        const bool are_nibbles = linear.nested == 3;
        const int scale = are_nibbles ? scales[0] & 15 : scales[0];
        const float value = to_float(factors[0]) * (float)scale * number;
        if (linear.nested == 1) return value;
        const int offset = are_nibbles ? (uint8_t)scales[0] >> 4 : scales[PANEL];
        return value + to_float(factors[PANEL]) * (float)offset;
    }
    const long at = input / group * PANEL + lane;
    const float value = to_float(((const f16 *)(linear.scales + first))[at]) * number;
    if (!linear.offsets) return value;
    return value + to_float(((const f16 *)(linear.offsets + first))[at]);
}

}  // namespace triolet
