// Attention of a row of several tokens (a chunk of a prompt), which packs its keys and values into
// the panels of matmul.h and multiplies queries and weights by them.
#pragma once

#include "paged_cache.h"

namespace triolet {

// The packed keys and values of a row and key head, from position ``origin`` (a multiple of PART).
template <class T>
struct Packed {
    T *keys;    // panels of 16 positions
    T *values;  // panels of 16 numbers of a value; inputs are positions
    long origin, end, length;  // length: end - origin, rounded up to DEPTH_PAD

    static long depth(long width) { return padded_depth<T>(width); }
    static long numbers(long length, long width) {
        return length * (depth(width) + (width + LANES - 1) / LANES * LANES);
    }
};

// Writes one position's key as a column of its panel, 4 bytes at a time: one number, or a pair.
template <class T>
static inline void pack_key(const T *key, long width, T *panel, long lane) {
    const long words = width * sizeof(T) / 4;
    for (long word = 0; word < words; word++)
        memcpy((char *)panel + (word * PANEL + lane) * 4, (const char *)key + word * 4, 4);
}

// Writes the values of two positions as rows of their panels, which are ``stride`` numbers apart.
static inline void pack_values(const float *first, const float *second, long width, float *to,
                               long stride) {
    for (long d = 0; d < width; d += PANEL, to += stride) {
        store(to, load(first + d));
        store(to + PANEL, load(second + d));
    }
}

static inline void pack_values(const bf16 *first, const bf16 *second, long width, bf16 *to,
                               long stride) {
    for (long d = 0; d < width; d += PANEL, to += stride) {
        const u16v pairs = pair_up(first + d, second + d);
        memcpy(to, &pairs, sizeof pairs);
    }
}

// Returns a head's numbers in the type Q: the address of the ``numbers``, or of their conversion in
// ``room``.
template <class C, class Q>
static inline const Q *as_computed(const C *numbers, const float *scale, long width, Q *room) {
    if constexpr (std::is_same_v<C, Q>) {
        return numbers;
    } else {
        const float factor = HAS_SCALES<C> ? *scale : 1.0f;
        for (long d = 0; d < width; d += LANES) store(room + d, load(numbers + d) * factor);
        return room;
    }
}

// Packs the keys and values of 16 positions. Positions behind the row's end become 0.
template <class C, class Q = Computed<C>>
static void pack_positions(const Attention &call, const Rows &rows, long row, long kv_head,
                           Packed<Q> &to, long tile) {
    static const Q nothing[WIDTH_MOST] = {};
    const long width = call.width, depth = Packed<Q>::depth(width), at = tile * PANEL;
    Q *panel = to.keys + at * depth;
    if (depth > width) memset(panel, 0, PANEL * depth * sizeof(Q));
    for (long lane = 0; lane < PANEL; lane += 2) {
        Q room[2][WIDTH_MOST];
        const Q *values[2] = {nothing, nothing};
        for (long i = 0; i < 2; i++) {
            const long position = to.origin + at + lane + i;
            if (position >= to.end) {
                pack_key(nothing, width, panel, lane + i);
                continue;
            }
            const long place = slot_of(rows, row, position) * call.kv_heads + kv_head;
            const C *keys = (const C *)call.keys, *numbers = (const C *)call.values;
            pack_key(as_computed(keys + place * width, scale_at(call.key_scales, place), width,
                                 room[i]),
                     width, panel, lane + i);
            values[i] = as_computed(numbers + place * width, scale_at(call.value_scales, place),
                                    width, room[i]);
        }
        pack_values(values[0], values[1], width, to.values + panel_index<Q>(at + lane, 0),
                    to.length * PANEL);
    }
}

// Shapes scores [columns] in place, hides the columns before ``low`` and from ``high`` on, and
// returns the highest scores by lane.
static v16 shape_and_mask(const Attention &call, float *scores, long columns, long low, long high) {
    const i16v lane = lane_numbers();
    const v16 nothing = splat(-INFINITY);
    v16 best = nothing;
    for (long j = 0; j < columns; j += LANES) {
        v16 own = shape_scores(call, load(scores + j));
        if (j < low || j + LANES > high) {
            i16v at = lane + (int32_t)j;
            own = pick((at >= (int32_t)low) & (at < (int32_t)high), own, nothing);
        }
        store(scores + j, own);
        best = max16(own, best);
    }
    return best;
}

// Turns one query's scores of a part into weights, and rescales the query's sums so far. The query
// sees positions before ``until``.
template <class Q>
static void weigh_query(const Attention &call, Gathered &has, long query, long position,
                        long until, long part, long columns) {
    float *scores = has.scores + query * PART;
    const long low = larger(first_visible(position, call.window) - part, 0);
    const long high = smaller(until - part, columns);
    v16 best = shape_and_mask(call, scores, columns, smaller(low, columns), high);
    const float top = fmaxf(has.best[query], highest(best));
    const float base = top == -INFINITY ? 0.0f : top;
    v16 total = splat(0.0f);
    for (long j = 0; j < columns; j += LANES) {
        v16 weight = exp16(load(scores + j) - base);
        store(has.weights<Q>() + query * PART + j, weight);
        total += weight;
    }
    const float keep = has.best[query] == -INFINITY ? 0.0f : expf(has.best[query] - base);
    has.best[query] = top;
    has.total[query] = has.total[query] * keep + sum(total);
    const long width = (call.width + LANES - 1) / LANES * LANES;
    float *out = has.out + query * width;
    if (keep != 1.0f)
        for (long d = 0; d < width; d += LANES) store(out + d, load(out + d) * keep);
}

// Computes ``count`` queries of one head, from position ``first`` on, which see its ``sink`` and the
// positions before their ``untils``. They are float32 and ``ldq`` numbers apart in ``query``. Calls
// ``put(query, column, vector)`` with their results.
template <class Q, class Put>
static void attend_queries(const Attention &call, const Packed<Q> &packed, float sink, long first,
                           const int64_t *untils, long count, const float *query, long ldq,
                           Gathered &has, Put put) {
    const long width = call.width, depth = Packed<Q>::depth(width);
    const long vectors = (width + LANES - 1) / LANES;
    Q *own = has.query<Q>();
    memset(own, 0, QUERIES * depth * sizeof(Q));
    memset(has.out, 0, QUERIES * vectors * LANES * sizeof(float));
    for (long i = 0; i < count; i++) {
        for (long d = 0; d < width; d += LANES)
            store(own + i * depth + d, load(query + i * ldq + d));
        has.best[i] = sink;
        has.total[i] = sink == -INFINITY ? 0.0f : 1.0f;
    }
    long last = first;
    for (long i = 0; i < count; i++) last = larger(last, untils[i] - 1);
    long part = packed.origin + (first_visible(first, call.window) - packed.origin) / PART * PART;
    for (; part <= last; part += PART) {
        const long seen = smaller(PART, last - part + 1);
        const long columns = (seen + DEPTH_PAD - 1) / DEPTH_PAD * DEPTH_PAD;
        const long at = part - packed.origin;
        multiply(own, depth, count, packed.keys + at * depth, PANEL * depth, columns / PANEL, 0,
                 depth, has.scores, PART, false);
        for (long i = 0; i < count; i++)
            weigh_query<Q>(call, has, i, first + i, untils[i], part, columns);
        multiply(has.weights<Q>(), PART, count, packed.values + at * PANEL, packed.length * PANEL,
                 vectors, 0, columns, has.out, vectors * LANES, true);
    }
    for (long i = 0; i < count; i++)
        for (long d = 0; d < width; d += LANES)
            put(i, d, load(has.out + i * vectors * LANES + d) / has.total[i]);
}

}  // namespace triolet
