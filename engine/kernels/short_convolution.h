// The short convolutions of LFM2, which some layers have in place of attention.
//
// A layer's first product gives each token two gates and an input, [3][hidden]. The input, times the
// first gate, is convolved with those of the tokens before it, and the second gate lets a part of
// the sum through. Rule: a gated input is rounded to the model's dtype before it is convolved, since
// the states of sequences keep it so. Otherwise a token's result would depend on how its prompt was
// cut into chunks.
#pragma once

#include <cstdint>

#include "bounds.h"
#include "team.h"

namespace triolet {

// Mirrored by `engine.worker.forward.kernel_structs.Convolution`.
// A layer without one has a length of 0.
struct Convolution {
    const float *weight;   // [length][hidden]
    const float *bias;     // [hidden], or null
    const void *states;    // [slots][length][hidden], the last gated inputs of sequences
    int64_t length, place;  // place: its index among the model's convolutions
};

// Mirrored by `engine.worker.forward.kernel_structs.StateRows`.
// A step's rows for the convolutions: each row's tokens, and the state that it begins from.
struct StateRows {
    const int64_t *owners;   // [num_tokens] the row of each token
    const int64_t *offsets;  // [count + 1] into the tokens
    const int64_t *sources;  // [count] the slot of the state that a row begins from; -1: none
    void *results;           // [convolutions][count][length][hidden]
    int64_t count, slots;    // slots: how many states there are
};

// Returns whether rows divide a step's tokens and begin from states that there are.
static inline bool states_fit(const StateRows &rows, long num_tokens) {
    if (!offsets_fit(rows.offsets, rows.count, num_tokens)) return false;
    for (long row = 0; row < rows.count; row++) {
        if (rows.sources[row] < -1 || rows.sources[row] >= rows.slots) return false;
        for (long token = rows.offsets[row]; token < rows.offsets[row + 1]; token++)
            if (rows.owners[token] != row) return false;
    }
    return true;
}

// Computes one layer for all tokens: from ``products`` [num_tokens][3][hidden] to ``to``
// [num_tokens][depth], and the state behind each row. All members of a team call this.
template <class T>
static void convolve(const Convolution &own, const StateRows &rows, long num_tokens, long hidden,
                     float *products, T *to, long depth) {
    const long length = own.length, size = length * hidden;
    share_evenly(num_tokens, [&](long token) {
        float *gate = products + token * 3 * hidden, *input = gate + 2 * hidden;
        T rounded[LANES];
        for (long d = 0; d < hidden; d += LANES) {
            store(rounded, load(gate + d) * load(input + d));
            store(input + d, load(rounded));
        }
    });
    auto state_of = [&](long row) {
        const long slot = rows.sources[row];
        return slot < 0 ? nullptr : (const T *)own.states + slot * size;
    };
    share_evenly(num_tokens, [&](long token) {
        const long row = rows.owners[token], within = token - rows.offsets[row];
        const T *state = state_of(row);
        const float *gate = products + token * 3 * hidden + hidden;
        for (long d = 0; d < hidden; d += LANES) {
            v16 sum = own.bias ? load(own.bias + d) : splat(0.0f);
            for (long tap = 0; tap < length; tap++) {
                const long at = within - (length - 1 - tap);  // in the row; before it if negative
                if (at < 0 && !state) continue;
                const v16 input = at < 0 ? load(state + (length + at) * hidden + d)
                                         : load(gate + hidden + d - (within - at) * 3 * hidden);
                sum += load(own.weight + tap * hidden + d) * input;
            }
            store(to + token * depth + d, load(gate + d) * sum);
        }
    });
    share_evenly(rows.count * length, [&](long i) {
        const long row = i / length, count = rows.offsets[row + 1] - rows.offsets[row];
        const long at = count - length + i % length;  // in the row; before it if negative
        T *result = (T *)rows.results + (own.place * rows.count + row) * size + i % length * hidden;
        const T *state = state_of(row);
        const float *input = products + ((rows.offsets[row] + at) * 3 + 2) * hidden;
        for (long d = 0; d < hidden; d += LANES)
            store(result + d, at >= 0 ? load(input + d)
                              : state ? load(state + (length + at) * hidden + d)
                                      : splat(0.0f));
    });
}

}  // namespace triolet
