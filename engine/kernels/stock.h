// Single parts for models that run as stock modules: one layer's attention, and one linear layer.
#pragma once

#include "decoder.h"

namespace triolet {

// The memory of one layer's attention.
struct AttentionMemory {
    AttentionPlan plan;
    float *queries;  // [num_tokens][heads x width]
    Gathered *gathered;  // [num_threads]

    void lay_out(Allotment &from, const Attention &call, const Rows &rows, long num_threads) {
        lay_out_plan(from, call, rows, plan);
        queries = from.take<float>(rows.num_tokens * call.heads * call.width);
        gathered = from.take<Gathered>(num_threads);
    }
};

// Each tensor is [num_tokens][heads][width]. Returns a `Status`.
template <class T>
static int run_attention(const Attention &call, const Rows &rows, const T *query, const T *key,
                         const T *value, T *out, long num_threads, Arena &arena) {
    if (!rows_fit(rows)) return OUT_OF_BOUNDS;
    AttentionMemory has;
    Allotment needed{nullptr}, given{nullptr};
    has.lay_out(needed, call, rows, num_threads);
    if (!arena.reserve(needed.used)) return NO_MEMORY;
    given.memory = arena.memory;
    has.lay_out(given, call, rows, num_threads);
    list_decodes(rows, has.plan);
    const long own = call.heads * call.width, kept = call.kv_heads * call.width;
    Team::run((int)num_threads, [&] {
        Gathered &gathered = has.gathered[member_index()];
        share_evenly(rows.num_tokens, [&](long token) {
            for (long d = 0; d < own; d += LANES)
                store(has.queries + token * own + d, load(query + token * own + d));
            write_token(call, rows, token, key + token * kept, value + token * kept);
        });
        attend(call, rows, has.plan, has.queries, own, {out, own}, gathered);
    });
    return DONE;
}

// Computes out[rows][outputs] of x[rows][inputs]. Returns a `Status`.
template <class T>
static int run_linear(const Linear &layer, const T *x, long rows, T *out, long num_threads,
                      Arena &arena) {
    const long depth = padded_depth<T>(layer.inputs), padded = padded_rows(rows);
    const size_t size = padded * depth * sizeof(T);
    const size_t scratch_size = sizeof(Scratch) * num_threads;
    const size_t rounded_size = rounded_bytes(rows, layer);
    if (!arena.reserve(size + scratch_size + rounded_size)) return NO_MEMORY;
    Scratch *scratch = (Scratch *)arena.memory;
    T *own = (T *)(arena.memory + scratch_size);
    Team::run((int)num_threads, [&] {
        Scratch &own_scratch = scratch[member_index()];
        own_scratch.rounded = arena.memory + scratch_size + size;
        share_evenly(rows, [&](long m) {
            memcpy(own + m * depth, x + m * layer.inputs, layer.inputs * sizeof(T));
            memset(own + m * depth + layer.inputs, 0, (depth - layer.inputs) * sizeof(T));
        });
        linear(layer, own, depth, rows, own_scratch,
               [&](long row, long count, long panel, long panels, const float *sums_) {
                   each_vector(sums_, count, panels, [&](long m, long n, v16 value) {
                       const long column = (panel + n) * PANEL;
                       T *to = out + (row + m) * layer.outputs + column;
                       if (layer.outputs - column >= PANEL) {
                           store(to, value);
                           return;
                       }
                       for (long i = 0; i < layer.outputs - column; i++) store_one(to + i, value[i]);
                   });
               });
    });
    return DONE;
}

}  // namespace triolet
