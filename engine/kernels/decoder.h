// The whole forward of a Llama-like decoder, in one parallel region.
//
// Rule 1: the residual stream, sums, norms and rotary embeddings are float32 in every dtype. The
// inputs of products and the cache are in the model's dtype. Rule 2: the result of a row does not
// depend on the other rows (see matmul.h and attention.h).
#pragma once

#include <omp.h>

#include <cstdlib>

#include "attention.h"

namespace triolet {

enum Activation { SILU = 0, GELU_TANH = 1 };

// Mirrored by `engine.worker.forward.native.Layer`. A norm that the layer does not have is null. If
// ``is_norm_of_heads``, the norms of queries and keys are those of each head; otherwise they are
// those of all heads together.
struct Layer {
    Linear qkv, output, gate_up, down;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;
    const float *query_norm, *key_norm;
    int64_t is_norm_of_heads, rotary;
    Attention attention;
};

// Mirrored by `engine.worker.forward.native.Model`.
struct Model {
    const Layer *layers;
    int64_t num_layers, hidden, mlp, vocab, activation;
    float eps, embedding_scale, residual_scale, logits_scale, logits_softcap;
    int32_t is_tied;
    const void *embedding;  // [vocab][hidden], or the head's panels if is_tied
    const float *final_norm;
    Linear head;
};

// Mirrored by `engine.worker.forward.native.Step`.
struct Step {
    Rows rows;
    const int64_t *ids, *keep;  // keep: the tokens whose logits are computed, strictly ascending
    const float *const *cosines, *const *sines;  // [kinds of rotary][num_tokens][rotary_width / 2]
    int64_t rotary_width, num_kept, num_threads;
    float *logits;  // [num_kept][vocab]
};

// The memory that a model's steps use, one step at a time. It grows and never shrinks.
struct Arena {
    char *memory = nullptr;
    size_t size = 0;

    ~Arena() { free(memory); }

    bool reserve(size_t wanted) {
        if (wanted <= size) return true;
        free(memory);
        memory = (char *)aligned_alloc(64, wanted);
        size = memory ? wanted : 0;
        return memory != nullptr;
    }
};

// Divides an arena's memory into arrays. Without memory, it only adds up the sizes.
struct Allotment {
    char *memory;
    size_t used = 0;

    template <class T>
    T *take(size_t count) {
        T *own = memory ? (T *)(memory + used) : nullptr;
        used += (count * sizeof(T) + 63) / 64 * 64;
        return own;
    }
};

// Counts a step's decodes and takes the memory of their plan.
template <class T>
static void lay_out_plan(Allotment &from, const Attention &call, const Rows &rows,
                         AttentionPlan &plan) {
    plan.tasks = nullptr;
    list_decodes(rows, plan);
    plan.tasks = from.take<DecodeTask>(plan.num_tasks);
    plan.partials = from.take<Partial>(plan.num_parts * call.heads);
    plan.sums_ = from.take<float>(plan.num_parts * call.heads * call.width);
    plan.packed_size = packed_bytes<T>(call, rows);
    plan.packed = from.take<char>(plan.packed_size);
}

static inline long padded_rows(long rows) { return (rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD; }

// A step's activations. Rows and depths are padded; the padding of the depths is 0.
template <class T>
struct Buffers {
    float *residual, *qkv, *branch;
    T *normed, *attended, *gated, *last;
    long normed_depth, attended_depth, gated_depth, qkv_width;
    Scratch *scratch;     // [num_threads]
    Gathered<T> *gathered;
    AttentionPlan plan;

    void lay_out(Allotment &from, const Model &model, const Step &step) {
        const Attention &call = model.layers[0].attention;
        const long rows = padded_rows(step.rows.num_tokens);
        normed_depth = padded_depth<T>(model.hidden);
        attended_depth = padded_depth<T>(call.heads * call.width);
        gated_depth = padded_depth<T>(model.mlp);
        qkv_width = (call.heads + 2 * call.kv_heads) * call.width;
        residual = from.take<float>(rows * model.hidden);
        branch = from.take<float>(rows * model.hidden);
        qkv = from.take<float>(rows * qkv_width);
        normed = from.take<T>(rows * normed_depth);
        attended = from.take<T>(rows * attended_depth);
        gated = from.take<T>(rows * gated_depth);
        last = from.take<T>(padded_rows(step.num_kept) * normed_depth);
        scratch = from.take<Scratch>(step.num_threads);
        gathered = from.take<Gathered<T>>(step.num_threads);
        lay_out_plan<T>(from, call, step.rows, plan);
    }

    void clear_padding(const Step &step) {
        const long rows = padded_rows(step.rows.num_tokens);
        if (sizeof(T) == 4) return;
        memset(normed, 0, rows * normed_depth * sizeof(T));
        memset(attended, 0, rows * attended_depth * sizeof(T));
        memset(gated, 0, rows * gated_depth * sizeof(T));
        memset(last, 0, padded_rows(step.num_kept) * normed_depth * sizeof(T));
    }
};

// --- parts of a layer, each called by all threads of the region ---------------------------------

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

template <class T>
static void embed(const Model &model, const Step &step, float *residual) {
    const long depth = padded_depth<T>(model.hidden);
#pragma omp for
    for (long token = 0; token < step.rows.num_tokens; token++) {
        const long id = step.ids[token];
        float *to = residual + token * model.hidden;
        if (!model.is_tied) {
            const T *from = (const T *)model.embedding + id * model.hidden;
            for (long d = 0; d < model.hidden; d++)
                to[d] = to_float(from[d]) * model.embedding_scale;
            continue;
        }
        const long first = id / PANEL * PANEL * depth, lane = id % PANEL;
        const float *scales = model.head.scale;
        const float scale = model.embedding_scale * (scales ? scales[id] : 1.0f);
        for (long d = 0; d < model.hidden; d++) {
            const long at = first + panel_index<T>(d, lane);
            to[d] = scale * (scales ? (float)((const int8_t *)model.embedding)[at]
                                    : to_float(((const T *)model.embedding)[at]));
        }
    }
}

template <class T>
static void norm_rows(const Model &model, long rows, const float *from, const float *weight, T *to,
                      long depth) {
#pragma omp for
    for (long token = 0; token < rows; token++)
        norm(from + token * model.hidden, weight, model.eps, model.hidden, to + token * depth);
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
                          const float *weight, long num_heads) {
    const long width = layer.attention.width, half = step.rotary_width / 2;
    if (weight && !layer.is_norm_of_heads) norm(heads, weight, eps, num_heads * width, heads);
    for (long head = 0; head < num_heads; head++) {
        float *own = heads + head * width;
        if (weight && layer.is_norm_of_heads) norm(own, weight, eps, width, own);
        rotate(own, step.cosines[layer.rotary] + token * half,
               step.sines[layer.rotary] + token * half, half);
    }
}

template <class T>
static void prepare_attention(const Model &model, const Layer &layer, const Step &step,
                              const Buffers<T> &has) {
    const Attention &call = layer.attention;
#pragma omp for
    for (long token = 0; token < step.rows.num_tokens; token++) {
        float *query = has.qkv + token * has.qkv_width;
        float *key = query + call.heads * call.width, *value = key + call.kv_heads * call.width;
        prepare_heads(layer, step, model.eps, token, query, layer.query_norm, call.heads);
        prepare_heads(layer, step, model.eps, token, key, layer.key_norm, call.kv_heads);
        write_token<T>(call, step.rows, token, key, value);
    }
}

static inline v16 activate(int64_t kind, v16 x) {
    if (kind == SILU) return x / (1.0f + exp16(-x));
    v16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh16(inner));
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

// Computes to[rows][outputs] = the layer's product.
template <class T>
static void project(const Linear &layer, const T *x, long ldx, long rows, float *to,
                    Scratch &scratch) {
    linear(layer, x, ldx, rows, scratch,
           [&](long row, long count, long panel, long panels, const float *sums_) {
               each_vector(sums_, count, panels, [&](long m, long n, v16 value) {
                   const long column = (panel + n) * PANEL;
                   store_part(to + (row + m) * layer.outputs + column, value,
                              layer.outputs - column);
               });
           });
}

// Computes residual += scale * the layer's product.
template <class T>
static void project_and_add(const Linear &layer, const T *x, long ldx, long rows, float scale,
                            float *residual, Scratch &scratch) {
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
           });
}

// Computes a branch's last product and its norm, if there is one, and adds it to the residual.
template <class T>
static void end_branch(const Model &model, long rows, const Linear &layer, const T *x, long ldx,
                       const float *after, const Buffers<T> &has, Scratch &scratch) {
    if (!after) {
        project_and_add(layer, x, ldx, rows, model.residual_scale, has.residual, scratch);
        return;
    }
    project(layer, x, ldx, rows, has.branch, scratch);
#pragma omp for
    for (long token = 0; token < rows; token++) {
        float *branch = has.branch + token * model.hidden;
        float *to = has.residual + token * model.hidden;
        norm(branch, after, model.eps, model.hidden, branch);
        for (long d = 0; d < model.hidden; d++) to[d] += model.residual_scale * branch[d];
    }
}

// Computes activation(gate) * up. The panels of gate and up alternate, so that a task has both.
template <class T>
static void gate(const Model &model, const Layer &layer, long rows, const Buffers<T> &has,
                 Scratch &scratch) {
    linear(layer.gate_up, has.normed, has.normed_depth, rows, scratch,
           [&](long row, long count, long panel, long panels, const float *sums_) {
               for (long m = 0; m < count; m++)
                   for (long n = 0; n < panels; n += 2) {
                       const float *at = sums_ + (m * panels + n) * PANEL;
                       v16 value = activate(model.activation, load(at)) * load(at + PANEL);
                       const long column = (panel + n) / 2 * PANEL;
                       T *to = has.gated + (row + m) * has.gated_depth + column;
                       if (model.mlp - column >= PANEL) store(to, value);
                       else
                           for (long i = 0; i < model.mlp - column; i++) store_one(to + i, value[i]);
                   }
           });
}

// Moves the rows whose logits are wanted to the front, in place (``keep`` ascends strictly).
template <class T>
static void gather_kept(const Model &model, const Step &step, const Buffers<T> &has) {
#pragma omp single
    for (long i = 0; i < step.num_kept; i++) {
        const long from = step.keep[i];
        if (from == i) continue;
        memcpy(has.residual + i * model.hidden, has.residual + from * model.hidden,
               model.hidden * sizeof(float));
        memcpy(has.attended + i * has.attended_depth, has.attended + from * has.attended_depth,
               has.attended_depth * sizeof(T));
    }
}

// Computes one layer. In the last layer, a row whose logits are not wanted is done once its keys
// and values are written: of a prompt's thousand rows, one goes on. The rows of ``residual`` behind
// those of ``keep`` then hold arbitrary numbers.
template <class T>
static void run_layer(const Model &model, const Layer &layer, const Step &step, bool is_last,
                      const Buffers<T> &has, Scratch &scratch, Gathered<T> &gathered) {
    long rows = step.rows.num_tokens;
    norm_rows(model, rows, has.residual, layer.before_attention, has.normed, has.normed_depth);
    project(layer.qkv, has.normed, has.normed_depth, rows, has.qkv, scratch);
    prepare_attention(model, layer, step, has);
    if (is_last && !step.num_kept) return;
    attend<T>(layer.attention, step.rows, has.plan, has.qkv, has.qkv_width, has.attended,
              has.attended_depth, gathered);
    if (is_last) {
        gather_kept(model, step, has);
        rows = step.num_kept;
    }
    end_branch(model, rows, layer.output, has.attended, has.attended_depth, layer.after_attention,
               has, scratch);
    norm_rows(model, rows, has.residual, layer.before_mlp, has.normed, has.normed_depth);
    gate(model, layer, rows, has, scratch);
    end_branch(model, rows, layer.down, has.gated, has.gated_depth, layer.after_mlp, has, scratch);
}

template <class T>
static void run_head(const Model &model, const Step &step, const Buffers<T> &has,
                     Scratch &scratch) {
    if (!step.num_kept) return;
#pragma omp for
    for (long i = 0; i < step.num_kept; i++)
        norm(has.residual + i * model.hidden, model.final_norm, model.eps, model.hidden,
             has.last + i * has.normed_depth);
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
           });
}

template <class T>
static int64_t step_bytes(const Model &model, const Step &step) {
    Buffers<T> has;
    Allotment needed{nullptr};
    has.lay_out(needed, model, step);
    return (int64_t)needed.used;
}

// Returns 0, or 1 if there was no memory. Changes only the arena, the step's slots and its logits.
template <class T>
static int run_step(const Model &model, const Step &step, Arena &arena) {
    if (!arena.reserve(step_bytes<T>(model, step))) return 1;
    Buffers<T> has;
    Allotment given{arena.memory};
    has.lay_out(given, model, step);
    list_decodes(step.rows, has.plan);
    has.clear_padding(step);
#pragma omp parallel num_threads((int)step.num_threads)
    {
        Tiles tiles;
        Scratch &scratch = has.scratch[omp_get_thread_num()];
        Gathered<T> &gathered = has.gathered[omp_get_thread_num()];
        embed<T>(model, step, has.residual);
        for (long i = 0; i < model.num_layers; i++)
            run_layer(model, model.layers[i], step, i + 1 == model.num_layers, has, scratch,
                      gathered);
        run_head(model, step, has, scratch);
    }
    return 0;
}

}  // namespace triolet
