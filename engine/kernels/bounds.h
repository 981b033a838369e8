// Whether the indices of a step are inside what they point into.
//
// Rule 1: a step is looked at before anything of it is computed; one with an index outside its bounds
// is refused whole. A token's id is the exception, as a client may have sent it: `embed` makes the
// row's numbers NaN, so that the row fails alone. Rule 2: what the program makes of a request and what
// it makes of a checkpoint is checked where it is made (`engine.core.common.vocabulary`,
// `engine.worker.load`); this is the last look before memory is read.
//
// The indices, and where each is looked at. tests/conformance/test_kernel_bounds.py has a test of
// each, and test_request_indices.py sends those that requests bring.
//   token ids                                    `embed` in decoder.h
//   starts, ends, offsets, blocks, slots of rows, and the positions that tokens attend to  `rows_fit`
//   kept tokens, images' tokens, tokens of adapters              `step_fits` in decoder.h
//   rows, offsets and slots of states            `states_fit` in short_convolution.h
//   experts of a token      chosen here, of no fewer than a token has (`_pack_experts` in decoder.py)
//   codes of 4 bits         16, of a table of 16; scales: as many as groups (`QuantizedWeight.in_halves`)
//   rotated dimensions of a head                 no more than it has (`_check_rotaries` in decoder.py)
//   windows, heads that share keys               `paged_attention` in attention.py
//   products of adapters, kinds of rotary embeddings, layers     made with the model, as many as it has
//   tokens of a draw                             found in the row itself (draw_rows.py)
// What torch and numpy index (bias, bans, penalties, log-probabilities, positions, padding, types of
// tokens) they look at themselves; an id is of the vocabulary by then.
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
