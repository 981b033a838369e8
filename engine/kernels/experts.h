// A mixture of experts: which experts compute a row, and the rows of each expert side by side, so
// that an expert's weights are read once for all of its rows.
//
// Rule: a row's experts, their shares and the order in which their results are added depend on that
// row alone.
#pragma once

#include <algorithm>

#include "arena.h"
#include "linear.h"

namespace triolet {

// Mirrored by `engine.worker.forward.kernel_structs.Experts`.
// A layer without a mixture has a count of 0.
struct Experts {
    Linear router;
    const Linear *gate_up, *down;  // [count], all of the same sizes and with weights of one form
    int64_t count, chosen;         // chosen: how many experts compute a row
    int64_t is_normalised;         // the shares of a row's experts are divided by their sum
};

// The memory of one layer's mixture. Each row has ``chosen`` places, and the places of one expert
// follow one another. The later of two arrays that share memory is written when the other is done.
template <class T>
struct Routing {
    float *scores;             // [rows][count]
    float *shares;             // [rows][chosen]
    int32_t *experts, *places; // [rows][chosen] ascending experts, and the place of each
    int32_t *sources;          // [places] the row of each place
    int32_t *starts;           // [count + 1] the first place of each expert
    T *inputs;                 // [places][input_depth], in the memory of ``outputs``
    T *gated;                  // [places][gated_depth]
    float *outputs;            // [places][hidden]
    long num_places, input_depth, gated_depth;

    void lay_out(Allotment &from, long rows, long count, long chosen, long input_depth_, long width,
                 long hidden) {
        num_places = chosen ? padded_rows(rows * chosen) : 0;
        input_depth = input_depth_;
        gated_depth = padded_depth<T>(width);
        scores = from.take<float>(rows * count);
        shares = from.take<float>(rows * chosen);
        experts = from.take<int32_t>(rows * chosen);
        places = from.take<int32_t>(rows * chosen);
        sources = from.take<int32_t>(num_places);
        starts = from.take<int32_t>(count + 1);
        gated = from.take<T>(num_places * gated_depth);
        const size_t of_inputs = input_depth * sizeof(T), of_outputs = hidden * sizeof(float);
        outputs = (float *)from.take<char>(num_places * std::max(of_inputs, of_outputs));
        inputs = (T *)outputs;
    }

    void clear_padding() { memset(gated, 0, num_places * gated_depth * sizeof(T)); }
};

// Returns the probability of each of ``count`` scores, in place.
static inline void softmax(float *scores, long count) {
    float most = scores[0], total = 0.0f;
    for (long i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
    for (long i = 0; i < count; i++) total += scores[i] = expf(scores[i] - most);
    for (long i = 0; i < count; i++) scores[i] /= total;
}

// Chooses a row's experts: those with the highest probabilities; of equal ones, the first. Scores
// that are not finite choose some experts all the same, and make every share NaN.
static inline void choose(const Experts &experts, float *scores, int32_t *chosen, float *shares) {
    softmax(scores, experts.count);
    float total = 0.0f;
    for (long i = 0; i < experts.chosen; i++) {
        long best = -1;
        for (long expert = 0; expert < experts.count; expert++) {
            bool is_taken = false;
            for (long k = 0; k < i; k++) is_taken |= chosen[k] == expert;
            if (!is_taken && (best < 0 || scores[expert] > scores[best])) best = expert;
        }
        chosen[i] = (int32_t)best;
        total += scores[best];
    }
    std::sort(chosen, chosen + experts.chosen);
    for (long i = 0; i < experts.chosen; i++)
        shares[i] = scores[chosen[i]] / (experts.is_normalised ? total : 1.0f);
}

// Gives every row of every expert its place.
template <class T>
static void place_rows(const Experts &experts, long rows, const Routing<T> &has) {
    const long count = rows * experts.chosen;
    memset(has.starts, 0, (experts.count + 1) * sizeof *has.starts);
    for (long i = 0; i < count; i++) has.starts[has.experts[i] + 1]++;
    for (long expert = 0; expert < experts.count; expert++)
        has.starts[expert + 1] += has.starts[expert];
    for (long i = 0; i < count; i++) {
        const int32_t place = has.starts[has.experts[i]]++;
        has.places[i] = place;
        has.sources[place] = (int32_t)(i / experts.chosen);
    }
    // The loop has moved each expert's start to its end, which is the start of the next expert.
    for (long expert = experts.count; expert > 0; expert--)
        has.starts[expert] = has.starts[expert - 1];
    has.starts[0] = 0;
}

// Called by all members of a team. Chooses the experts of ``rows`` rows and copies each row to
// its places.
template <class T>
static void route(const Experts &experts, const T *x, long rows, const Routing<T> &has,
                  Scratch &scratch) {
    linear(experts.router, x, has.input_depth, rows, scratch,
           [&](long row, long count, long panel, long panels, const float *sums_) {
               for (long m = 0; m < count; m++) {
                   const long first = panel * PANEL, left = experts.count - first;
                   memcpy(has.scores + (row + m) * experts.count + first,
                          sums_ + m * panels * PANEL,
                          (left < panels * PANEL ? left : panels * PANEL) * sizeof(float));
               }
           });
    share_evenly(rows, [&](long row) {
        choose(experts, has.scores + row * experts.count, has.experts + row * experts.chosen,
               has.shares + row * experts.chosen);
    });
    run_once([&] { place_rows(experts, rows, has); });
    share_evenly(rows * experts.chosen, [&](long place) {
        memcpy(has.inputs + place * has.input_depth, x + has.sources[place] * has.input_depth,
               has.input_depth * sizeof(T));
    });
}

// Called by all members. Computes every expert's outputs of its places, ``places`` in all, and passes
// them on as `linear` does. A task has some panels of one expert, which may have no place.
template <class T, class Take>
static void linear_of_experts(const Linear *linears, const Experts &experts, const int32_t *starts,
                              long places, const T *x, long ldx, Scratch &scratch, Take take) {
    RoundedRows rounded = round_all(linears[0], x, ldx, places, scratch);
    const Panels panels(linears[0], (places + experts.count - 1) / experts.count);
    share_tasks(experts.count * panels.groups, 1, [&](long task) {
        const long expert = task / panels.groups;
        for (long row = starts[expert]; row < starts[expert + 1]; row += panels.rows)
            run_task<T>(linears[expert], x, ldx, rounded, row, starts[expert + 1],
                        panels.of(task % panels.groups), scratch, take);
    });
}

// Called by all members of a team. Returns each row's sum of its experts' outputs in ``to``,
// [rows][hidden].
template <class T>
static void add_experts(const Experts &experts, long rows, long hidden, const Routing<T> &has,
                        float *to) {
    share_evenly(rows, [&](long row) {
        float *own = to + row * hidden;
        memset(own, 0, hidden * sizeof *own);
        for (long i = row * experts.chosen; i < (row + 1) * experts.chosen; i++) {
            const float *from = has.outputs + has.places[i] * hidden;
            for (long d = 0; d < hidden; d++) own[d] += has.shares[i] * from[d];
        }
    });
}

}  // namespace triolet
