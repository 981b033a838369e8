// The paged cache of keys and values as the kernels see it, and what decodes and chunks of prompts
// share: which positions a query sees, where a position's keys lie, how scores are scaled.
#pragma once

#include "matmul.h"

namespace triolet {

constexpr long PART = 512;        // positions of a part
constexpr long QUERIES = 32;      // queries of a block: of one head of a chunk, or a decode's heads
constexpr long WIDTH_MOST = 256;  // numbers of a head

// Mirrored by `engine.worker.forward.kernel_structs.Rows`.
// A token sees positions before its own of
// ``untils``; a row of one token sees those before the row's end, which is the same.
struct Rows {
    const int64_t *starts, *ends, *offsets, *tables, *slots, *untils;
    int64_t num_rows, table_width, block_size, num_tokens, num_blocks;
};

// Mirrored by `engine.worker.forward.kernel_structs.Attention`.
// A window or softcap of 0 means none.
struct Attention {
    void *keys, *values;  // [num_blocks][block_size][kv_heads][width]
    const float *sinks;   // [heads] the score of a key whose value is 0; null: there is none
    int64_t heads, kv_heads, width, window;
    float scaling, softcap;
};

// Returns the first position that a query at ``position`` sees.
static inline long first_visible(long position, long window) {
    long first = window ? position - window + 1 : 0;
    return first > 0 ? first : 0;
}

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

// Returns the address of a position's keys or values, [kv_heads][width].
template <class T>
static inline const T *at_position(const void *cache, const Attention &call, const Rows &rows,
                                   long row, long position) {
    long block = rows.tables[row * rows.table_width + position / rows.block_size];
    long slot = block * rows.block_size + position % rows.block_size;
    return (const T *)cache + slot * call.kv_heads * call.width;
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

// Writes a token's keys and values, each [kv_heads x width], into its slot of the cache.
template <class T, class From>
static void write_token(const Attention &call, const Rows &rows, long token, const From *key,
                        const From *value) {
    const long own = call.kv_heads * call.width, slot = rows.slots[token];
    T *keys = (T *)call.keys + slot * own, *values = (T *)call.values + slot * own;
    long i = 0;
    for (; i + LANES <= own; i += LANES) {
        store(keys + i, load(key + i));
        store(values + i, load(value + i));
    }
    for (; i < own; i++) {
        store_one(keys + i, to_float(key[i]));
        store_one(values + i, to_float(value[i]));
    }
}

// A thread's memory for a block of queries: its inputs, scores, weights, and its sums so far.
template <class T>
struct Gathered {
    alignas(64) T query[QUERIES * WIDTH_MOST];
    alignas(64) float scores[QUERIES * PART];
    alignas(64) T weights[QUERIES * PART];
    alignas(64) float out[QUERIES * WIDTH_MOST];
    float best[QUERIES], total[QUERIES];
};

}  // namespace triolet
