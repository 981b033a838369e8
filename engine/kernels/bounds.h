// Whether the indices of a step are inside what they point into.
//
// Rule 1: a step is looked at before anything of it is computed; one with an index outside its bounds
// is refused whole. A token's id is the exception, as a client may have sent it: `embed` makes the
// row's numbers NaN, so that the row fails alone. Rule 2: what the program makes of a request and what
// it makes of a checkpoint is checked where it is made (`engine.core.common.vocabulary`,
// `engine.worker.load`); this is the last look before memory is read.
//
// The indices, and where those are checked that no step brings:
//   ids                    `embed` in decoder.h
//   offsets, ends, tables, slots, untils       `rows_fit`
//   keep, image_tokens, groups                 `step_fits` in decoder.h
//   owners, offsets and sources of states      `states_fit` in short_convolution.h
//   experts of a row       chosen by `choose` in experts.h from as many as there are, of which
//                          `engine.worker.forward.decoder` refuses to choose more
//   codes of 4 bits        16 values, and tables of 16 numbers (small_weights.h)
//   products of an adapter, layers, kinds of rotary embedding      made with the model, as many as
//                          it has, by `engine.worker.forward.adapters` and `...decoder`
//   the token of a draw    found in the row itself by `engine.worker.sampling.draw_rows`
#pragma once

#include "paged_cache.h"

namespace triolet {

enum Status { DONE = 0, NO_MEMORY = 1, SUM_FAILED = 2, OUT_OF_BOUNDS = 3 };

static inline bool is_inside(int64_t index, int64_t count) {
    return (uint64_t)index < (uint64_t)count;
}

static inline bool all_inside(const int64_t *indices, long number, int64_t count) {
    bool found = true;
    for (long i = 0; i < number; i++) found &= is_inside(indices[i], count);
    return found;
}

// Returns whether ``number`` items from ``first`` on are among ``count``.
static inline bool spans_fit(int64_t first, int64_t number, int64_t count) {
    return first >= 0 && number >= 0 && number <= count && first <= count - number;
}

// Returns whether ``offsets`` [number + 1] divide ``count`` tokens into parts, none of them empty.
static inline bool offsets_fit(const int64_t *offsets, long number, int64_t count) {
    if (offsets[0] != 0 || offsets[number] != count) return false;
    for (long i = 0; i < number; i++)
        if (offsets[i] >= offsets[i + 1]) return false;
    return true;
}

// Returns whether each row reads and writes blocks of the cache alone.
static inline bool rows_fit(const Rows &rows) {
    if (!offsets_fit(rows.offsets, rows.num_rows, rows.num_tokens)) return false;
    if (!all_inside(rows.slots, rows.num_tokens, rows.num_blocks * rows.block_size)) return false;
    for (long row = 0; row < rows.num_rows; row++) {
        const int64_t start = rows.starts[row], end = rows.ends[row];
        if (start < 0 || start >= end || end > rows.table_width * rows.block_size) return false;
        const long used = (end + rows.block_size - 1) / rows.block_size;
        if (!all_inside(rows.tables + row * rows.table_width, used, rows.num_blocks)) return false;
        for (long token = rows.offsets[row]; token < rows.offsets[row + 1]; token++)
            if (rows.untils[token] < 1 || rows.untils[token] > end) return false;
    }
    return true;
}

}  // namespace triolet
