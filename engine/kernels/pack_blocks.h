// Packs GGUF's blocks into the panels of small_weights.h, without numbers in between.
//
// Rule: panels, scales and offsets are bit for bit those that `triolet_pack_small` and its siblings
// make of `engine.worker.quantized.gguf_blocks.decode`, which describes the blocks
// (tests/conformance/test_packed_blocks.py). Nothing is rounded: numbers, scales and factors are the
// file's.
#pragma once

#include "small_weights.h"

namespace triolet {

// The part of a packed layer that comes from one tensor. Its outputs begin at output ``first``; their
// rows are ``data`` of ``row_bytes`` each, in the order of ``order`` unless that is null. Mirrored by
// `engine.worker.forward.kernel_structs.BlockRows`.
struct BlockRows {
    const uint8_t *data;
    const int64_t *order;
    int64_t row_bytes, first, count, kind;  // GGUF's number of the type
};

constexpr int BLOCK_MOST = 256;  // inputs of a block
constexpr int GROUPS_MOST = 16;  // the most groups of a block: LANES of simd.h

// A decoded block. Its scales and offsets are in half precision or, if they are nested, bytes and a
// factor.
struct Block {
    uint8_t numbers[BLOCK_MOST];  // codes, or int8
    f16 scales[1], offsets[1];    // or the factors
    int8_t nested_scales[GROUPS_MOST], nested_offsets[GROUPS_MOST];
};

// The kinds of blocks by GGUF's numbers.
enum BlockKind {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
};

// The numbers that codes of 4 bits stand for.
constexpr int8_t CENTRED[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t UNSIGNED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Sizes of a block, and its weights' form: the bits of a number, and `Linear::nested`.
struct BlockForm {
    int inputs, bytes, group, bits, nested;
};

static inline bool find_form(int64_t kind, BlockForm *form) {
    switch (kind) {
        case Q4_0: *form = {32, 18, 32, 4, 0}; return true;
        case Q4_1: *form = {32, 20, 32, 4, 0}; return true;
        case Q5_0: *form = {32, 22, 32, 5, 0}; return true;
        case Q5_1: *form = {32, 24, 32, 5, 0}; return true;
        case Q8_0: *form = {32, 34, 32, 8, 0}; return true;
        case Q2_K: *form = {256, 84, 16, 2, 3}; return true;
        case Q3_K: *form = {256, 110, 16, 3, 1}; return true;
        case Q4_K: *form = {256, 144, 32, 4, 2}; return true;
        case Q5_K: *form = {256, 176, 32, 5, 2}; return true;
        case Q6_K: *form = {256, 210, 16, 6, 1}; return true;
        case IQ4_NL: *form = {32, 18, 32, 4, 0}; return true;
        case IQ4_XS: *form = {256, 136, 32, 4, 1}; return true;
        case MXFP4: *form = {32, 17, 32, 4, 0}; return true;
    }
    return false;
}

static inline f16 half_at(const uint8_t *from) {
    f16 half;
    memcpy(&half, from, sizeof half);
    return half;
}

static inline bool is_finite(f16 half) { return (half.bits & 0x7c00) != 0x7c00; }

// ``count`` bytes become twice as many codes: the low nibbles, then the high ones.
static inline void nibbles(const uint8_t *from, int count, uint8_t *to) {
    for (int i = 0; i < count; i++) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}

static inline void fifth_bits(const uint8_t *from, uint8_t *numbers) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; i++) numbers[i] |= (bits >> i & 1) << 4;
}

// The scales and offsets of the eight groups of Q4_K and Q5_K. Minima are subtracted.
static inline void k_scales(const uint8_t *from, Block &to) {
    to.scales[0] = half_at(from), to.offsets[0] = half_at(from + 2);
    to.offsets[0].bits ^= 0x8000;
    const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
    for (int i = 0; i < 4; i++) {
        to.nested_scales[i] = low[i] & 63;
        to.nested_scales[4 + i] = (high[i] & 15) | (low[i] >> 6) << 4;
        to.nested_offsets[i] = middle[i] & 63;
        to.nested_offsets[4 + i] = high[i] >> 4 | (middle[i] >> 6) << 4;
    }
}

// 64 bytes become 256 codes of two bits: each 32 bytes have four times 32.
static inline void quarters(const uint8_t *from, uint8_t *to) {
    for (int quarter = 0; quarter < 8; quarter++)
        for (int i = 0; i < 32; i++)
            to[32 * quarter + i] = from[32 * (quarter / 4) + i] >> 2 * (quarter % 4) & 3;
}

// The scales of the eight groups of IQ4_XS: six bits, less 32.
static inline void iq4_scales(const uint8_t *from, Block &to) {
    const uint8_t *high = from + 2, *low = from + 4;
    to.scales[0] = half_at(from);
    for (int i = 0; i < 8; i++) {
        const int factor = (low[i / 2] >> 4 * (i % 2) & 15) | (high[i / 4] >> 2 * (i % 4) & 3) << 4;
        to.nested_scales[i] = (int8_t)(factor - 32);
    }
}

// Returns 2^exponent in half precision: 0 if that is too small, and infinity if it is too large.
static inline f16 power_of_two(int exponent) {
    if (exponent < -24) return {0};
    if (exponent < -14) return {(uint16_t)(1 << (exponent + 24))};
    return {(uint16_t)(exponent > 15 ? 0x7c00 : (exponent + 15) << 10)};
}

static inline void read_block(int64_t kind, const uint8_t *from, Block &to) {
    switch (kind) {
        case Q4_0:
        case IQ4_NL:
            to.scales[0] = half_at(from);
            nibbles(from + 2, 16, to.numbers);
            return;
        case Q4_1:
            to.scales[0] = half_at(from), to.offsets[0] = half_at(from + 2);
            nibbles(from + 4, 16, to.numbers);
            return;
        case Q5_0:
            to.scales[0] = half_at(from);
            nibbles(from + 6, 16, to.numbers);
            fifth_bits(from + 2, to.numbers);
            return;
        case Q5_1:
            to.scales[0] = half_at(from), to.offsets[0] = half_at(from + 2);
            nibbles(from + 8, 16, to.numbers);
            fifth_bits(from + 4, to.numbers);
            return;
        case Q8_0:
            to.scales[0] = half_at(from);
            memcpy(to.numbers, from + 2, 32);
            return;
        case Q2_K:
            to.scales[0] = half_at(from + 80), to.offsets[0] = half_at(from + 82);
            to.offsets[0].bits ^= 0x8000;
            for (int group = 0; group < 16; group++) {
                to.nested_scales[group] = from[group] & 15;
                to.nested_offsets[group] = from[group] >> 4;
            }
            quarters(from + 16, to.numbers);
            return;
        case Q3_K:
            to.scales[0] = half_at(from + 108);
            for (int group = 0; group < 16; group++) {
                const int low = from[96 + group % 8] >> 4 * (group / 8) & 15;
                const int high = from[104 + group % 4] >> 2 * (group / 4) & 3;
                to.nested_scales[group] = (int8_t)((low | high << 4) - 32);
            }
            quarters(from + 32, to.numbers);
            for (int i = 0; i < 256; i++) to.numbers[i] |= (from[i % 32] >> i / 32 & 1) << 2;
            return;
        case Q4_K:
            k_scales(from, to);
            for (int pair = 0; pair < 4; pair++)
                nibbles(from + 16 + 32 * pair, 32, to.numbers + 64 * pair);
            return;
        case Q5_K:
            k_scales(from, to);
            for (int pair = 0; pair < 4; pair++)
                nibbles(from + 48 + 32 * pair, 32, to.numbers + 64 * pair);
            for (int group = 0; group < 8; group++)
                for (int i = 0; i < 32; i++)
                    to.numbers[32 * group + i] |= (from[16 + i] >> group & 1) << 4;
            return;
        case MXFP4:
            to.scales[0] = power_of_two(from[0] - 128);  // numbers are doubled
            nibbles(from + 1, 16, to.numbers);
            return;
        case IQ4_XS:
            iq4_scales(from, to);
            for (int group = 0; group < 8; group++)
                nibbles(from + 8 + 16 * group, 16, to.numbers + 32 * group);
            return;
        case Q6_K:
            for (int part = 0; part < 2; part++) {
                uint8_t *numbers = to.numbers + 128 * part;
                nibbles(from + 64 * part, 64, numbers);
                const uint8_t *high = from + 128 + 32 * part;
                for (int quarter = 0; quarter < 4; quarter++)
                    for (int i = 0; i < 32; i++)
                        numbers[32 * quarter + i] =
                            numbers[32 * quarter + i] | (high[i] >> 2 * quarter & 3) << 4;
            }
            to.scales[0] = half_at(from + 208);
            memcpy(to.nested_scales, from + 192, GROUPS_MOST);
    }
}

// Where the panels of a layer go, and their form. ``offsets`` is null without offsets, and if they are
// nested.
struct PackedPanels {
    uint8_t *numbers, *scales, *offsets;
    BlockForm form;
    int64_t inputs;

    long stride() const { return panel_bytes(form.bits, inputs); }
    long scale_stride() const { return scale_bytes(inputs, form.group, form.nested); }
};

// Packs 16 codes of two or three bits into their lane of 16 inputs of a panel.
template <int BITS>
static inline void pack_few_bits(const uint8_t *codes, int lane, uint8_t *to) {
    uint32_t quads[4], low = 0, upper = 0;
    memcpy(quads, codes, sizeof quads);
    for (int quad = 0; quad < 4; quad++) {
        low |= (quads[quad] & 0x03030303u) << 2 * quad;
        upper |= (quads[quad] >> 2 & 0x01010101u) << quad;
    }
    memcpy(to + lane * 4, &low, sizeof low);
    if constexpr (BITS == 3) {
        const uint32_t pairs = upper | upper >> 4;  // each byte with the one above it
        to[64 + lane * 2] = (uint8_t)pairs;
        to[64 + lane * 2 + 1] = (uint8_t)(pairs >> 16);
    }
}

// Packs ``count`` numbers of one output, of a byte each, into its lane of a panel. They begin at input
// ``first``, where codes that lie together begin.
template <int BITS>
static inline void pack_numbers(const uint8_t *numbers, int count, long first, int lane,
                                uint8_t *panel) {
    constexpr int INPUTS = TOGETHER<BITS>, UPPER = BITS - 4;
    uint8_t *to = panel + first * PANEL * BITS / 8 + lane * 4;
    for (int k = 0; k < count; k += INPUTS, to += INPUTS * PANEL * BITS / 8) {
        uint32_t quads[INPUTS / 4], upper = 0;
        memcpy(quads, numbers + k, sizeof quads);
        for (int i = 0; i < INPUTS / 4; i += 2) {
            if constexpr (BITS == 8) {
                quads[i] ^= ZERO * 0x01010101u, quads[i + 1] ^= ZERO * 0x01010101u;
                memcpy(to + i * 64, quads + i, 4);
                memcpy(to + (i + 1) * 64, quads + i + 1, 4);
            } else {
                const uint32_t low = quads[i] & 0x0f0f0f0fu, high = quads[i + 1] & 0x0f0f0f0fu;
                const uint32_t pair = low | high << 4;
                memcpy(to + i / 2 * 64, &pair, sizeof pair);
                if constexpr (UPPER > 0)
                    upper |= (quads[i] >> 4 & 0x0f0f0f0fu) << i * UPPER |
                             (quads[i + 1] >> 4 & 0x0f0f0f0fu) << (i + 1) * UPPER;
            }
        }
        if constexpr (UPPER > 0 && BITS < 8) memcpy(to + INPUTS * 8, &upper, sizeof upper);
    }
}

static inline void pack_numbers(int64_t bits, const uint8_t *numbers, int count, long first,
                                int lane, uint8_t *panel) {
    switch (bits) {
        case 2:
        case 3:
            for (int k = 0; k < count; k += 16) {
                uint8_t *to = panel + (first + k) * PANEL * bits / 8;
                bits == 2 ? pack_few_bits<2>(numbers + k, lane, to)
                          : pack_few_bits<3>(numbers + k, lane, to);
            }
            return;
        case 4: return pack_numbers<4>(numbers, count, first, lane, panel);
        case 5: return pack_numbers<5>(numbers, count, first, lane, panel);
        case 6: return pack_numbers<6>(numbers, count, first, lane, panel);
        default: pack_numbers<8>(numbers, count, first, lane, panel);
    }
}

// Packs one output's row of blocks into its lane. Returns whether its scales are finite.
static inline bool pack_row(const BlockRows &source, int64_t output, int lane,
                            const PackedPanels &to, long place) {
    const BlockForm &form = to.form;
    const int64_t at = output - source.first, row = source.order ? source.order[at] : at;
    const uint8_t *from = source.data + row * source.row_bytes;
    uint8_t *panel = to.numbers + place * to.stride();
    uint8_t *scales = to.scales + place * to.scale_stride();
    bool are_finite = true;
    Block block = {};
    for (long first = 0; first < to.inputs; first += form.inputs, from += form.bytes) {
        read_block(source.kind, from, block);
        pack_numbers(form.bits, block.numbers, form.inputs, first, lane, panel);
        are_finite &= is_finite(block.scales[0]) && is_finite(block.offsets[0]);
        if (form.nested) {
            const NestedPlaces own(form.group, form.nested);
            f16 *factors = (f16 *)(scales + own.factors(first)) + lane;
            int8_t *nested = (int8_t *)scales + own.scales(first) + lane;
            factors[0] = block.scales[0];
            if (form.nested > 1) factors[PANEL] = block.offsets[0];
            for (int group = 0; group < form.inputs / form.group; group++) {
                int8_t *own_scale = nested + group * bytes_of_group(form.nested) * PANEL;
                own_scale[0] = block.nested_scales[group];
                if (form.nested == 2) own_scale[PANEL] = block.nested_offsets[group];
                if (form.nested == 3) own_scale[0] |= block.nested_offsets[group] << 4;
            }
            continue;
        }
        const long group = first / form.group * PANEL + lane;
        ((f16 *)scales)[group] = block.scales[0];
        if (to.offsets)
            ((f16 *)(to.offsets + place * to.scale_stride()))[group] = block.offsets[0];
    }
    return are_finite;
}

// Packs the outputs ``first`` to ``first`` + ``count`` - 1 as the panel at ``place``.
static bool pack_panel(const BlockRows *sources, long num_sources, long first, long count,
                       const PackedPanels &to, long place) {
    const long room = to.scale_stride();
    memset(to.numbers + place * to.stride(), to.form.bits == 8 ? ZERO : 0, to.stride());
    memset(to.scales + place * room, 0, room);
    if (to.offsets) memset(to.offsets + place * room, 0, room);
    bool are_finite = true;
    for (long output = first; output < first + count; output++)
        for (long i = 0; i < num_sources; i++) {
            const BlockRows &source = sources[i];
            if (output < source.first || output >= source.first + source.count) continue;
            are_finite &= pack_row(source, output, (int)(output - first), to, place);
        }
    return are_finite;
}

// --- checksums ----------------------------------------------------------------------------------

constexpr long CHECKED_AT_ONCE = 1 << 18;  // bytes; a part of a core's cache
constexpr int CHECK_LANES = 64;

// Mixes bytes into one number. A change of one word, or of bytes of one, always changes the result.
static uint64_t checksum_of(const uint8_t *from, long count) {
    uint32_t lanes[CHECK_LANES];
    for (int i = 0; i < CHECK_LANES; i++) lanes[i] = 0x9e3779b9u * (i + 1);
    auto add = [&](const uint8_t *bytes) {
        uint32_t words[CHECK_LANES];
        memcpy(words, bytes, sizeof words);
        for (int i = 0; i < CHECK_LANES; i++) {
            lanes[i] = (lanes[i] ^ words[i]) * 0x85ebca6bu;
            lanes[i] ^= lanes[i] >> 15;
        }
    };
    constexpr long STEP = sizeof lanes;
    long at = 0;
    for (; count - at >= STEP; at += STEP) add(from + at);
    if (at < count) {
        uint8_t rest[STEP] = {};
        memcpy(rest, from + at, count - at);
        add(rest);
    }
    uint64_t total = (uint64_t)count;
    for (int i = 0; i < CHECK_LANES; i++) {
        total = (total ^ lanes[i]) * 0x9e3779b97f4a7c15ull;
        total ^= total >> 32;
    }
    return total;
}

}  // namespace triolet
