// Attention of a row of one token (a decode), which walks its keys and values in parts of PART
// positions. Different threads compute the parts of a long context, and the parts are joined in
// order.
#pragma once

#include "paged_cache.h"

namespace triolet {

constexpr long TILE = LANES;      // positions that a decode computes together
constexpr long AHEAD = 2 * TILE;  // how many positions ahead keys and values are prefetched

// The highest score of some keys for one head, and the total of their weights e^(score - best).
struct Partial {
    float best, total;
};

// The addresses that a decode reads in a part, in order: the keys of each position, then the values
// of each position, for several key heads side by side; and those of their scales. The last tile is
// padded with the last position of the part.
template <class C>
struct Stream {
    const C *at[2 * PART];
    const float *scales_at[HAS_SCALES<C> ? 2 * PART : 1];
    long count, length;  // the number of positions, without and with the padding
    long scales_apart;   // positions whose scales of all heads fit a line of the processor's cache

    Stream(const Attention &call, const Rows &rows, long row, long key_head, long begin, long end)
        : count(end - begin), length((end - begin + TILE - 1) / TILE * TILE),
          scales_apart(larger(1, 64 / (long)sizeof(float) / call.kv_heads)) {
        const long heads = call.kv_heads, width = call.width, size = rows.block_size;
        for (long position = begin, j = 0; position < end;) {
            const long own = smaller(size - position % size, end - position);
            long place = slot_of(rows, row, position) * heads + key_head;
            for (long i = 0; i < own; i++, j++, place += heads) {
                at[j] = (const C *)call.keys + place * width;
                at[length + j] = (const C *)call.values + place * width;
                if constexpr (HAS_SCALES<C>) {
                    scales_at[j] = call.key_scales + place;
                    scales_at[length + j] = call.value_scales + place;
                }
            }
            position += own;
        }
        for (long j = count; j < length; j++) {
            at[j] = at[count - 1];
            at[length + j] = at[length + count - 1];
            if constexpr (HAS_SCALES<C>) {
                scales_at[j] = scales_at[count - 1];
                scales_at[length + j] = scales_at[length + count - 1];
            }
        }
    }

    const C *const *keys() const { return at; }
    const C *const *values() const { return at + length; }

    // Returns the scales of a tile for one of the key heads. ``tile`` counts as in `at`.
    v16 scales(long tile, long key_head) const {
        float own[TILE];
        for (long j = 0; j < TILE; j++) own[j] = scales_at[tile + j][key_head];
        return load(own);
    }

    // Prefetches the numbers offset … offset + width - 1 of a tile, because each block lies
    // elsewhere. They go to the second-level cache, one head at a time: a core can have some two
    // dozen lines on their way to its first-level cache, and stalls at the next.
    void fetch(long tile, long offset, long width) const {
        for (long j = tile; j < smaller(tile + TILE, 2 * length); j++) {
            const char *line = (const char *)(at[j] + offset);
            for (const char *end = line + width * sizeof(C); line < end; line += 64)
                __builtin_prefetch(line, 0, 2);
        }
        if constexpr (HAS_SCALES<C>)
            if (!offset)  // the scales of all heads and of the next positions lie side by side
                for (long j = tile; j < smaller(tile + TILE, 2 * length); j += scales_apart)
                    __builtin_prefetch(scales_at[j], 0, 2);
    }
};

// Loads a key's numbers to be multiplied with queries of type Q: 32 in bfloat16, else 16.
template <class Q, class C>
TRIOLET_INLINE auto key_numbers(const C *key) {
    if constexpr (std::is_same_v<Q, bf16>)
        return load_as<u16v>(key);
    else
        return load(key);
}

TRIOLET_INLINE v16 add_products(v16 acc, const float *query, v16 key) {
    return acc + load(query) * key;
}

TRIOLET_INLINE v16 add_products(v16 acc, const bf16 *query, u16v key) {
    return add_pairs(acc, load_as<u16v>(query), key);
}

// Adds up the products of HEADS queries, which are ``depth`` numbers apart, with KEYS keys: a vector
// for each query and key, whose sum is the score, in products[HEADS][TILE].
template <int HEADS, int KEYS, class C, class Q>
static inline void multiply_keys(const Attention &call, const C *const *keys, long offset,
                                 const Q *query, long depth, v16 *products) {
    constexpr long STEP = 64 / sizeof(Q);
    const long whole = call.width / STEP * STEP;
    v16 acc[HEADS][KEYS];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) acc[h][j] = splat(0.0f);
    for (long d = 0; d < whole; d += STEP)
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) {
            const auto key = key_numbers<Q>(keys[j] + offset + d);
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++)
                acc[h][j] = add_products(acc[h][j], query + h * depth + d, key);
        }
    if constexpr (sizeof(Q) == 2) {
        if (whole < call.width)
#pragma GCC unroll 16
            for (int j = 0; j < KEYS; j++) {
                bf16 own[2 * LANES] = {};
                memcpy(own, keys[j] + offset + whole, LANES * sizeof *own);
                const u16v key = key_numbers<Q>(own);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++)
                    acc[h][j] = add_products(acc[h][j], query + h * depth + whole, key);
            }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) store_as(products + h * TILE + j, acc[h][j]);
}

// Computes the scores of a tile's keys, of one key head, for HEADS queries.
template <int HEADS, class C, class Q>
static inline void score_heads(const Attention &call, const C *const *keys, long offset,
                               const Q *query, long depth, v16 scales, float *scores) {
    constexpr int KEYS = KEYS_AT_ONCE / (HEADS == 3 ? 4 : HEADS);
    v16 products[HEADS][TILE];
    for (int j = 0; j < TILE; j += KEYS)
        multiply_keys<HEADS, KEYS>(call, keys + j, offset, query, depth, products[0] + j);
    for (int h = 0; h < HEADS; h++) {
        v16 own = sums(products[h]);
        if constexpr (HAS_SCALES<C>) own *= scales;
        store(scores + h * PART, shape_scores(call, own));
    }
}

// Does so for ``heads`` queries. Keys that are widened are widened once for several queries.
template <class C, class Q>
static void score_keys(const Attention &call, const Stream<C> &stream, long tile, long key_head,
                       const Q *query, long heads, long depth, float *scores) {
    const C *const *keys = stream.keys() + tile;
    const long offset = key_head * call.width;
    v16 scales = splat(0.0f);
    if constexpr (HAS_SCALES<C>) scales = stream.scales(tile, key_head);
    auto score = [&](auto count) {
        score_heads<count.value>(call, keys, offset, query, depth, scales, scores);
        heads -= count.value;
        query += count.value * depth;
        scores += count.value * PART;
    };
    if constexpr (!std::is_same_v<C, Q>) {
        while (heads >= 4) score(std::integral_constant<int, 4>{});
        if (heads == 3) score(std::integral_constant<int, 3>{});
        if (heads == 2) score(std::integral_constant<int, 2>{});
    }
    while (heads >= 1) score(std::integral_constant<int, 1>{});
}

// The queries of a part that are multiplied with int8 keys as integers, in memory for floats: a
// query is scale * (256 * high + low), and so has 16 bits. Each query's bytes are padded with zeros to
// a multiple of 64.
struct IntegerQueries {
    int8_t *bytes;  // [queries][2][padded]: high and low
    long padded;
    float scales[QUERIES];
    int32_t starts[QUERIES][2];  // minus ZERO times the sums of high and low

    IntegerQueries(const float *query, long width, long count, void *memory)
        : bytes((int8_t *)memory), padded((width + 63) / 64 * 64) {
        memset(bytes, 0, count * 2 * padded);
        for (long i = 0; i < count; i++) {
            const float *own = query + i * width;
            uint32_t bits = 0;
            for (long d = 0; d < width; d += LANES) {
                const uint32_t one = highest_magnitude((u16v)load(own + d));
                bits = one > bits ? one : bits;
            }
            float most;
            memcpy(&most, &bits, sizeof most);
            const bool is_finite = bits < 0x7f800000;
            scales[i] = is_finite ? most / MOST : NAN;
            const float factor = is_finite && most > 1e-30f ? MOST / most : 0.0f;
            i16v sums_[2] = {splat((int32_t)0), splat((int32_t)0)};
            for (long d = 0; d < width; d += LANES) {
                const v16 number = is_finite ? load(own + d) * factor : splat(0.0f);
                const i16v whole = to_integers(number), high = (whole + 128) >> 8;
                const i16v low = whole - high * 256;
                store_bytes(bytes + (2 * i) * padded + d, high);
                store_bytes(bytes + (2 * i + 1) * padded + d, low);
                sums_[0] += high;
                sums_[1] += low;
            }
            for (int part = 0; part < 2; part++) starts[i][part] = -ZERO * sum(sums_[part]);
        }
    }

    static constexpr float MOST = 127 * 256.0f;  // then no high part exceeds 127
};

// Computes the scores of a tile's keys, of one key head, for HEADS queries from ``first`` on.
template <int HEADS>
static inline void score_integers(const Attention &call, const int8_t *const *keys, long offset,
                                  const IntegerQueries &queries, long first, v16 scales,
                                  float *scores) {
    i16v acc[HEADS][2];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
        for (int part = 0; part < 2; part++) acc[h][part] = splat(queries.starts[first + h][part]);
    for (long d = 0; d < call.width; d += 64) {
        b64 quads[16];
        load_quads(keys, offset + d, call.width - d, quads);
        const int8_t *own = queries.bytes + 2 * first * queries.padded + d;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++)
                    acc[h][part] = add_quads(
                        acc[h][part], quads[i],
                        load_as<int32_t>(own + (2 * h + part) * queries.padded + 4 * i));
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
        const v16 own = to_floats(acc[h][0]) * 256.0f + to_floats(acc[h][1]);
        store(scores + h * PART, shape_scores(call, own * queries.scales[first + h] * scales));
    }
}

// Does so for ``heads`` queries.
static inline void score_keys(const Attention &call, const Stream<int8_t> &stream, long tile,
                              long key_head, const IntegerQueries &queries, long first,
                              long heads, float *scores) {
    const int8_t *const *keys = stream.keys() + tile;
    const long offset = key_head * call.width;
    const v16 scales = stream.scales(tile, key_head);
    for (; heads >= 4; heads -= 4, first += 4, scores += 4 * PART)
        score_integers<4>(call, keys, offset, queries, first, scales, scores);
    if (heads == 3) score_integers<3>(call, keys, offset, queries, first, scales, scores);
    if (heads == 2) score_integers<2>(call, keys, offset, queries, first, scales, scores);
    if (heads == 1) score_integers<1>(call, keys, offset, queries, first, scales, scores);
}

// Turns scores [count] into ``weights``. The weights that pad the last tile become 0.
template <class T>
static Partial weigh(float *scores, long count, T *weights) {
    const i16v lane = lane_numbers();
    v16 best = splat(-INFINITY);
    for (long j = 0; j < count; j += LANES) {
        i16v is_own = lane < (int32_t)(count - j);
        v16 own = pick(is_own, load(scores + j), splat(-INFINITY));
        store(scores + j, own);
        best = max16(own, best);
    }
    float top = highest(best), base = top == -INFINITY ? 0.0f : top;
    v16 total = splat(0.0f);
    for (long j = 0; j < count; j += LANES) {
        v16 weight = exp16(load(scores + j) - base);
        store(weights + j, weight);
        total += weight;
    }
    return {top, sum(total)};
}

// Adds a tile's values, multiplied by ``weights``, to the outputs of HEADS heads, which are
// ``width`` numbers apart. Of each value it takes VECTORS vectors from ``offset`` on.
template <int HEADS, int VECTORS, class C>
static void add_values(const C *const *values, long offset, const float *weights, float *out,
                       long width) {
    Sums<HEADS, VECTORS> sums;
    sums.begin(out, width, true);
    for (long j = 0; j < TILE; j++) {
        v16 own[VECTORS];
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; c++) own[c] = load(values[j] + offset + c * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++) sums.of[h][c] += own[c] * weights[h * PART + j];
    }
    sums.end(out, width);
}

template <int HEADS, int VECTORS>
static void add_values(const bf16 *const *values, long offset, const bf16 *weights, float *out,
                       long width) {
    Sums<HEADS, VECTORS> sums;
    sums.begin(out, width, true);
    for (long j = 0; j < TILE; j += 2) {
        u16v pairs[VECTORS];
        pair_up<VECTORS>(values[j] + offset, values[j + 1] + offset, pairs);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            const u16v pair = splat_pair(weights + h * PART + j);
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++)
                sums.of[h][c] = add_pairs(sums.of[h][c], pairs[c], pair);
        }
    }
    sums.end(out, width);
}

template <int VECTORS, class C, class Q>
static void add_values_of(const C *const *values, long offset, const Q *weights, float *out,
                          long width, long heads) {
    for (; heads >= 4; heads -= 4, weights += 4 * PART, out += 4 * width)
        add_values<4, VECTORS>(values, offset, weights, out, width);
    if (heads == 3) add_values<3, VECTORS>(values, offset, weights, out, width);
    if (heads == 2) add_values<2, VECTORS>(values, offset, weights, out, width);
    if (heads == 1) add_values<1, VECTORS>(values, offset, weights, out, width);
}

// Computes one position's queries, ``group`` for each of ``key_heads``, over a part's keys and
// values. Writes ``partials`` [key_heads x group], and the weighted values, not yet divided by the
// totals, to ``has.out`` [key_heads x group][width].
template <class C, class Q = Computed<C>>
static void attend_part(const Attention &call, const Stream<C> &stream, long key_heads, long group,
                        const float *query, Gathered &has, Partial *partials) {
    const long width = call.width, depth = padded_depth<Q>(width), heads = key_heads * group;
    Q *own = has.query<Q>(), *all_weights = has.weights<Q>();
    for (long tile = 0; tile < AHEAD; tile += TILE) stream.fetch(tile, 0, key_heads * width);
    auto each_tile = [&](auto score) {
        for (long j = 0; j < stream.length; j += TILE)
            for (long g = 0; g < key_heads; g++) {
                stream.fetch(j + AHEAD, g * width, width);
                score(j, g, has.scores + g * group * PART + j);
            }
    };
    if constexpr (HAS_SCALES<C> && SCORES_INTEGERS) {
        const IntegerQueries queries(query, width, heads, own);
        each_tile([&](long j, long g, float *scores) {
            score_keys(call, stream, j, g, queries, g * group, group, scores);
        });
    } else {
        if (depth > width) memset(own, 0, heads * depth * sizeof(Q));
        for (long i = 0; i < heads; i++)
            for (long d = 0; d < width; d += LANES)
                store(own + i * depth + d, load(query + i * width + d));
        each_tile([&](long j, long g, float *scores) {
            score_keys(call, stream, j, g, own + g * group * depth, group, depth, scores);
        });
    }
    for (long h = 0; h < heads; h++)
        partials[h] = weigh(has.scores + h * PART, stream.count, all_weights + h * PART);
    memset(has.out, 0, heads * width * sizeof *has.out);
    for (long j = 0; j < stream.length; j += TILE)
        for (long g = 0; g < key_heads; g++) {
            stream.fetch(stream.length + j + AHEAD, g * width, width);
            Q *weights = all_weights + g * group * PART + j;
            if constexpr (HAS_SCALES<C>) {
                const v16 scales = stream.scales(stream.length + j, g);
                for (long h = 0; h < group; h++)
                    store(weights + h * PART, load(weights + h * PART) * scales);
            }
            float *out = has.out + g * group * width;
            long d = 0;
            for (; width - d >= VALUES_AT_ONCE * LANES; d += VALUES_AT_ONCE * LANES)
                add_values_of<VALUES_AT_ONCE>(stream.values() + j, g * width + d, weights, out + d,
                                              width, group);
            for (; d < width; d += LANES)
                add_values_of<1>(stream.values() + j, g * width + d, weights, out + d, width,
                                 group);
        }
}

// Joins the parts of one head in order, and divides by the total, which the head's ``sink`` is part
// of. Calls ``put(column, vector)`` with the result [width].
template <class Put>
static void join_parts(const Partial *partials, const float *sums_, long parts, long heads,
                       long width, float sink, Put put) {
    float best = sink;
    for (long p = 0; p < parts; p++) best = fmaxf(best, partials[p * heads].best);
    float factors[parts], total = sink == -INFINITY ? 0.0f : expf(sink - best);
    for (long p = 0; p < parts; p++) {
        const Partial &one = partials[p * heads];
        factors[p] = one.best == -INFINITY ? 0.0f : expf(one.best - best);
        total += factors[p] * one.total;
    }
    for (long d = 0; d < width; d += LANES) {
        v16 value = splat(0.0f);
        for (long p = 0; p < parts; p++)
            if (factors[p] != 0.0f) value += factors[p] * load(sums_ + p * heads * width + d);
        put(d, value / total);
    }
}

}  // namespace triolet
