// Attention over the paged cache, reading its blocks in place.
//
// A row of one token (a decode) walks its keys and values in parts of PART positions; the parts of
// a long context are computed by different threads and joined in order. A row of several
// tokens (a prompt's chunk) packs its keys and values as matmul.h's panels and multiplies with
// them. Both round queries and weights to the cache's type, and add up in float32.
//
// Rule 1: parts begin at multiples of PART of the position, whatever the batch, so that a row's
// result does not depend on what is beside it.
// Rule 2: no slot that the sequence has not written is multiplied: a stale NaN times 0 is a NaN.
#pragma once

#include <omp.h>

#include "matmul.h"

namespace triolet {

constexpr long PART = 512;         // positions of a part
constexpr long TILE = LANES;       // positions that a decode looks at together
constexpr long AHEAD = 2 * TILE;   // it asks for keys and values so many positions ahead
constexpr long QUERIES = 32;       // queries of a block: of a chunk's head, or of a decode's heads
constexpr long WIDTH_MOST = 256;
constexpr long TASKS_OF_THREAD = 4;  // guess: with as many for each, threads end about together
constexpr long PACKED_BYTES_MOST = 32 << 20;  // guess: what packed keys and values may take

// As ctypes has it: `engine.model.native.Rows`.
struct Rows {
    const int64_t *starts, *ends, *offsets, *tables, *slots;
    int64_t num_rows, table_width, block_size, num_tokens;
};

// As ctypes has it: `engine.model.native.Attention`. A ``window`` or ``softcap`` of 0 is none.
struct Attention {
    void *keys, *values;  // [num_blocks][block_size][kv_heads][width]
    int64_t heads, kv_heads, width, window;
    float scaling, softcap;
};

static inline long first_visible(long position, long window) {
    long first = window ? position - window + 1 : 0;
    return first > 0 ? first : 0;
}

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

template <class T>
static inline const T *at_position(const void *cache, const Attention &call, const Rows &rows,
                                   long row, long position) {
    long block = rows.tables[row * rows.table_width + position / rows.block_size];
    long slot = block * rows.block_size + position % rows.block_size;
    return (const T *)cache + slot * call.kv_heads * call.width;
}

static inline v16 shape_scores(const Attention &call, v16 scores) {
    scores *= call.scaling;
    if (call.softcap > 0.0f) scores = call.softcap * tanh16(scores / call.softcap);
    return scores;
}

// Adds keys' and values' numbers of this step to the cache; each [kv_heads x width], ``stride``
// numbers apart.
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

// What a block of queries has gathered so far.
template <class T>
struct Gathered {
    alignas(64) T query[QUERIES * WIDTH_MOST];
    alignas(64) float scores[QUERIES * PART];
    alignas(64) T weights[QUERIES * PART];
    alignas(64) float out[QUERIES * WIDTH_MOST];
    float best[QUERIES], total[QUERIES];
};

// --- decodes ------------------------------------------------------------------------------------

// The joined result of some keys for one head: values weighted by e^(score - best).
struct Partial {
    float best, total;
};

// What a decode reads of a part, in order: each position's keys, then each one's values, of several
// key heads that lie beside each other. The part's last position fills up the last tile.
template <class T>
struct Stream {
    const T *at[2 * PART];
    long count, length;  // positions; the same, filled up

    Stream(const Attention &call, const Rows &rows, long row, long key_head, long begin, long end)
        : count(end - begin), length((end - begin + TILE - 1) / TILE * TILE) {
        const long stride = call.kv_heads * call.width, size = rows.block_size;
        const long offset = key_head * call.width;
        for (long position = begin, j = 0; position < end;) {
            const long own = smaller(size - position % size, end - position);
            const T *key = at_position<T>(call.keys, call, rows, row, position) + offset;
            const T *value = at_position<T>(call.values, call, rows, row, position) + offset;
            for (long i = 0; i < own; i++, j++) {
                at[j] = key + i * stride;
                at[length + j] = value + i * stride;
            }
            position += own;
        }
        for (long j = count; j < length; j++) {
            at[j] = at[count - 1];
            at[length + j] = at[length + count - 1];
        }
    }

    const T *const *keys() const { return at; }
    const T *const *values() const { return at + length; }

    // Asks for numbers offset … offset + width - 1 of a tile, as each block lies elsewhere. Into
    // the second cache, and one head's at a time: a core has room for some two dozen lines on their
    // way to its first cache, and stalls at the next.
    void fetch(long tile, long offset, long width) const {
        for (long j = tile; j < smaller(tile + TILE, 2 * length); j++) {
            const char *line = (const char *)(at[j] + offset);
            for (const char *end = line + width * sizeof(T); line < end; line += 64)
                __builtin_prefetch(line, 0, 2);
        }
    }
};

// Adds the products of a query's numbers with a key's: 16 of float32, 32 of bfloat16.
static inline v16 add_products(v16 acc, const float *query, const float *key) {
    return acc + load(query) * load(key);
}

static inline v16 add_products(v16 acc, const bf16 *query, const bf16 *key) {
    return add_pairs(acc, load_as<u16v>(query), load_as<u16v>(key));
}

// The same of a key's last 16 numbers, filled up with 0 as the query's are: what follows them in
// the cache is another head's, or nobody's.
static inline v16 add_rest(v16 acc, const bf16 *query, const bf16 *key) {
    u16v own = {};
    memcpy(&own, key, LANES * sizeof *key);
    return add_pairs(acc, load_as<u16v>(query), own);
}

// Scores of one tile's keys for ``heads`` queries, which are ``depth`` numbers apart.
template <class T>
static void score_keys(const Attention &call, const T *const *keys, long offset, const T *query,
                       long heads, long depth, float *scores) {
    constexpr long STEP = 64 / sizeof(T);
    const long whole = call.width / STEP * STEP;
    for (long head = 0; head < heads; head++, query += depth, scores += PART) {
        v16 acc[TILE];
#pragma GCC unroll 16
        for (int j = 0; j < TILE; j++) acc[j] = splat(0.0f);
        for (long d = 0; d < whole; d += STEP)
#pragma GCC unroll 16
            for (int j = 0; j < TILE; j++)
                acc[j] = add_products(acc[j], query + d, keys[j] + offset + d);
        if constexpr (sizeof(T) == 2) {
            if (whole < call.width)
#pragma GCC unroll 16
                for (int j = 0; j < TILE; j++)
                    acc[j] = add_rest(acc[j], query + whole, keys[j] + offset + whole);
        }
        store(scores, shape_scores(call, sums(acc)));
    }
}

// Turns scores [count] into ``weights``; those that fill up the last tile become 0.
template <class T>
static Partial weigh(float *scores, long count, T *weights) {
    const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
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

// Adds one tile's values, ``VECTORS`` vectors of each from ``offset`` on, by ``weights`` to ``out``
// [HEADS], ``width`` numbers apart.
template <int HEADS, int VECTORS>
static void add_values(const float *const *values, long offset, const float *weights, float *out,
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
            const uint32_t pair = load_as<uint32_t>(weights + h * PART + j);
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++)
                sums.of[h][c] = add_pairs(sums.of[h][c], pairs[c], pair);
        }
    }
    sums.end(out, width);
}

template <int VECTORS, class T>
static void add_values_of(const T *const *values, long offset, const T *weights, float *out,
                          long width, long heads) {
    for (; heads >= 4; heads -= 4, weights += 4 * PART, out += 4 * width)
        add_values<4, VECTORS>(values, offset, weights, out, width);
    if (heads == 3) add_values<3, VECTORS>(values, offset, weights, out, width);
    if (heads == 2) add_values<2, VECTORS>(values, offset, weights, out, width);
    if (heads == 1) add_values<1, VECTORS>(values, offset, weights, out, width);
}

// One position's queries, ``group`` for each of ``key_heads``, over a part's keys and values:
// ``partials`` [key_heads x group], and their values in ``has.out`` [key_heads x group][width], not
// yet divided by the totals.
template <class T>
static void attend_part(const Attention &call, const Stream<T> &stream, long key_heads, long group,
                        const float *query, Gathered<T> &has, Partial *partials) {
    const long width = call.width, depth = padded_depth<T>(width), heads = key_heads * group;
    for (long tile = 0; tile < AHEAD; tile += TILE) stream.fetch(tile, 0, key_heads * width);
    if (depth > width) memset(has.query, 0, heads * depth * sizeof(T));
    for (long i = 0; i < heads; i++)
        for (long d = 0; d < width; d += LANES)
            store(has.query + i * depth + d, load(query + i * width + d));
    for (long j = 0; j < stream.length; j += TILE)
        for (long g = 0; g < key_heads; g++) {
            stream.fetch(j + AHEAD, g * width, width);
            score_keys(call, stream.keys() + j, g * width, has.query + g * group * depth, group,
                       depth, has.scores + g * group * PART + j);
        }
    for (long h = 0; h < heads; h++)
        partials[h] = weigh(has.scores + h * PART, stream.count, has.weights + h * PART);
    memset(has.out, 0, heads * width * sizeof *has.out);
    for (long j = 0; j < stream.length; j += TILE)
        for (long g = 0; g < key_heads; g++) {
            stream.fetch(stream.length + j + AHEAD, g * width, width);
            const T *weights = has.weights + g * group * PART + j;
            float *out = has.out + g * group * width;
            long d = 0;
            for (; width - d >= 4 * LANES; d += 4 * LANES)
                add_values_of<4>(stream.values() + j, g * width + d, weights, out + d, width,
                                 group);
            for (; d < width; d += LANES)
                add_values_of<1>(stream.values() + j, g * width + d, weights, out + d, width,
                                 group);
        }
}

// Joins the parts of one head, in order, and divides: ``out`` [width].
template <class T>
static void join_parts(const Partial *partials, const float *sums_, long parts, long heads,
                       long width, T *out) {
    float best = -INFINITY, total = 0.0f;
    for (long p = 0; p < parts; p++) best = fmaxf(best, partials[p * heads].best);
    float factors[parts];
    for (long p = 0; p < parts; p++) {
        const Partial &one = partials[p * heads];
        factors[p] = one.best == -INFINITY ? 0.0f : expf(one.best - best);
        total += factors[p] * one.total;
    }
    for (long d = 0; d < width; d += LANES) {
        v16 value = splat(0.0f);
        for (long p = 0; p < parts; p++)
            if (factors[p] != 0.0f) value += factors[p] * load(sums_ + p * heads * width + d);
        store(out + d, value / total);
    }
}

// --- prompts' chunks ----------------------------------------------------------------------------

// A key head's keys and values of one row, from position ``origin`` (a multiple of PART) on.
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

// One position's key becomes a column of its panel, 4 bytes at a time: a number, or a pair.
template <class T>
static inline void pack_key(const T *key, long width, T *panel, long lane) {
    const long words = width * sizeof(T) / 4;
    for (long word = 0; word < words; word++)
        memcpy((char *)panel + (word * PANEL + lane) * 4, (const char *)key + word * 4, 4);
}

// A pair of positions' values become rows of their panels, ``stride`` numbers apart.
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

// The keys and values of 16 positions; those that the row has not are 0.
template <class T>
static void pack_positions(const Attention &call, const Rows &rows, long row, long kv_head,
                           Packed<T> &to, long tile) {
    static const T nothing[WIDTH_MOST] = {};
    const long width = call.width, depth = Packed<T>::depth(width), at = tile * PANEL;
    T *panel = to.keys + at * depth;
    if (depth > width) memset(panel, 0, PANEL * depth * sizeof(T));
    const T *values[PANEL];
    for (long lane = 0; lane < PANEL; lane++) {
        const long position = to.origin + at + lane;
        const bool is_own = position < to.end;
        const long from = kv_head * width;
        const T *key = nothing;
        values[lane] = nothing;
        if (is_own) {
            key = at_position<T>(call.keys, call, rows, row, position) + from;
            values[lane] = at_position<T>(call.values, call, rows, row, position) + from;
        }
        pack_key(key, width, panel, lane);
    }
    for (long lane = 0; lane < PANEL; lane += 2)
        pack_values(values[lane], values[lane + 1], width,
                    to.values + panel_index<T>(at + lane, 0), to.length * PANEL);
}

// Scales scores [columns] in place, and returns their highest. Columns before ``low`` and from
// ``high`` on are hidden.
static v16 shape_and_mask(const Attention &call, float *scores, long columns, long low, long high) {
    const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
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

// Turns one query's scores of a part into its ``weights``; rescales what the query has.
template <class T>
static void weigh_query(const Attention &call, Gathered<T> &has, long query, long position,
                        long part, long columns) {
    float *scores = has.scores + query * PART;
    const long low = larger(first_visible(position, call.window) - part, 0);
    const long high = smaller(position - part + 1, columns);
    v16 best = shape_and_mask(call, scores, columns, smaller(low, columns), high);
    const float top = fmaxf(has.best[query], highest(best));
    const float base = top == -INFINITY ? 0.0f : top;
    v16 total = splat(0.0f);
    for (long j = 0; j < columns; j += LANES) {
        v16 weight = exp16(load(scores + j) - base);
        store(has.weights + query * PART + j, weight);
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

// ``count`` queries of one head from position ``first`` on. ``query``, ``ldq`` numbers apart,
// float32; ``out``, ``ldo`` apart.
template <class T>
static void attend_queries(const Attention &call, const Packed<T> &packed, long first, long count,
                           const float *query, long ldq, T *out, long ldo, Gathered<T> &has) {
    const long width = call.width, depth = Packed<T>::depth(width);
    const long vectors = (width + LANES - 1) / LANES;
    memset(has.query, 0, QUERIES * depth * sizeof(T));
    memset(has.out, 0, QUERIES * vectors * LANES * sizeof(float));
    for (long i = 0; i < count; i++) {
        for (long d = 0; d < width; d += LANES)
            store(has.query + i * depth + d, load(query + i * ldq + d));
        has.best[i] = -INFINITY;
        has.total[i] = 0.0f;
    }
    const long last = first + count - 1;
    long part = packed.origin + (first_visible(first, call.window) - packed.origin) / PART * PART;
    for (; part <= last; part += PART) {
        const long seen = smaller(PART, last - part + 1);
        const long columns = (seen + DEPTH_PAD - 1) / DEPTH_PAD * DEPTH_PAD;
        const long at = part - packed.origin;
        multiply(has.query, depth, count, packed.keys + at * depth, PANEL * depth,
                 columns / PANEL, 0, depth, has.scores, PART, false);
        for (long i = 0; i < count; i++)
            weigh_query<T>(call, has, i, first + i, part, columns);
        multiply(has.weights, PART, count, packed.values + at * PANEL, packed.length * PANEL,
                 vectors, 0, columns, has.out, vectors * LANES, true);
    }
    for (long i = 0; i < count; i++)
        for (long d = 0; d < width; d += LANES)
            store(out + i * ldo + d, load(has.out + i * vectors * LANES + d) / has.total[i]);
}

// --- a step -------------------------------------------------------------------------------------

// The part of a decode that one task computes.
struct DecodeTask {
    long row, part, num_parts, place;  // place: of the row's first part among all parts
};

// A step's decodes, listed once for all layers, and memory that all threads share.
struct AttentionPlan {
    DecodeTask *tasks;
    long num_tasks, num_parts;  // parts of rows that have several
    Partial *partials;          // [num_parts][heads]
    float *sums_;               // [num_parts][heads][width]
    void *packed;               // keys and values of a chunk's row, PACKED_BYTES_MOST or one head
    long packed_size;           // of it, in bytes
};

static inline bool is_decode(const Rows &rows, long row) {
    return rows.offsets[row + 1] - rows.offsets[row] == 1;
}

// Counts the tasks, and lists them where there is a list.
static void list_decodes(const Rows &rows, AttentionPlan &plan) {
    plan.num_tasks = plan.num_parts = 0;
    for (long row = 0; row < rows.num_rows; row++) {
        if (!is_decode(rows, row)) continue;
        const long parts = (rows.ends[row] + PART - 1) / PART;
        for (long part = 0; part < parts; part++, plan.num_tasks++)
            if (plan.tasks) plan.tasks[plan.num_tasks] = {row, part, parts, plan.num_parts};
        if (parts > 1) plan.num_parts += parts;
    }
}

static inline long packed_length(const Rows &rows, long row, long window) {
    const long origin = first_visible(rows.starts[row], window) / PART * PART;
    return (rows.ends[row] - origin + DEPTH_PAD - 1) / DEPTH_PAD * DEPTH_PAD;
}

template <class T>
static long packed_bytes(const Attention &call, const Rows &rows) {
    long most = 0;
    for (long row = 0; row < rows.num_rows; row++) {
        if (is_decode(rows, row)) continue;
        long one = Packed<T>::numbers(packed_length(rows, row, 0), call.width) * sizeof(T);
        long heads = larger(1, smaller(call.kv_heads, PACKED_BYTES_MOST / one));
        most = larger(most, one * heads);
    }
    return most;
}

// The positions of its part that a task sees: from ``begin`` on, none if ``end`` is not after it.
struct Seen {
    long begin, end;

    Seen(const Attention &call, const Rows &rows, const DecodeTask &task)
        : begin(larger(task.part * PART, first_visible(rows.ends[task.row] - 1, call.window))),
          end(smaller(rows.ends[task.row], (task.part + 1) * PART)) {}
};

// How many key heads a task takes. Those of a position lie beside each other: a task that takes
// them all reads memory in order. Where few tasks see anything, each takes one, so that every thread
// has work.
static inline long key_heads_of_task(const Attention &call, const Rows &rows,
                                     const AttentionPlan &plan) {
    long num_tasks = 0;
    for (long i = 0; i < plan.num_tasks; i++) {
        const Seen seen(call, rows, plan.tasks[i]);
        num_tasks += seen.begin < seen.end;
    }
    if (num_tasks < TASKS_OF_THREAD * omp_get_num_threads()) return 1;
    const long most = larger(1, smaller(call.kv_heads, QUERIES / (call.heads / call.kv_heads)));
    const long shares = (call.kv_heads + most - 1) / most;
    return (call.kv_heads + shares - 1) / shares;
}

// A part of a decode, for ``key_heads`` from ``first`` on.
template <class T>
static void run_decode(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                       const DecodeTask &task, long first, long key_heads, const float *queries,
                       long ldq, T *out, long ldo, Gathered<T> &has) {
    const long width = call.width, group = call.heads / call.kv_heads;
    const long token = rows.offsets[task.row];
    const Seen seen(call, rows, task);
    for (long h = 0; h < group; h += QUERIES) {
        const long own = smaller(QUERIES, group - h), heads = key_heads * own;
        const long head = first * group + h;
        Partial partials[QUERIES];
        for (long i = 0; i < heads; i++) partials[i] = {-INFINITY, 0.0f};
        if (seen.begin < seen.end)
            attend_part(call, Stream<T>(call, rows, task.row, first, seen.begin, seen.end),
                        key_heads, own, queries + token * ldq + head * width, has, partials);
        if (task.num_parts == 1) {
            for (long i = 0; i < heads; i++)
                join_parts(partials + i, has.out + i * width, 1, 1, width,
                           out + token * ldo + (head + i) * width);
            continue;
        }
        const long place = (task.place + task.part) * call.heads + head;
        memcpy(plan.partials + place, partials, heads * sizeof *partials);
        if (seen.begin < seen.end)
            memcpy(plan.sums_ + place * width, has.out, heads * width * sizeof *has.out);
    }
}

template <class T>
static void attend_decodes(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                           const float *queries, long ldq, T *out, long ldo, Gathered<T> &has) {
    const long most = key_heads_of_task(call, rows, plan);
    const long shares = (call.kv_heads + most - 1) / most;
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < plan.num_tasks * shares; i++) {
        const long first = i % shares * most;
        run_decode(call, rows, plan, plan.tasks[i / shares], first,
                   smaller(most, call.kv_heads - first), queries, ldq, out, ldo, has);
    }
    if (!plan.num_parts) return;
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < plan.num_tasks; i++) {
        const DecodeTask &task = plan.tasks[i];
        if (task.num_parts == 1 || task.part) continue;
        T *to = out + rows.offsets[task.row] * ldo;
        for (long head = 0; head < call.heads; head++)
            join_parts<T>(plan.partials + task.place * call.heads + head,
                          plan.sums_ + (task.place * call.heads + head) * call.width,
                          task.num_parts, call.heads, call.width, to + head * call.width);
    }
}

template <class T>
static void attend_chunk(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                         long row, const float *queries, long ldq, T *out, long ldo,
                         Gathered<T> &has) {
    const long width = call.width, group = call.heads / call.kv_heads;
    const long token = rows.offsets[row], count = rows.offsets[row + 1] - token;
    const long length = packed_length(rows, row, call.window);
    const long origin = first_visible(rows.starts[row], call.window) / PART * PART;
    const long numbers = Packed<T>::numbers(length, width), tiles = length / PANEL;
    const long heads = larger(1, smaller(call.kv_heads,
                                         plan.packed_size / (numbers * (long)sizeof(T))));
    const long blocks = (count + QUERIES - 1) / QUERIES;
    for (long low = 0; low < call.kv_heads; low += heads) {
        const long own = smaller(heads, call.kv_heads - low);
        auto packed = [&](long head) {
            T *keys = (T *)plan.packed + head * numbers;
            return Packed<T>{keys, keys + length * Packed<T>::depth(width), origin,
                             rows.ends[row], length};
        };
#pragma omp for schedule(dynamic, 8)
        for (long i = 0; i < own * tiles; i++) {
            Packed<T> to = packed(i / tiles);
            pack_positions<T>(call, rows, row, low + i / tiles, to, i % tiles);
        }
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < own * group * blocks; i++) {
            // The last blocks see most: they are computed first.
            const long block = blocks - 1 - i / (own * group), head = i % (own * group);
            const long begin = block * QUERIES, at = (token + begin) * ldq;
            const long column = (low * group + head) * width;
            attend_queries<T>(call, packed(head / group), rows.starts[row] + begin,
                              smaller(QUERIES, count - begin), queries + at + column, ldq,
                              out + (token + begin) * ldo + column, ldo, has);
        }
    }
}

// Called by all threads of a region: attention of every row. ``queries`` [num_tokens], ``ldq``
// numbers apart, each [heads][width] float32; ``out`` likewise, ``ldo`` apart.
template <class T>
static void attend(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                   const float *queries, long ldq, T *out, long ldo, Gathered<T> &has) {
    attend_decodes<T>(call, rows, plan, queries, ldq, out, ldo, has);
    for (long row = 0; row < rows.num_rows; row++)
        if (!is_decode(rows, row))
            attend_chunk<T>(call, rows, plan, row, queries, ldq, out, ldo, has);
}

}  // namespace triolet
