// Low-rank adapters (LoRA) of linear layers: for the rows of an adapter, a layer's product grows by
// scale · B · A · input. First all rows are shrunk by A to ``rank`` numbers (`shrink` in linear.h),
// then each task of the layer expands them by B and adds that to its sums, while these are in the
// core's cache.
//
// Rule 1: ranks are as stored. B's panels are as in matmul.h, but their depth is the rank, in
// bfloat16 padded to a pair. Rule 2: a step without adapters runs nothing of this.
#pragma once

#include "small_weights.h"

namespace triolet {

constexpr int PARTS_MOST = 3;  // queries, keys and values are one product

// Mirrored by `engine.worker.forward.kernel_structs.Expansion`.
// One adapted part of a packed product: the panels ``first``, ``first + step``, …, of which there
// are ``panels``. It reads ``depth`` shrunk numbers from ``offset`` on. Without ``weight``, the
// adapter leaves the part as it is.
struct Expansion {
    const void *weight;
    int64_t first, step, panels, depth, offset;
};

// Mirrored by `engine.worker.forward.kernel_structs.Adapted`.
// What an adapter adds to one packed product. ``shrink`` has the A of all parts below one another;
// its ``outputs`` is 0 if there is none. ``scales`` has a number for each lane of its panels.
struct Adapted {
    Linear shrink;
    const float *scales;
    Expansion parts[PARTS_MOST];
};

// Mirrored by `engine.worker.forward.kernel_structs.Group`.
// The tokens of a step that have one adapter, which follow one another; and, among the tokens whose
// logits are computed, those of them. ``products`` are [num_layers x 4 + 1]: of each layer qkv, output, gate_up and down; then the head.
struct Group {
    int64_t first, count, kept_first, kept_count;
    const Adapted *products;
};

constexpr long PRODUCTS_OF_LAYER = 4;

// The adapters of one product in one step. ``shrunk`` is [rows][width].
template <class T>
struct Adaptation {
    const Group *groups;
    long num_groups, product;
    bool is_kept;  // the rows are those whose logits are computed
    T *shrunk;
    long width;

    const Adapted &adapted(long group) const { return groups[group].products[product]; }
    long first(long group) const {
        return is_kept ? groups[group].kept_first : groups[group].first;
    }
    long count(long group) const {
        return is_kept ? groups[group].kept_count : groups[group].count;
    }
};

// Adds ``rows`` shrunk rows, expanded by ``part``, to the sums of a task's panels.
template <class T>
static inline void expand_part(const Expansion &part, const T *x, long ldx, long rows, long panel,
                               long panels, float *sums_, long ldo) {
    if (!part.weight) return;
    const long stride = part.depth * PANEL;
    long own = panel <= part.first ? 0 : (panel - part.first + part.step - 1) / part.step;
    while (own < part.panels) {
        const long place = part.first + own * part.step - panel;
        if (place >= panels) return;
        // Panels that follow one another are added together.
        long count = part.step == 1 ? panels - place : 1;
        if (count > part.panels - own) count = part.panels - own;
        vector_block(x + part.offset, ldx, rows, (const T *)part.weight + own * stride, stride,
                     count, 0, part.depth, sums_ + place * PANEL, ldo, true, (const T *)nullptr);
        own += count;
    }
}

// Adds the adapters' products to the sums of a task, [rows][panels x 16].
template <class T>
static inline void expand(const Adaptation<T> &with, long row, long rows, long panel, long panels,
                          float *sums_) {
    for (long group = 0; group < with.num_groups; group++) {
        const Adapted &own = with.adapted(group);
        if (!own.shrink.outputs) continue;
        long begin = with.first(group), end = begin + with.count(group);
        if (begin < row) begin = row;
        if (end > row + rows) end = row + rows;
        if (begin >= end) continue;
        for (const Expansion &part : own.parts)
            expand_part(part, with.shrunk + begin * with.width, with.width, end - begin, panel,
                        panels, sums_ + (begin - row) * panels * PANEL, panels * PANEL);
    }
}

}  // namespace triolet
