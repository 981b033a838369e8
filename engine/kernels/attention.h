// Attention of a whole step over the paged cache, whose blocks are read in place: the decodes of
// attention_decode.h and the prompts' chunks of attention_prefill.h, shared out among threads.
//
// Rule 1: parts begin at multiples of PART of the position, whatever the batch, so that a row's
// result does not depend on what is beside it.
// Rule 2: no slot that the sequence has not written is multiplied: a stale NaN times 0 is a NaN.
#pragma once

#include <omp.h>

#include "attention_decode.h"
#include "attention_prefill.h"
#include "team.h"

namespace triolet {

constexpr long TASKS_OF_THREAD = 4;  // guess: then all threads end at about the same time
constexpr long PACKED_BYTES_MOST = 32 << 20;  // guess: bytes for packed keys and values

// The part of a decode that one task computes.
struct DecodeTask {
    long row, part, num_parts, place;  // place: index of the row's first part in `partials`
};

// A step's decodes, listed once for all layers, and memory that all threads share.
struct AttentionPlan {
    DecodeTask *tasks;
    long num_tasks, num_parts;  // parts of rows that have several
    Partial *partials;          // [num_parts][heads]
    float *sums_;               // [num_parts][heads][width]
    void *packed;               // keys and values of a chunk's row, PACKED_BYTES_MOST or one head
    long packed_size;           // in bytes
};

static inline bool is_decode(const Rows &rows, long row) {
    return rows.offsets[row + 1] - rows.offsets[row] == 1;
}

// Counts the decodes' tasks and parts, and fills ``plan.tasks`` with the tasks if it is not null.
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

template <class Q>
static long packed_bytes(const Attention &call, const Rows &rows) {
    long most = 0;
    for (long row = 0; row < rows.num_rows; row++) {
        if (is_decode(rows, row)) continue;
        long one = Packed<Q>::numbers(packed_length(rows, row, 0), call.width) * sizeof(Q);
        long heads = larger(1, smaller(call.kv_heads, PACKED_BYTES_MOST / one));
        most = larger(most, one * heads);
    }
    return most;
}

// The positions ``begin`` to ``end`` - 1 of a task's part that its row sees. There may be none.
struct Seen {
    long begin, end;

    Seen(const Attention &call, const Rows &rows, const DecodeTask &task)
        : begin(larger(task.part * PART, first_visible(rows.starts[task.row], call.window))),
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
    if (num_tasks < TASKS_OF_THREAD * num_members()) return 1;
    const long most = larger(1, smaller(call.kv_heads, QUERIES / (call.heads / call.kv_heads)));
    const long shares = (call.kv_heads + most - 1) / most;
    return (call.kv_heads + shares - 1) / shares;
}

// A part of a decode, for ``key_heads`` from ``first`` on.
template <class C>
static void run_decode(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                       const DecodeTask &task, long first, long key_heads, const float *queries,
                       long ldq, const Results &out, Gathered &has) {
    const long width = call.width, group = call.heads / call.kv_heads;
    const long token = rows.offsets[task.row];
    const Seen seen(call, rows, task);
    for (long h = 0; h < group; h += QUERIES) {
        const long own = smaller(QUERIES, group - h), heads = key_heads * own;
        const long head = first * group + h;
        Partial partials[QUERIES];
        for (long i = 0; i < heads; i++) partials[i] = {-INFINITY, 0.0f};
        if (seen.begin < seen.end)
            attend_part(call, Stream<C>(call, rows, task.row, first, seen.begin, seen.end),
                        key_heads, own, queries + token * ldq + head * width, has, partials);
        if (task.num_parts == 1) {
            for (long i = 0; i < heads; i++)
                join_parts(partials + i, has.out + i * width, 1, 1, width,
                           sink_of(call, head + i), [&](long column, v16 value) {
                               out.put(token, (head + i) * width + column, value);
                           });
            continue;
        }
        const long place = (task.place + task.part) * call.heads + head;
        memcpy(plan.partials + place, partials, heads * sizeof *partials);
        if (seen.begin < seen.end)
            memcpy(plan.sums_ + place * width, has.out, heads * width * sizeof *has.out);
    }
}

template <class C>
static void attend_decodes(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                           const float *queries, long ldq, const Results &out, Gathered &has) {
    const long most = key_heads_of_task(call, rows, plan);
    const long shares = (call.kv_heads + most - 1) / most;
    share_tasks(plan.num_tasks * shares, 1, [&](long i) {
        const long first = i % shares * most;
        run_decode<C>(call, rows, plan, plan.tasks[i / shares], first,
                      smaller(most, call.kv_heads - first), queries, ldq, out, has);
    });
    if (!plan.num_parts) return;
    share_tasks(plan.num_tasks, 1, [&](long i) {
        const DecodeTask &task = plan.tasks[i];
        if (task.num_parts == 1 || task.part) return;
        const long token = rows.offsets[task.row];
        for (long head = 0; head < call.heads; head++)
            join_parts(plan.partials + task.place * call.heads + head,
                       plan.sums_ + (task.place * call.heads + head) * call.width, task.num_parts,
                       call.heads, call.width, sink_of(call, head), [&](long column, v16 value) {
                           out.put(token, head * call.width + column, value);
                       });
    });
}

template <class C, class Q = Computed<C>>
static void attend_chunk(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                         long row, const float *queries, long ldq, const Results &out,
                         Gathered &has) {
    const long width = call.width, group = call.heads / call.kv_heads;
    const long token = rows.offsets[row], count = rows.offsets[row + 1] - token;
    const long length = packed_length(rows, row, call.window);
    const long origin = first_visible(rows.starts[row], call.window) / PART * PART;
    const long numbers = Packed<Q>::numbers(length, width), tiles = length / PANEL;
    const long heads = larger(1, smaller(call.kv_heads,
                                         plan.packed_size / (numbers * (long)sizeof(Q))));
    const long blocks = (count + QUERIES - 1) / QUERIES;
    for (long low = 0; low < call.kv_heads; low += heads) {
        const long own = smaller(heads, call.kv_heads - low);
        auto packed = [&](long head) {
            Q *keys = (Q *)plan.packed + head * numbers;
            return Packed<Q>{keys, keys + length * Packed<Q>::depth(width), origin,
                             rows.ends[row], length};
        };
        share_tasks(own * tiles, 8, [&](long i) {
            Packed<Q> to = packed(i / tiles);
            pack_positions<C>(call, rows, row, low + i / tiles, to, i % tiles);
        });
        share_tasks(own * group * blocks, 1, [&](long i) {
            // The last blocks see most: they are computed first.
            const long block = blocks - 1 - i / (own * group), head = i % (own * group);
            const long first = token + block * QUERIES, column = (low * group + head) * width;
            attend_queries(call, packed(head / group), sink_of(call, low * group + head),
                           rows.starts[row] + block * QUERIES, rows.untils + first,
                           smaller(QUERIES, count - block * QUERIES),
                           queries + first * ldq + column, ldq, has,
                           [&](long query, long d, v16 value) {
                               out.put(first + query, column + d, value);
                           });
        });
    }
}

// Called by all members of a team: attention of every row. ``queries`` [num_tokens], ``ldq``
// numbers apart, each [heads][width] float32.
static void attend(const Attention &call, const Rows &rows, const AttentionPlan &plan,
                   const float *queries, long ldq, const Results &out, Gathered &has) {
    with_cache(call, [&](auto *type) {
        typedef std::remove_pointer_t<decltype(type)> C;
        attend_decodes<C>(call, rows, plan, queries, ldq, out, has);
        for (long row = 0; row < rows.num_rows; row++)
            if (!is_decode(rows, row))
                attend_chunk<C>(call, rows, plan, row, queries, ldq, out, has);
    });
}

}  // namespace triolet
