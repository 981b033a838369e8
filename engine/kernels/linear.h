// A whole linear layer, computed by all members of a team: its tasks, and their passes over the
// inputs. The products themselves are in matmul.h and small_weights.h; what adapters add to them is
// in adapters.h.
#pragma once

#include "adapters.h"
#include "team.h"

namespace triolet {

// The most rows of a task, and the panels of one with many rows. Codes are unpacked once for all rows of
// a task: with twice as many, the products of Q4_K took 3 % less (measured on Zen 4).
constexpr long ROWS_AT_ONCE = 128, PANELS_MOST = 16;
constexpr long ROWS_OF_CODES = 2 * ROWS_AT_ONCE, PANELS_OF_CODES = PANELS_MOST / 2;
constexpr long ROWS_OF_LONG_TASKS = 4;  // long tasks are a fifth faster; slower from 8 rows on (Zen 3)
constexpr long DEPTH_AT_ONCE = 640;  // inputs of a pass: two panels of so many fit a core's L1
constexpr long SMALL_AT_ONCE = 512;  // inputs of a tile of codes

// A thread's memory: a task's sums, as many as [ROWS_AT_ONCE][PANELS_MOST x 16], and a tile of
// small_weights.h. All threads share ``rounded``, memory for the rows of layers with weights of few bits.
struct Scratch {
    alignas(64) float sums[ROWS_AT_ONCE * PANELS_MOST * PANEL];
    alignas(64) uint8_t tile[4 * SMALL_AT_ONCE * PANEL];
    char *rounded;
};

static inline long padded_rows(long rows) { return (rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD; }

// Calls ``use`` with each part of a layer, or with the layer if it has no parts.
template <class Use>
static inline void each_part(const Linear &linear, Use use) {
    if (!linear.parts) return use(linear);
    for (int64_t i = 0; i < linear.num_parts; i++) use(linear.parts[i]);
}

// A layer's rows, rounded as each of its parts needs them.
struct RoundedRows {
    Rounded of[PARTS_MOST];
    int count;

    // Returns those for ``part``, or null.
    Rounded *find(const Linear &part) {
        for (int i = 0; i < count; i++)
            if (of[i].block == block_of(part) && of[i].added == added_of(part)) return of + i;
        return nullptr;
    }
};

// Divides ``memory`` for the rounded rows of a layer, and returns how many bytes of it they take: 0 if
// its weights are floats.
static inline size_t lay_out_rounded(char *memory, long rows, const Linear &linear,
                                     RoundedRows &to) {
    const char *begin = memory;
    to.count = 0;
    each_part(linear, [&](const Linear &part) {
        if (!part.scales || to.find(part)) return;
        Rounded &own = to.of[to.count++];
        own.depth = small_depth(part.inputs);
        own.block = block_of(part);
        own.added = added_of(part);
        const long blocks = rows * own.blocks();
        own.row_scales = (float *)memory;
        own.totals = own.row_scales + blocks;
        own.starts = (int32_t *)(own.totals + blocks);
        own.numbers = (int8_t *)(own.starts + blocks);
        memory = (char *)(own.numbers + rows * own.depth);
    });
    return memory - begin;
}

// Returns the number of bytes of memory for ``rows`` rounded rows of a layer.
static inline size_t rounded_bytes(long rows, const Linear &linear) {
    RoundedRows unused;
    return lay_out_rounded(nullptr, rows, linear, unused);
}

// Returns whether a layer's weights, or those of its parts, have 8 bits or fewer.
static inline bool has_codes(const Linear &linear) { return linear.scales || linear.parts; }

// Returns how many panels a task has: an even number, because gates and ups alternate. Up to
// ROWS_OF_LONG_TASKS rows have about two tasks for each thread, because they wait for memory, which is
// read faster in long pieces. Small tasks divide more rows evenly among the threads. With many rows, a
// weight that is in the cache should be used often.
static inline long panels_of_task(const Linear &linear, long rows, long panels) {
    if (rows > ROWS_AT_ONCE) return has_codes(linear) ? PANELS_OF_CODES : PANELS_MOST;
    if (rows <= ROWS_OF_LONG_TASKS) {
        const long share = panels / (2 * num_members()) / 2 * 2;
        return share < 2 ? 2 : share > PANELS_MOST ? PANELS_MOST : share;
    }
    return panels >= 512 ? 8 : panels >= 64 ? 4 : 2;
}

// Returns how many inputs one pass takes: ``depth`` in equal parts of at most DEPTH_AT_ONCE.
static inline long even_step(long depth) {
    const long passes = (depth + DEPTH_AT_ONCE - 1) / DEPTH_AT_ONCE;
    return ((depth + passes - 1) / passes + DEPTH_PAD - 1) / DEPTH_PAD * DEPTH_PAD;
}

// Where the sums of a task's panels go: [rows][ld].
struct SumsPlace {
    float *to;
    long ld;

    SumsPlace behind(long panels) const { return {to + panels * PANEL, ld}; }
};

// Computes the sums of a task with weights that are floats.
template <class T>
static void sum_task(const Linear &linear, const T *x, long ldx, long rows, long panel, long panels,
                     SumsPlace sums_) {
    const long depth = padded_depth<T>(linear.inputs), stride = depth * PANEL;
    const long step = rows <= ROW_PAD ? depth : even_step(depth);
    // The threads take tasks in turn, so that a thread's next one is probably so far behind this.
    const long behind = panel + panels * num_members();
    const bool is_last = (behind + 1) * PANEL >= linear.outputs;
    with_weights<T>(linear.weight, linear.kind, [&](auto *weights) {
        const auto *own = weights + panel * stride;
        const auto *next = is_last ? nullptr : weights + behind * stride;
        for (long k = 0; k < depth; k += step)
            multiply(x, ldx, rows, own, stride, panels, k, k + step < depth ? k + step : depth,
                     sums_.to, sums_.ld, k > 0, next);
    });
}

// Calls ``use`` with COUNT, a block's inputs, and whether there are offsets, as constants.
template <int COUNT, class Use>
static void with_tile(const SmallPanels &w, long block, Use use) {
    constexpr std::integral_constant<int, COUNT> count;
    constexpr std::integral_constant<int, 16> short_block;
    constexpr std::integral_constant<int, 32> long_block;
    if (has_offsets(w)) {
        if (block == 16) return use(count, short_block, std::true_type{});
        return use(count, long_block, std::true_type{});
    }
    if (block == 16) return use(count, short_block, std::false_type{});
    use(count, long_block, std::false_type{});
}

// Computes the sums of a task with codes and many rows: makes a tile of as much of a pair of panels as
// fits into a core's L1, multiplies, and goes on. The rows' part that is multiplied stays in its L2.
template <int BITS, bool HAS_TABLE>
static void sum_tiled_task(const SmallPanels &own, const Rounded &x, long row, long rows,
                           long panels, SumsPlace sums_, Scratch &scratch) {
    for (long k = 0; k < x.depth; k += SMALL_AT_ONCE) {
        const long end = x.depth - k < SMALL_AT_ONCE ? x.depth : k + SMALL_AT_ONCE;
        long n = 0;
        auto add = [&](auto count, auto block, auto offsets) {
            typedef Tile<count.value, block.value, offsets.value> Own;
            static_assert(SMALL_AT_ONCE / block.value * Own::BYTES <= (long)sizeof scratch.tile);
            Own::template fill<BITS, HAS_TABLE>(behind(own, n), k, end, scratch.tile);
            Own::template multiply_all<SumOf<BITS, HAS_TABLE>>(
                x, row, rows, scratch.tile, k, end, sums_.to + n * PANEL, sums_.ld, k > 0);
            n += count.value;
        };
        while (panels - n >= SMALL_PANELS) with_tile<SMALL_PANELS>(own, x.block, add);
        if constexpr (SMALL_PANELS > 1)
            if (n < panels) with_tile<1>(own, x.block, add);
    }
}

// Computes the sums of a task with weights of 8 bits or fewer.
static inline void sum_small_task(const Linear &linear, const Rounded &x, long row, long rows,
                                  long panel, long panels, SumsPlace sums_, Scratch &scratch) {
    const SmallPanels own = panels_of(linear, panel);
    with_form(own, [&](auto bits, auto has_table) {
        constexpr int BITS = decltype(bits)::value;
        constexpr bool HAS_TABLE = decltype(has_table)::value;
        constexpr long MOST = BITS == 2 || BITS == 4 ? PACKED_ROWS : LONGER_PACKED_ROWS;
        if constexpr (BITS < 8)
            if (rows > MOST)
                return sum_tiled_task<BITS, HAS_TABLE>(own, x, row, rows, panels, sums_, scratch);
        const long step = rows <= ROW_PAD ? x.depth : even_step(x.depth);
        for (long k = 0; k < x.depth; k += step) {
            SmallPanels from = own;
            from.weight += k * PANEL * BITS / 8;
            multiply_small<BITS, HAS_TABLE, SumOf<BITS, HAS_TABLE>>(
                x, row, rows, from, panels, k, k + step < x.depth ? k + step : x.depth, sums_.to,
                sums_.ld, k > 0);
        }
    });
}

// Computes the sums of a task of one part of a layer.
template <class T>
static void sum_part(const Linear &part, const T *x, long ldx, RoundedRows &rounded, long row,
                     long rows, long panel, long panels, SumsPlace sums_, Scratch &scratch) {
    if (part.scales)
        sum_small_task(part, *rounded.find(part), row, rows, panel, panels, sums_, scratch);
    else
        sum_task(part, x + row * ldx, ldx, rows, panel, panels, sums_);
}

// Computes the sums of a task of a layer, which may have panels of several parts.
template <class T>
static void sum_parts(const Linear &linear, const T *x, long ldx, RoundedRows &rounded,
                      long row, long rows, long panel, long panels, SumsPlace sums_,
                      Scratch &scratch) {
    const long count = linear.num_parts, end = panel + panels;
    auto add = [&](const Linear &part, long first, long number, SumsPlace to) {
        sum_part(part, x, ldx, rounded, row, rows, first, number, to, scratch);
    };
    if (!linear.parts) return add(linear, panel, panels, sums_);
    if (linear.alternates) {
        for (long n = panel; n < end; n++)
            add(linear.parts[n % count], n / count, 1, sums_.behind(n - panel));
        return;
    }
    long first = 0;
    each_part(linear, [&](const Linear &part) {
        const long behind = first + (part.outputs + PANEL - 1) / PANEL;
        const long from = first > panel ? first : panel, to = behind < end ? behind : end;
        if (from < to) add(part, from - first, to - from, sums_.behind(from - panel));
        first = behind;
    });
}

// Adds the layer's bias to sums, if it has one.
static inline void add_bias(const Linear &linear, long rows, long panel, long panels, float *sums_) {
    if (!linear.bias) return;
    for (long m = 0; m < rows; m++)
        for (long n = 0; n < panels; n++) {
            float *at = sums_ + (m * panels + n) * PANEL;
            store(at, load(at) + load(linear.bias + (panel + n) * PANEL));
        }
}

// Called by all members of a team. Computes the shrunk rows of all adapters.
template <class T>
static void shrink(const Adaptation<T> &with, const T *x, long ldx, Scratch &scratch) {
    constexpr long PAIR = 2;
    auto tasks_of = [&](long group) {
        const long panels = (with.adapted(group).shrink.outputs + PANEL - 1) / PANEL;
        const long parts = (with.count(group) + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        return (panels + PAIR - 1) / PAIR * parts;
    };
    long total = 0;
    for (long group = 0; group < with.num_groups; group++) total += tasks_of(group);
    share_tasks(total, 1, [&](long task) {
        long group = 0, own = task;
        for (; own >= tasks_of(group); group++) own -= tasks_of(group);
        const Adapted &adapted = with.adapted(group);
        const long all = (adapted.shrink.outputs + PANEL - 1) / PANEL;
        const long parts = (with.count(group) + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        const long panel = own / parts * PAIR, part = own % parts * ROWS_AT_ONCE;
        const long panels = all - panel < PAIR ? all - panel : PAIR;
        const long left = with.count(group) - part;
        const long rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        const long row = with.first(group) + part;
        sum_task(adapted.shrink, x + row * ldx, ldx, rows, panel, panels,
                 {scratch.sums, panels * PANEL});
        for (long m = 0; m < rows; m++)
            for (long n = 0; n < panels; n++) {
                const v16 scale = load(adapted.scales + (panel + n) * PANEL);
                store(with.shrunk + (row + m) * with.width + (panel + n) * PANEL,
                      load(scratch.sums + (m * panels + n) * PANEL) * scale);
            }
    });
}

// Called by all members of a team. Rounds the rows for a layer with weights of 8 bits or fewer;
// another layer takes its rows as they are.
template <class T>
static RoundedRows round_all(const Linear &linear, const T *x, long ldx, long rows,
                             Scratch &scratch) {
    RoundedRows rounded;
    lay_out_rounded(scratch.rounded, rows, linear, rounded);
    long total = 0;
    for (int i = 0; i < rounded.count; i++) total += rows * rounded.of[i].blocks();
    if (total)
        share_evenly(total, [&](long block) {
            const Rounded *to = rounded.of;
            for (; block >= rows * to->blocks(); to++) block -= rows * to->blocks();
            round_block_of(x, ldx, linear.inputs, block, *to);
        });
    return rounded;
}

// How a layer's panels are divided: tasks with ``group`` panels each, ``groups`` in all. A task has at
// most ``rows`` rows, whose sums fit its memory.
struct Panels {
    long count, group, groups, rows;

    struct Part {
        long first, count, rows;
    };

    Panels(const Linear &linear, long all_rows)
        : count((linear.outputs + PANEL - 1) / PANEL), group(panels_of_task(linear, all_rows, count)),
          groups((count + group - 1) / group),
          rows(has_codes(linear) && group <= PANELS_OF_CODES ? ROWS_OF_CODES : ROWS_AT_ONCE) {}

    Part of(long index) const {
        const long first = index * group;
        return {first, count - first < group ? count - first : group, rows};
    }
};

// Computes a task: outputs of at most ``panels.rows`` rows from ``row`` on, all before ``end``. Passes
// them on as ``take(first row, rows, first panel, panels, sums)``, with sums [rows][panels x 16].
// ``with`` are the adapters of rows, which are shrunk, or null.
template <class T, class Take>
static void run_task(const Linear &linear, const T *x, long ldx, RoundedRows &rounded,
                     long row, long end, Panels::Part panels, Scratch &scratch, Take take,
                     const Adaptation<T> *with = nullptr) {
    const long rows = end - row < panels.rows ? end - row : panels.rows;
    sum_parts(linear, x, ldx, rounded, row, rows, panels.first, panels.count,
              {scratch.sums, panels.count * PANEL}, scratch);
    add_bias(linear, rows, panels.first, panels.count, scratch.sums);
    if (with) expand(*with, row, rows, panels.first, panels.count, scratch.sums);
    take(row, rows, panels.first, panels.count, scratch.sums);
}

// Called by all members. Computes every output of ``rows`` rows, and passes them on as `run_task`
// does. ``with`` are the adapters of rows, or null.
template <class T, class Take>
static void linear(const Linear &linear, const T *x, long ldx, long rows, Scratch &scratch,
                   Take take, const Adaptation<T> *with = nullptr) {
    if (with) shrink(*with, x, ldx, scratch);
    RoundedRows rounded = round_all(linear, x, ldx, rows, scratch);
    const Panels panels(linear, rows);
    const long parts = (rows + panels.rows - 1) / panels.rows;
    share_tasks(panels.groups * parts, 1, [&](long task) {
        run_task(linear, x, ldx, rounded, task % parts * panels.rows, rows,
                 panels.of(task / parts), scratch, take, with);
    });
}

}  // namespace triolet
