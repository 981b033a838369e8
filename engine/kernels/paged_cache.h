// The paged cache of keys and values as the kernels see it, and what decodes and chunks of prompts
// share: which positions a query sees, where a position's keys lie, how scores are scaled.
//
// A cache stores numbers of type C. Attention converts them to type Q (`Computed`) and rounds
// queries and weights to Q: bfloat16 for a bfloat16 cache on a processor that multiplies bfloat16,
// else float32. Sums are float32. In an int8 cache, the key of a position and head is integers of
// -127 to 127 times one scale, and so is the value. Where the processor multiplies fours of bytes by one
// instruction, decodes round their queries to 16 bits, and multiply them with keys as integers.
#pragma once

#include "matmul.h"

namespace triolet {

constexpr long PART = 512;        // positions of a part
constexpr long QUERIES = 32;      // queries of a block: of one head of a chunk, or a decode's heads
constexpr long WIDTH_MOST = 256;  // numbers of a head

// Mirrored by `engine.worker.forward.kernel_structs.Rows`.
// A token sees the positions before its entry in ``untils``. In a row of one token this entry is
// the row's end.
struct Rows {
    const int64_t *starts, *ends, *offsets, *tables, *slots, *untils;
    int64_t num_rows, table_width, block_size, num_tokens, num_blocks;
};

// The dtype of a cache. Mirrored by `engine.worker.forward.kernel_structs.CACHE_KINDS`.
enum CacheKind { CACHE_FLOAT = 0, CACHE_BF16 = 1, CACHE_F16 = 2, CACHE_INT8 = 3 };

// Mirrored by `engine.worker.forward.kernel_structs.Attention`.
// A window or softcap of 0 means none.
struct Attention {
    void *keys, *values;               // [num_blocks][block_size][kv_heads][width]
    float *key_scales, *value_scales;  // [num_blocks][block_size][kv_heads]; null without int8
    const float *sinks;  // [heads] the score of a key whose value is 0; null: there is none
    int64_t kind, heads, kv_heads, width, window;
    float scaling, softcap;
};

// Returns the first position that a query at ``position`` sees.
static inline long first_visible(long position, long window) {
    long first = window ? position - window + 1 : 0;
    return first > 0 ? first : 0;
}

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

template <class C>
constexpr bool HAS_SCALES = std::is_same_v<C, int8_t>;

template <class C>
using Computed = std::conditional_t<std::is_same_v<C, bf16> && MULTIPLIES_PAIRS, bf16, float>;

// Calls ``use`` with a null pointer whose type is that of the cache's numbers.
template <class Use>
static inline auto with_cache(const Attention &call, Use use) {
    switch (call.kind) {
        case CACHE_BF16: return use((bf16 *)nullptr);
        case CACHE_F16: return use((f16 *)nullptr);
        case CACHE_INT8: return use((int8_t *)nullptr);
        default: return use((float *)nullptr);
    }
}

// Returns the address of a position and head's scale, or null where there are none.
static inline float *scale_at(float *scales, long place) {
    return scales ? scales + place : nullptr;
}

// Returns the slot of a row's position.
static inline long slot_of(const Rows &rows, long row, long position) {
    const long block = rows.tables[row * rows.table_width + position / rows.block_size];
    return block * rows.block_size + position % rows.block_size;
}

// Returns the score of a head's sink. That of a head without one adds nothing.
static inline float sink_of(const Attention &call, long head) {
    return call.sinks ? call.sinks[head] : -INFINITY;
}

// Scales scores and caps them, if the layer does that.
static inline v16 shape_scores(const Attention &call, v16 scores) {
    scores *= call.scaling;
    if (call.softcap > 0.0f) scores = call.softcap * tanh16(scores / call.softcap);
    return scores;
}

// Rounds a head's numbers to the cache's type.
template <class C, class From>
static inline void write_head(const From *from, long width, C *to, float *) {
    for (long i = 0; i < width; i += LANES) store(to + i, load(from + i));
}

// Rounds a head's numbers to int8 and one scale, which is NaN if a number is not finite.
template <class From>
static inline void write_head(const From *from, long width, int8_t *to, float *scale) {
    uint32_t bits = 0;
    for (long i = 0; i < width; i += LANES) {
        const uint32_t own = highest_magnitude((u16v)load(from + i));
        bits = own > bits ? own : bits;
    }
    float most;
    memcpy(&most, &bits, sizeof most);
    const bool is_finite = bits < 0x7f800000;
    *scale = is_finite ? most / 127.0f : NAN;
    const float factor = is_finite && most > 0.0f ? 127.0f / most : 0.0f;
    for (long i = 0; i < width; i += LANES) {
        const v16 number = is_finite ? load(from + i) * factor : splat(0.0f);
        store_bytes(to + i, to_integers(number));
    }
}

// Writes a token's keys and values, each [kv_heads x width], into its slot of the cache.
template <class From>
static void write_token(const Attention &call, const Rows &rows, long token, const From *key,
                        const From *value) {
    with_cache(call, [&](auto *type) {
        typedef std::remove_pointer_t<decltype(type)> C;
        for (long head = 0; head < call.kv_heads; head++) {
            const long place = rows.slots[token] * call.kv_heads + head;
            const long from = head * call.width, to = place * call.width;
            write_head(key + from, call.width, (C *)call.keys + to,
                       scale_at(call.key_scales, place));
            write_head(value + from, call.width, (C *)call.values + to,
                       scale_at(call.value_scales, place));
        }
    });
}

// A thread's memory for a block of queries: its inputs, scores, weights, and its sums so far. Inputs
// and weights have the type that the cache is computed with.
struct Gathered {
    alignas(64) float query_[QUERIES * WIDTH_MOST];
    alignas(64) float scores[QUERIES * PART];
    alignas(64) float weights_[QUERIES * PART];
    alignas(64) float out[QUERIES * WIDTH_MOST];
    float best[QUERIES], total[QUERIES];

    template <class Q>
    Q *query() {
        return (Q *)query_;
    }
    template <class Q>
    Q *weights() {
        return (Q *)weights_;
    }
};

// The attention of a step's tokens, [num_tokens][heads][width], which begin ``ld`` numbers apart.
struct Results {
    void *numbers;
    long ld;
    bool is_narrow;  // bfloat16, else float32

    Results(float *to, long apart) : numbers(to), ld(apart), is_narrow(false) {}
    Results(bf16 *to, long apart) : numbers(to), ld(apart), is_narrow(true) {}

    void put(long token, long column, v16 value) const {
        const long at = token * ld + column;
        if (is_narrow)
            store((bf16 *)numbers + at, value);
        else
            store((float *)numbers + at, value);
    }
};

}  // namespace triolet
