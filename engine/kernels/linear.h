// A whole linear layer, computed by all members of a team: its tasks, and their passes over the
// inputs. The products themselves are in matmul.h and small_weights.h; what adapters add to them is
// in adapters.h.
#pragma once

#include "adapters.h"

namespace triolet {

constexpr long ROWS_AT_ONCE = 128, PANELS_MOST = 16;
constexpr long ROWS_OF_LONG_TASKS = 4;  // long tasks are a fifth faster; slower from 8 rows on (Zen 3)
constexpr long DEPTH_AT_ONCE = 640;  // inputs of a pass: two panels of so many fit a core's L1
constexpr long SMALL_AT_ONCE = 512;  // inputs of weights of 4 bits that are unpacked at once

// A thread's memory: a task's sums, [ROWS_AT_ONCE][PANELS_MOST x 16], and an unpacked pair of
// panels. All threads share ``rounded``, memory for the rows of layers with weights of 8 or 4 bits.
struct Scratch {
    alignas(64) float sums[ROWS_AT_ONCE * PANELS_MOST * PANEL];
    alignas(64) uint8_t unpacked[2 * SMALL_AT_ONCE * PANEL];
    char *rounded;
};

static inline long padded_rows(long rows) { return (rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD; }

// Returns the number of bytes of memory for ``rows`` rounded rows of at most ``inputs`` numbers.
static inline size_t rounded_bytes(long rows, long inputs) {
    const size_t depth = (size_t)small_depth(inputs), per_block = 3 * sizeof(float);
    return rows * (depth + depth / FINEST_BLOCK * per_block);
}

// Divides ``memory`` of `rounded_bytes` for one layer.
static inline Rounded rounded_in(char *memory, long rows, const Linear &linear) {
    Rounded to;
    to.depth = small_depth(linear.inputs);
    to.block = block_of(linear);
    to.row_scales = (float *)memory;
    to.totals = to.row_scales + rows * to.blocks();
    to.sums_ = (int32_t *)(to.totals + rows * to.blocks());
    to.numbers = (int8_t *)(to.sums_ + rows * to.blocks());
    return to;
}

// Returns how many panels a task has: an even number, because gates and ups alternate. Up to
// ROWS_OF_LONG_TASKS rows have about two tasks for each thread, because they wait for memory, which is
// read faster in long pieces. Small tasks divide more rows evenly among the threads. With many rows, a
// weight that is in the cache should be used often.
static inline long panels_of_task(long rows, long panels) {
    if (rows > ROWS_AT_ONCE) return PANELS_MOST;
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

// Computes the sums of a task.
template <class T>
static void sum_task(const Linear &linear, const T *x, long ldx, long rows, long panel, long panels,
                     Scratch &scratch) {
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
                     scratch.sums, panels * PANEL, k > 0, next);
    });
}

// Computes the sums of a task with weights of 4 bits and many rows: unpacks as much of a pair of
// panels as fits into a core's L1, multiplies, and goes on.
static inline void sum_unpacked_task(const SmallPanels &own, const Rounded &x, long row, long rows,
                                     long panels, Scratch &scratch) {
    constexpr long STRIDE = SMALL_AT_ONCE * PANEL;
    for (long n = 0; n < panels; n += 2) {
        const long pair = panels - n < 2 ? 1 : 2;
        SmallPanels wide = behind(own, n);
        wide.weight = scratch.unpacked;
        wide.stride = STRIDE;
        for (long k = 0; k < x.depth; k += SMALL_AT_ONCE) {
            const long count = x.depth - k < SMALL_AT_ONCE ? x.depth - k : SMALL_AT_ONCE;
            for (long i = 0; i < pair; i++)
                (own.is_centred ? unpack<true> : unpack<false>)(
                    own.weight + (n + i) * own.stride + k * PANEL / 2, own.table, count,
                    scratch.unpacked + i * STRIDE);
            multiply_small<8>(x, row, rows, wide, pair, k, k + count, scratch.sums + n * PANEL,
                              panels * PANEL, k > 0);
        }
    }
}

// Computes the sums of a task with weights of 8 or 4 bits.
static inline void sum_small_task(const Linear &linear, const Rounded &x, long row, long rows,
                                  long panel, long panels, Scratch &scratch) {
    const SmallPanels own = panels_of(linear, panel);
    if (linear.table && rows > PACKED_ROWS) {
        sum_unpacked_task(own, x, row, rows, panels, scratch);
        return;
    }
    const long step = rows <= ROW_PAD ? x.depth : even_step(x.depth);
    for (long k = 0; k < x.depth; k += step) {
        SmallPanels from = own;
        from.weight += linear.table ? k * PANEL / 2 : k * PANEL;
        (linear.table ? multiply_small<4> : multiply_small<8>)(
            x, row, rows, from, panels, k, k + step < x.depth ? k + step : x.depth, scratch.sums,
            panels * PANEL, k > 0);
    }
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
        sum_task(adapted.shrink, x + row * ldx, ldx, rows, panel, panels, scratch);
        for (long m = 0; m < rows; m++)
            for (long n = 0; n < panels; n++) {
                const v16 scale = load(adapted.scales + (panel + n) * PANEL);
                store(with.shrunk + (row + m) * with.width + (panel + n) * PANEL,
                      load(scratch.sums + (m * panels + n) * PANEL) * scale);
            }
    });
}

// Called by all members of a team. Rounds the rows for a layer with weights of 8 or 4 bits;
// another layer takes its rows as they are.
template <class T>
static Rounded round_all(const Linear &linear, const T *x, long ldx, long rows, Scratch &scratch) {
    if (!linear.scales) return Rounded{};
    const Rounded rounded = rounded_in(scratch.rounded, rows, linear);
    round_rows(x, ldx, rows, linear.inputs, rounded);
    return rounded;
}

// How a layer's panels are divided: tasks with ``group`` panels each, ``groups`` in all.
struct Panels {
    long count, group, groups;

    struct Part {
        long first, count;
    };

    Panels(const Linear &linear, long rows)
        : count((linear.outputs + PANEL - 1) / PANEL), group(panels_of_task(rows, count)),
          groups((count + group - 1) / group) {}

    Part of(long index) const {
        const long first = index * group;
        return {first, count - first < group ? count - first : group};
    }
};

// Computes a task: outputs of at most ROWS_AT_ONCE rows from ``row`` on, all before ``end``. Passes
// them on as ``take(first row, rows, first panel, panels, sums)``, with sums [rows][panels x 16].
// ``with`` are the adapters of rows, which are shrunk, or null.
template <class T, class Take>
static void run_task(const Linear &linear, const T *x, long ldx, const Rounded &rounded, long row,
                     long end, Panels::Part panels, Scratch &scratch, Take take,
                     const Adaptation<T> *with = nullptr) {
    const long rows = end - row < ROWS_AT_ONCE ? end - row : ROWS_AT_ONCE;
    if (linear.scales)
        sum_small_task(linear, rounded, row, rows, panels.first, panels.count, scratch);
    else
        sum_task(linear, x + row * ldx, ldx, rows, panels.first, panels.count, scratch);
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
    const Rounded rounded = round_all(linear, x, ldx, rows, scratch);
    const Panels panels(linear, rows);
    const long parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    share_tasks(panels.groups * parts, 1, [&](long task) {
        run_task(linear, x, ldx, rounded, task % parts * ROWS_AT_ONCE, rows,
                 panels.of(task / parts), scratch, take, with);
    });
}

}  // namespace triolet
