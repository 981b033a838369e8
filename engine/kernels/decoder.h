// The whole forward of a Llama-like decoder, computed by one team.
//
// Rule 1: the residual stream, sums, norms and rotary embeddings are float32 in every dtype. The
// inputs of products are in the model's dtype, and the cache in its own. Rule 2: the result of a row does not
// depend on the other rows (see matmul.h and attention.h).
//
// This file is long because all parts of a layer work on one set of buffers.
#pragma once

#include <initializer_list>

#include "attention.h"
#include "bounds.h"
#include "experts.h"
#include "short_convolution.h"

namespace triolet {

enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

// Mirrored by `engine.worker.forward.kernel_structs.Layer`.
// A norm that the layer does not have is null. If ``is_norm_of_heads``, the norms of queries and
// keys are those of each head; otherwise they are those of all heads together. The rotary embeddings
// of queries and keys differ only in the factor of their cosines and sines. In a layer with experts,
// gate_up and down are empty or, with ``shared_gate``, those of an expert that computes every row.
// In one with a convolution, qkv gives its gates and inputs, and there is no attention.
struct Layer {
    Linear qkv, output, gate_up, down, shared_gate;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;
    const float *query_norm, *key_norm;
    int64_t is_norm_of_heads, query_rotary, key_rotary;
    Experts experts;
    Convolution convolution;
    Attention attention;
};

// Adds up ``count`` numbers over the ranks of a divided model, in place. Returns 0, or 1 if that
// failed.
typedef int32_t (*SumFunction)(float *numbers, int64_t count);

// Mirrored by `engine.worker.forward.kernel_structs.Model`.
struct Model {
    const Layer *layers;
    int64_t num_layers, hidden, mlp, vocab, embedding_rows, activation;
    float eps, embedding_scale, residual_scale, logits_scale, logits_softcap;
    float gate_alpha, gate_limit;  // for CLAMPED_SWIGLU alone
    int32_t is_packed;
    const void *embedding;  // [embedding_rows][hidden], or null if is_packed
    Linear table;  // the embedding in panels if is_packed, such as the head; else only its kind
    const float *final_norm;
    Linear head;
    SumFunction add_up;  // adds up the ranks' branches of a divided model; null if it is whole
};

// Mirrored by `engine.worker.forward.kernel_structs.Step`.
struct Step {
    Rows rows;
    const int64_t *ids, *keep;  // keep: the tokens whose logits are computed, strictly ascending
    const float *const *cosines, *const *sines;  // [kinds of rotary][num_tokens][rotary_width / 2]
    int64_t rotary_width, num_kept, num_threads;
    float *logits;  // [num_kept][vocab], or null: no logits are computed
    const Group *groups;  // the tokens that have adapters
    int64_t num_groups, shrunk_width;
    // The tokens of images, whose residuals begin with these rows instead of embeddings; further
    // rows are added behind each of the first layers. image_rows: [1 + num_deep][count][hidden].
    const int64_t *image_tokens;
    const float *image_rows;
    int64_t num_image_tokens, num_deep;
    StateRows states;  // used if the model has convolutions
};

// Counts a step's decodes and takes the memory of their plan.
static void lay_out_plan(Allotment &from, const Attention &call, const Rows &rows,
                         AttentionPlan &plan) {
    plan.tasks = nullptr;
    list_decodes(rows, plan);
    plan.tasks = from.take<DecodeTask>(plan.num_tasks);
    plan.partials = from.take<Partial>(plan.num_parts * call.heads);
    plan.sums_ = from.take<float>(plan.num_parts * call.heads * call.width);
    plan.packed_size = with_cache(call, [&](auto *type) {
        return packed_bytes<Computed<std::remove_pointer_t<decltype(type)>>>(call, rows);
    });
    plan.packed = from.take<char>(plan.packed_size);
}

// Returns the attention of the first layer that has it; those of all layers have the same shape.
static inline const Attention &first_attention(const Model &model) {
    const Layer *layer = model.layers;
    while (layer->convolution.length) layer++;
    return layer->attention;
}

// Returns how many numbers of a token the first product of any layer gives.
static inline long most_first_outputs(const Model &model) {
    long most = 0;
    for (long i = 0; i < model.num_layers; i++)
        if (model.layers[i].qkv.outputs > most) most = model.layers[i].qkv.outputs;
    return most;
}

// Returns the memory for the rounded rows of any layer with weights of 8 bits or fewer, or 0 if there
// is none.
static inline size_t most_rounded_bytes(const Model &model, long rows) {
    size_t most = 0;
    auto count = [&](const Linear &linear, long own_rows) {
        const size_t own = rounded_bytes(own_rows, linear);
        if (own > most) most = own;
    };
    count(model.head, rows);
    for (long i = 0; i < model.num_layers; i++) {
        const Layer &layer = model.layers[i];
        for (const Linear *one : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down,
                                  &layer.shared_gate})
            count(*one, rows);
        if (!layer.experts.count) continue;
        const long places = rows * layer.experts.chosen;
        count(layer.experts.gate_up[0], places);
        count(layer.experts.down[0], places);
    }
    return most;
}

// Takes the memory of a mixture, which all layers that have one share.
template <class T>
static void lay_out_routing(Allotment &from, const Model &model, long rows, long input_depth,
                            Routing<T> &routing) {
    long chosen = 0, count = 0, width = 0;
    for (long i = 0; i < model.num_layers; i++) {
        const Experts &own = model.layers[i].experts;
        if (own.count > count) count = own.count;
        if (own.chosen > chosen) chosen = own.chosen;
        if (own.count && own.down[0].inputs > width) width = own.down[0].inputs;
    }
    routing.lay_out(from, rows, count, chosen, input_depth, width, model.hidden);
}

// A step's activations. Rows and depths are padded; the padding of the depths is 0.
template <class T>
struct Buffers {
    float *residual, *qkv, *branch;
    T *normed, *attended, *gated, *last, *shrunk;
    long normed_depth, attended_depth, gated_depth, qkv_width;
    Scratch *scratch;     // [num_threads]
    char *rounded;        // shared by all threads
    Routing<T> routing;
    Gathered *gathered;
    AttentionPlan plan;
    bool *has_failed;  // whether the sum of a branch over the ranks has failed

    void lay_out(Allotment &from, const Model &model, const Step &step) {
        const Attention &call = first_attention(model);
        const long rows = padded_rows(step.rows.num_tokens);
        normed_depth = padded_depth<T>(model.hidden);
        attended_depth = padded_depth<T>(call.heads * call.width);
        gated_depth = padded_depth<T>(model.mlp);
        qkv_width = (call.heads + 2 * call.kv_heads) * call.width;
        residual = from.take<float>(rows * model.hidden);
        branch = from.take<float>(rows * model.hidden);
        qkv = from.take<float>(rows * most_first_outputs(model));
        normed = from.take<T>(rows * normed_depth);
        attended = from.take<T>(rows * attended_depth);
        gated = from.take<T>(rows * gated_depth);
        last = from.take<T>(padded_rows(step.num_kept) * normed_depth);
        scratch = from.take<Scratch>(step.num_threads);
        rounded = from.take<char>(most_rounded_bytes(model, rows));
        lay_out_routing<T>(from, model, rows, normed_depth, routing);
        gathered = from.take<Gathered>(step.num_threads);
        shrunk = from.take<T>(step.rows.num_tokens * step.shrunk_width);
        lay_out_plan(from, call, step.rows, plan);
    }

    void clear_padding(const Step &step) {
        const long rows = padded_rows(step.rows.num_tokens);
        if (sizeof(T) == 4) return;
        memset(normed, 0, rows * normed_depth * sizeof(T));
        memset(attended, 0, rows * attended_depth * sizeof(T));
        memset(gated, 0, rows * gated_depth * sizeof(T));
        routing.clear_padding();
        memset(last, 0, padded_rows(step.num_kept) * normed_depth * sizeof(T));
    }
};

// --- parts of a layer, each called by all members of the team ---------------------------------

// Writes the RMS norm of ``from`` to ``to``, which may be the same. Without ``weight`` it converts.
template <class T>
static inline void norm(const float *from, const float *weight, float eps, long width, T *to) {
    float scale = 1.0f;
    if (weight) {
        v16 squares = splat(0.0f);
        float rest = 0.0f;
        long d = 0;
        for (; d + LANES <= width; d += LANES) squares += load(from + d) * load(from + d);
        for (; d < width; d++) rest += from[d] * from[d];
        scale = 1.0f / sqrtf((sum(squares) + rest) / (float)width + eps);
    }
    long d = 0;
    for (; d + LANES <= width; d += LANES) {
        v16 value = load(from + d) * scale;
        store(to + d, weight ? value * load(weight + d) : value);
    }
    for (; d < width; d++) store_one(to + d, from[d] * scale * (weight ? weight[d] : 1.0f));
}

// Returns whether a step's indices are inside their bounds (bounds.h), but for its tokens' ids.
static bool step_fits(const Model &model, const Step &step) {
    const long tokens = step.rows.num_tokens;
    if (!rows_fit(step.rows) || !all_inside(step.keep, step.num_kept, tokens)) return false;
    for (long i = 1; i < step.num_kept; i++)
        if (step.keep[i - 1] >= step.keep[i]) return false;
    if (!all_inside(step.image_tokens, step.num_image_tokens, tokens)) return false;
    for (long i = 0; i < step.num_groups; i++) {
        const Group &group = step.groups[i];
        if (!spans_fit(group.first, group.count, tokens) ||
            !spans_fit(group.kept_first, group.kept_count, step.num_kept))
            return false;
    }
    for (long i = 0; i < model.num_layers; i++)
        if (model.layers[i].convolution.length) return states_fit(step.states, tokens);
    return true;
}

// A token whose id the embedding lacks becomes NaN: its row gets no token, and the others theirs.
template <class T>
static void embed(const Model &model, const Step &step, float *residual) {
    const long depth = padded_depth<T>(model.hidden);
    share_evenly(step.rows.num_tokens, [&](long token) {
        const long id = step.ids[token];
        float *to = residual + token * model.hidden;
        if (!is_inside(id, model.embedding_rows)) {
            for (long d = 0; d < model.hidden; d++) to[d] = NAN;
            return;
        }
        if (model.is_packed && model.table.scales) {
            for (long d = 0; d < model.hidden; d++)
                to[d] = small_weight(model.table, id, d) * model.embedding_scale;
            return;
        }
        with_weights<T>(model.is_packed ? model.table.weight : model.embedding, model.table.kind,
                        [&](auto *weights) {
            if (!model.is_packed) {
                const auto *from = weights + id * model.hidden;
                for (long d = 0; d < model.hidden; d++)
                    to[d] = to_float(from[d]) * model.embedding_scale;
                return;
            }
            const auto *from = weights + id / PANEL * PANEL * depth;
            for (long d = 0; d < model.hidden; d++)
                to[d] = to_float(from[panel_index<T>(d, id % PANEL)]) * model.embedding_scale;
        });
    });
}

// Sets the residuals of images' tokens, or adds the rows that come ``behind`` a layer, from 1 on.
static inline void take_images(const Model &model, const Step &step, long behind,
                               float *residual) {
    const long count = step.num_image_tokens;
    if (!count || behind > step.num_deep) return;
    const float *rows = step.image_rows + behind * count * model.hidden;
    share_evenly(count, [&](long i) {
        float *to = residual + step.image_tokens[i] * model.hidden;
        const float *from = rows + i * model.hidden;
        for (long d = 0; d < model.hidden; d++) to[d] = behind ? to[d] + from[d] : from[d];
    });
}

template <class T>
static void norm_rows(const Model &model, long rows, const float *from, const float *weight, T *to,
                      long depth) {
    share_evenly(rows, [&](long token) {
        norm(from + token * model.hidden, weight, model.eps, model.hidden, to + token * depth);
    });
}

static inline void rotate(float *head, const float *cosine, const float *sine, long half) {
    for (long d = 0; d < half; d++) {
        const float low = head[d], high = head[d + half];
        head[d] = low * cosine[d] - high * sine[d];
        head[d + half] = high * cosine[d] + low * sine[d];
    }
}

// Applies the norm and the rotary embedding to one token's queries or keys, in place.
static void prepare_heads(const Layer &layer, const Step &step, float eps, long token, float *heads,
                          const float *weight, long num_heads, long rotary) {
    const long width = layer.attention.width, half = step.rotary_width / 2;
    if (weight && !layer.is_norm_of_heads) norm(heads, weight, eps, num_heads * width, heads);
    for (long head = 0; head < num_heads; head++) {
        float *own = heads + head * width;
        if (weight && layer.is_norm_of_heads) norm(own, weight, eps, width, own);
        rotate(own, step.cosines[rotary] + token * half, step.sines[rotary] + token * half, half);
    }
}

template <class T>
static void prepare_attention(const Model &model, const Layer &layer, const Step &step,
                              const Buffers<T> &has) {
    const Attention &call = layer.attention;
    share_evenly(step.rows.num_tokens, [&](long token) {
        float *query = has.qkv + token * has.qkv_width;
        float *key = query + call.heads * call.width, *value = key + call.kv_heads * call.width;
        prepare_heads(layer, step, model.eps, token, query, layer.query_norm, call.heads,
                      layer.query_rotary);
        prepare_heads(layer, step, model.eps, token, key, layer.key_norm, call.kv_heads,
                      layer.key_rotary);
        write_token(call, step.rows, token, key, value);
    });
}

static inline v16 activate(int64_t kind, v16 x) {
    if (kind == SILU) return x / (1.0f + exp16(-x));
    v16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh16(inner));
}

// Returns the activation of a gated MLP for the outputs ``gate`` and ``up`` of its first product.
static inline v16 gated(const Model &model, v16 gate, v16 up) {
    if (model.activation != CLAMPED_SWIGLU) return activate(model.activation, gate) * up;
    const v16 limit = splat(model.gate_limit);
    gate = -max16(-gate, -limit);
    up = max16(-max16(-up, -limit), -limit);
    return (up + 1.0f) * gate / (1.0f + exp16(-model.gate_alpha * gate));
}

// Calls ``each`` with every vector of a block's sums, [rows][panels x 16].
template <class Each>
static inline void each_vector(const float *sums_, long rows, long panels, Each each) {
    for (long m = 0; m < rows; m++)
        for (long n = 0; n < panels; n++) each(m, n, load(sums_ + (m * panels + n) * PANEL));
}

// Stores the first ``count`` lanes, because the last panel may have more columns than the layer.
static inline void store_part(float *to, v16 value, long count) {
    if (count >= PANEL) {
        store(to, value);
        return;
    }
    float own[PANEL];
    store(own, value);
    for (long i = 0; i < count; i++) to[i] = own[i];
}

// The adapters of a step. `of` returns those of one product, or null if the step has none.
template <class T>
struct StepAdapters {
    const Step &step;
    T *shrunk;
    Adaptation<T> own{};

    const Adaptation<T> *of(long product, bool is_kept) {
        if (!step.num_groups) return nullptr;
        own = {step.groups, step.num_groups, product, is_kept, shrunk, step.shrunk_width};
        return &own;
    }
};

// Returns a function that takes sums and stores them in ``to``, [rows][outputs].
static inline auto store_sums(long outputs, float *to) {
    return [=](long row, long count, long panel, long panels, const float *sums_) {
        each_vector(sums_, count, panels, [&](long m, long n, v16 value) {
            const long column = (panel + n) * PANEL;
            store_part(to + (row + m) * outputs + column, value, outputs - column);
        });
    };
}

// Computes to[rows][outputs] = the layer's product.
template <class T>
static void project(const Linear &layer, const T *x, long ldx, long rows, float *to,
                    Scratch &scratch, const Adaptation<T> *with) {
    linear(layer, x, ldx, rows, scratch, store_sums(layer.outputs, to), with);
}

// Computes residual += scale * the layer's product.
template <class T>
static void project_and_add(const Linear &layer, const T *x, long ldx, long rows, float scale,
                            float *residual, Scratch &scratch, const Adaptation<T> *with) {
    linear(layer, x, ldx, rows, scratch,
           [&](long row, long count, long panel, long panels, const float *sums_) {
               each_vector(sums_, count, panels, [&](long m, long n, v16 value) {
                   const long column = (panel + n) * PANEL;
                   float *to = residual + (row + m) * layer.outputs + column;
                   if (layer.outputs - column >= PANEL) {
                       store(to, load(to) + scale * value);
                       return;
                   }
                   for (long i = 0; i < layer.outputs - column; i++) to[i] += scale * value[i];
               });
           }, with);
}

// Adds up a branch over the ranks. The thread that called the step does this, because the function
// may need what belongs to that thread. After a failure, no branch of the step is added up.
static void add_up_branch(const Model &model, long rows, float *branch, bool &has_failed) {
    run_in_caller([&] {
        if (!has_failed) has_failed = model.add_up(branch, rows * model.hidden) != 0;
    });
}

// Adds a branch to the residual. Before that, a branch of a divided model is added up, and the norm
// behind it is computed, if there is one.
template <class T>
static void add_branch(const Model &model, long rows, const float *after, const Buffers<T> &has) {
    if (model.add_up) add_up_branch(model, rows, has.branch, *has.has_failed);
    share_evenly(rows, [&](long token) {
        float *branch = has.branch + token * model.hidden;
        float *to = has.residual + token * model.hidden;
        if (after) norm(branch, after, model.eps, model.hidden, branch);
        for (long d = 0; d < model.hidden; d++) to[d] += model.residual_scale * branch[d];
    });
}

// Computes a branch's last product and its norm, if there is one, and adds it to the residual.
template <class T>
static void end_branch(const Model &model, long rows, const Linear &layer, const T *x, long ldx,
                       const float *after, const Buffers<T> &has, Scratch &scratch,
                       const Adaptation<T> *with) {
    if (!after && !model.add_up) {
        project_and_add(layer, x, ldx, rows, model.residual_scale, has.residual, scratch, with);
        return;
    }
    project(layer, x, ldx, rows, has.branch, scratch, with);
    add_branch(model, rows, after, has);
}

// Returns a function that takes the sums of gates and ups, whose panels alternate, and stores their
// activations in ``to`` [rows][depth], of which the first ``width`` columns are in use.
template <class T>
static inline auto store_gated(const Model &model, long width, T *to, long depth) {
    return [=, &model](long row, long count, long panel, long panels, const float *sums_) {
        for (long m = 0; m < count; m++)
            for (long n = 0; n < panels; n += 2) {
                const float *at = sums_ + (m * panels + n) * PANEL;
                v16 value = gated(model, load(at), load(at + PANEL));
                const long column = (panel + n) / 2 * PANEL;
                T *own = to + (row + m) * depth + column;
                if (width - column >= PANEL) store(own, value);
                else
                    for (long i = 0; i < width - column; i++) store_one(own + i, value[i]);
            }
    };
}

// Adds the result of the expert that computes every row, whose first product is number ``product``,
// to the branch. The memory of the other experts, which are done, has its outputs and shares.
template <class T>
static void add_shared(const Model &model, const Layer &layer, long rows, const Buffers<T> &has,
                       Scratch &scratch, StepAdapters<T> &adapters, long product, bool is_last) {
    float *outputs = has.routing.outputs, *shares = has.routing.scores;
    linear(layer.gate_up, has.normed, has.normed_depth, rows, scratch,
           store_gated(model, model.mlp, has.gated, has.gated_depth), adapters.of(product, is_last));
    project(layer.down, has.gated, has.gated_depth, rows, outputs, scratch,
            adapters.of(product + 1, is_last));
    project<T>(layer.shared_gate, has.normed, has.normed_depth, rows, shares, scratch, nullptr);
    share_evenly(rows, [&](long row) {
        const float share = 1.0f / (1.0f + expf(-shares[row]));
        float *to = has.branch + row * model.hidden;
        for (long d = 0; d < model.hidden; d++) to[d] += share * outputs[row * model.hidden + d];
    });
}

// Computes a layer's mixture of experts and adds it to the residual.
template <class T>
static void mix(const Model &model, const Layer &layer, long rows, const Buffers<T> &has,
                Scratch &scratch, StepAdapters<T> &adapters, long product, bool is_last) {
    const Experts &experts = layer.experts;
    const Routing<T> &own = has.routing;
    route(experts, has.normed, rows, own, scratch);
    const long places = rows * experts.chosen;
    linear_of_experts(experts.gate_up, experts, own.starts, places, own.inputs, own.input_depth, scratch,
                      store_gated(model, experts.down[0].inputs, own.gated,
                                  own.gated_depth));
    linear_of_experts(experts.down, experts, own.starts, places, own.gated, own.gated_depth, scratch,
                      store_sums(model.hidden, own.outputs));
    add_experts(experts, rows, model.hidden, own, has.branch);
    if (layer.shared_gate.outputs)
        add_shared(model, layer, rows, has, scratch, adapters, product, is_last);
    add_branch(model, rows, layer.after_mlp, has);
}

// Moves the rows whose logits are wanted to the front, in place (``keep`` ascends strictly): those
// of the residual and of ``mixed`` [num_tokens][depth].
template <class T>
static void gather_kept(const Model &model, const Step &step, float *residual, T *mixed,
                        long depth) {
    run_once([&] {
        for (long i = 0; i < step.num_kept; i++) {
            const long from = step.keep[i];
            if (from == i) continue;
            memcpy(residual + i * model.hidden, residual + from * model.hidden,
                   model.hidden * sizeof(float));
            memcpy(mixed + i * depth, mixed + from * depth, depth * sizeof(T));
        }
    });
}

// Computes one layer. In the last layer, a row whose logits are not wanted is done once its keys
// and values, or its state, are written: of a prompt's thousand rows, one goes on. The rows of
// ``residual`` behind those of ``keep`` then hold arbitrary numbers.
template <class T>
static void run_layer(const Model &model, long index, const Step &step, const Buffers<T> &has,
                      Scratch &scratch, Gathered &gathered) {
    const Layer &layer = model.layers[index];
    const bool is_last = index + 1 == model.num_layers;
    const long product = index * PRODUCTS_OF_LAYER;
    StepAdapters<T> adapters{step, has.shrunk};
    long rows = step.rows.num_tokens;
    norm_rows(model, rows, has.residual, layer.before_attention, has.normed, has.normed_depth);
    project(layer.qkv, has.normed, has.normed_depth, rows, has.qkv, scratch,
            adapters.of(product, false));
    const bool is_convolved = layer.convolution.length > 0;
    if (is_convolved)
        convolve(layer.convolution, step.states, rows, model.hidden, has.qkv, has.normed,
                 has.normed_depth);
    else
        prepare_attention(model, layer, step, has);
    if (is_last && !step.num_kept) return;
    if (!is_convolved)
        attend(layer.attention, step.rows, has.plan, has.qkv, has.qkv_width,
               {has.attended, has.attended_depth}, gathered);
    T *mixed = is_convolved ? has.normed : has.attended;
    const long mixed_depth = is_convolved ? has.normed_depth : has.attended_depth;
    if (is_last) {
        gather_kept(model, step, has.residual, mixed, mixed_depth);
        rows = step.num_kept;
    }
    end_branch(model, rows, layer.output, mixed, mixed_depth, layer.after_attention, has, scratch,
               adapters.of(product + 1, is_last));
    norm_rows(model, rows, has.residual, layer.before_mlp, has.normed, has.normed_depth);
    if (layer.experts.count) {
        mix(model, layer, rows, has, scratch, adapters, product + 2, is_last);
        return;
    }
    linear(layer.gate_up, has.normed, has.normed_depth, rows, scratch,
           store_gated(model, model.mlp, has.gated, has.gated_depth),
           adapters.of(product + 2, is_last));
    end_branch(model, rows, layer.down, has.gated, has.gated_depth, layer.after_mlp, has, scratch,
               adapters.of(product + 3, is_last));
}

template <class T>
static void run_head(const Model &model, const Step &step, const Buffers<T> &has,
                     Scratch &scratch) {
    if (!step.num_kept || !step.logits) return;
    share_evenly(step.num_kept, [&](long i) {
        norm(has.residual + i * model.hidden, model.final_norm, model.eps, model.hidden,
             has.last + i * has.normed_depth);
    });
    StepAdapters<T> adapters{step, has.shrunk};
    linear(model.head, has.last, has.normed_depth, step.num_kept, scratch,
           [&](long row, long count, long panel, long panels, const float *sums_) {
               each_vector(sums_, count, panels, [&](long m, long n, v16 value) {
                   const long column = (panel + n) * PANEL;
                   value *= model.logits_scale;
                   if (model.logits_softcap > 0.0f)
                       value = model.logits_softcap * tanh16(value / model.logits_softcap);
                   store_part(step.logits + (row + m) * model.vocab + column, value,
                              model.vocab - column);
               });
           }, adapters.of(model.num_layers * PRODUCTS_OF_LAYER, true));
}

template <class T>
static int64_t step_bytes(const Model &model, const Step &step) {
    Buffers<T> has;
    Allotment needed{nullptr};
    has.lay_out(needed, model, step);
    return (int64_t)needed.used;
}

// Returns a `Status`. Changes only the arena, the step's slots and its logits; nothing if the step is
// refused.
template <class T>
static int run_step(const Model &model, const Step &step, Arena &arena) {
    if (!step_fits(model, step)) return OUT_OF_BOUNDS;
    if (!arena.reserve(step_bytes<T>(model, step))) return NO_MEMORY;
    Buffers<T> has;
    Allotment given{arena.memory};
    has.lay_out(given, model, step);
    list_decodes(step.rows, has.plan);
    has.clear_padding(step);
    bool has_failed = false;
    has.has_failed = &has_failed;
    Team::run((int)step.num_threads, [&] {
        Scratch &scratch = has.scratch[member_index()];
        scratch.rounded = has.rounded;
        Gathered &gathered = has.gathered[member_index()];
        embed<T>(model, step, has.residual);
        take_images(model, step, 0, has.residual);
        for (long i = 0; i < model.num_layers; i++) {
            run_layer(model, i, step, has, scratch, gathered);
            take_images(model, step, i + 1, has.residual);
        }
        run_head(model, step, has, scratch);
    });
    return has_failed ? SUM_FAILED : DONE;
}

}  // namespace triolet
