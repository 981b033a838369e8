// Attention over the paged cache, reading its blocks in place.
//
// A row of one token (a decode) walks its keys once, in parts of PART positions; the parts of a
// long context are computed by different threads and joined in order. A row of several tokens (a
// prompt's chunk) packs its keys and values as matmul.h's panels and multiplies with them.
//
// Rule 1: parts begin at multiples of PART of the position, whatever the batch, so that a row's
// result does not depend on what is beside it.
// Rule 2: no slot that the sequence has not written is multiplied: a stale NaN times 0 is a NaN.
#pragma once

#include "matmul.h"

namespace triolet {

constexpr long PART = 512;      // positions of a part
constexpr long AHEAD = 32;      // a decode asks for keys and values so many positions ahead
constexpr long QUERIES = 32;    // queries of a block, of a prompt's chunk
constexpr long HEADS_MOST = 8;  // query heads that share loaded keys
constexpr long WIDTH_MOST = 256;
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

// --- decodes ------------------------------------------------------------------------------------

// The joined result of some keys for one head: values weighted by e^(score - best).
struct Partial {
    float best, total;
};

// Asks for ``width`` numbers that lie where no hardware would look for them: a decode's keys and
// values are a few lines of each slot, and it mostly waited for the first of them.
template <class T>
static inline void fetch(const T *from, long width) {
    const char *end = (const char *)(from + width);
    for (const char *line = (const char *)from; line < end; line += 64) __builtin_prefetch(line);
}

template <class T>
static void score_keys(const Attention &call, const T *const *keys, long count, const float *query,
                       long heads, long width, float *scores, long ld) {
    v16 acc[LANES];
    alignas(64) float wide[LANES][WIDTH_MOST];
    for (long j = 0; j < LANES; j++) {
        const T *key = keys[smaller(j, count - 1)];
        for (long d = 0; d < width; d += LANES) store(&wide[j][d], load(key + d));
    }
    for (long head = 0; head < heads; head++) {
        const float *own = query + head * width;
        for (long j = 0; j < LANES; j++) {
            v16 total = load(own) * load(&wide[j][0]);
            for (long d = LANES; d < width; d += LANES) total += load(own + d) * load(&wide[j][d]);
            acc[j] = total;
        }
        store(scores + head * ld, shape_scores(call, sums(acc)));
    }
}

// Turns scores [count] into weights in place; padded ones (to a multiple of 16) become 0.
static Partial weigh(float *scores, long count) {
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
        store(scores + j, weight);
        total += weight;
    }
    return {top, sum(total)};
}

template <class T, int HEADS, int VECTORS>
static void add_values(const T *const *values, long count, const float *weights, long ld,
                       float *out, long width) {
    v16 acc[HEADS][VECTORS];
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < VECTORS; c++) acc[h][c] = load(out + h * width + c * LANES);
    for (long j = 0; j < count; j++) {
        v16 own[VECTORS];
        if (j + AHEAD < count) fetch(values[j + AHEAD], VECTORS * LANES);
        for (int c = 0; c < VECTORS; c++) own[c] = load(values[j] + c * LANES);
        for (int h = 0; h < HEADS; h++)
            for (int c = 0; c < VECTORS; c++) acc[h][c] += own[c] * weights[h * ld + j];
    }
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < VECTORS; c++) store(out + h * width + c * LANES, acc[h][c]);
}

template <class T, int VECTORS>
static void add_values_of(const T *const *values, long count, const float *weights, long ld,
                          float *out, long width, long heads) {
    long h = 0;
    for (; heads - h >= 4; h += 4)
        add_values<T, 4, VECTORS>(values, count, weights + h * ld, ld, out + h * width, width);
    for (; heads - h >= 2; h += 2)
        add_values<T, 2, VECTORS>(values, count, weights + h * ld, ld, out + h * width, width);
    for (; heads - h >= 1; h++)
        add_values<T, 1, VECTORS>(values, count, weights + h * ld, ld, out + h * width, width);
}

// One query's heads of one key head over positions begin … end - 1 (at most PART): ``out``
// [heads][width] float32, not yet divided by the totals.
template <class T>
static void attend_part(const Attention &call, const Rows &rows, long row, long kv_head,
                        long begin, long end, const float *query, long heads, float *out,
                        Partial *partials) {
    const long width = call.width, count = end - begin;
    const T *keys[PART], *values[PART];
    alignas(64) float scores[HEADS_MOST][PART];
    for (long j = 0; j < count; j++) {
        keys[j] = at_position<T>(call.keys, call, rows, row, begin + j) + kv_head * width;
        values[j] = at_position<T>(call.values, call, rows, row, begin + j) + kv_head * width;
    }
    for (long j = 0; j < smaller(AHEAD, count); j++) fetch(keys[j], width);
    for (long j = 0; j < count; j += LANES) {
        for (long i = j + AHEAD; i < smaller(j + AHEAD + LANES, count); i++) fetch(keys[i], width);
        score_keys<T>(call, keys + j, smaller(LANES, count - j), query, heads, width,
                      &scores[0][j], PART);
    }
    for (long j = 0; j < smaller(AHEAD, count); j++) fetch(values[j], width);
    for (long h = 0; h < heads; h++) partials[h] = weigh(scores[h], count);
    memset(out, 0, heads * width * sizeof *out);
    long d = 0;
    for (; width - d >= 4 * LANES; d += 4 * LANES) {
        add_values_of<T, 4>(values, count, scores[0], PART, out + d, width, heads);
        for (long j = 0; j < count; j++) values[j] += 4 * LANES;
    }
    for (; width - d >= LANES; d += LANES) {
        add_values_of<T, 1>(values, count, scores[0], PART, out + d, width, heads);
        for (long j = 0; j < count; j++) values[j] += LANES;
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
        u16v even = __builtin_convertvector(load_as<h16>(first + d), u16v);
        u16v odd = __builtin_convertvector(load_as<h16>(second + d), u16v);
        u16v pairs = even | odd << 16;
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

// What a block of queries of one head has gathered so far.
template <class T>
struct Gathered {
    alignas(64) T query[QUERIES * WIDTH_MOST];
    alignas(64) float scores[QUERIES * PART];
    alignas(64) T weights[QUERIES * PART];
    alignas(64) float out[QUERIES * WIDTH_MOST];
    float best[QUERIES], total[QUERIES];
};

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

template <class T>
static void run_decode(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                       const DecodeTask &task, long kv_head, const float *queries, long ldq,
                       T *out, long ldo) {
    const long width = call.width, group = call.heads / call.kv_heads;
    const long token = rows.offsets[task.row], end = rows.ends[task.row];
    const long from = larger(task.part * PART, first_visible(end - 1, call.window));
    const long to = smaller(end, (task.part + 1) * PART);
    for (long h = 0; h < group; h += HEADS_MOST) {
        const long head = kv_head * group + h, own = smaller(HEADS_MOST, group - h);
        alignas(64) float sums_[HEADS_MOST * WIDTH_MOST];
        Partial partials[HEADS_MOST];
        for (long i = 0; i < own; i++) partials[i] = {-INFINITY, 0.0f};
        if (from < to)
            attend_part<T>(call, rows, task.row, kv_head, from, to,
                           queries + token * ldq + head * width, own, sums_, partials);
        if (task.num_parts == 1) {
            for (long i = 0; i < own; i++)
                join_parts<T>(partials + i, sums_ + i * width, 1, 1, width,
                              out + token * ldo + (head + i) * width);
            continue;
        }
        const long place = task.place + task.part;
        memcpy(plan.partials + place * call.heads + head, partials, own * sizeof *partials);
        if (from < to)
            memcpy(plan.sums_ + (place * call.heads + head) * width, sums_,
                   own * width * sizeof *sums_);
    }
}

template <class T>
static void attend_decodes(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                           const float *queries, long ldq, T *out, long ldo) {
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < plan.num_tasks * call.kv_heads; i++)
        run_decode<T>(call, rows, plan, plan.tasks[i / call.kv_heads], i % call.kv_heads, queries,
                      ldq, out, ldo);
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
    attend_decodes<T>(call, rows, plan, queries, ldq, out, ldo);
    for (long row = 0; row < rows.num_rows; row++)
        if (!is_decode(rows, row))
            attend_chunk<T>(call, rows, plan, row, queries, ldq, out, ldo, has);
}

}  // namespace triolet
