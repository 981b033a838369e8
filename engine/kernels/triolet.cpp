// The functions that Python calls through ctypes. This file includes every other one, so that one
// compilation makes the library. A ``kind`` of 0 is float32, 1 is bfloat16.
#include <new>

#include "stock.h"

using namespace triolet;

template <class T, class Number>
static void pack(const T *weight, long outputs, long inputs, long pair, Number *panels) {
    const long depth = padded_depth<T>(inputs);
    const long count = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (long panel = 0; panel < count; panel++) {
        // The panels of a pair, gate and up, alternate.
        Number *to = panels + (pair ? (panel % (count / pair)) * pair + panel / (count / pair)
                                    : panel) * depth * PANEL;
        memset(to, 0, depth * PANEL * sizeof *to);
        for (long lane = 0; lane < PANEL; lane++) {
            const long output = panel * PANEL + lane;
            if (output >= outputs) break;
            const Number *from = (const Number *)weight + output * inputs;
            for (long k = 0; k < inputs; k++) to[panel_index<T>(k, lane)] = from[k];
        }
    }
}

extern "C" {

// Returns the instructions that this library multiplies with, for people to read: "AMX",
// "AVX512-BF16", "AVX-512" or "vectors".
const char *triolet_kind(void) {
#if defined(__AMX_BF16__)
    if (has_amx()) return "AMX";
#endif
#if defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#else
    return "vectors";
#endif
}

// Returns how many numbers the panels of a layer have, with their padding.
int64_t triolet_packed_numbers(int64_t kind, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    return panels * PANEL * (kind ? padded_depth<bf16>(inputs) : padded_depth<float>(inputs));
}

// Packs ``weight`` [outputs][inputs] into panels (see matmul.h); with ``is_int8`` its numbers are
// int8. With a ``pair`` of 2, the first half of the outputs are gates and the second half ups, each
// a multiple of 16; otherwise ``pair`` is 0.
void triolet_pack(int64_t kind, int64_t is_int8, const void *weight, int64_t outputs,
                  int64_t inputs, int64_t pair, void *panels) {
    if (is_int8 && kind)
        pack<bf16>((const bf16 *)weight, outputs, inputs, pair, (int8_t *)panels);
    else if (is_int8)
        pack<float>((const float *)weight, outputs, inputs, pair, (int8_t *)panels);
    else if (kind)
        pack<bf16>((const bf16 *)weight, outputs, inputs, pair, (bf16 *)panels);
    else
        pack<float>((const float *)weight, outputs, inputs, pair, (float *)panels);
}

// Writes the sizes of the structs that ctypes mirrors, in the order of
// `engine.worker.forward.native.MIRRORED`.
void triolet_sizes(int64_t *sizes) {
    const int64_t own[] = {sizeof(Linear), sizeof(Rows),  sizeof(Attention),
                           sizeof(Layer),  sizeof(Model), sizeof(Step)};
    memcpy(sizes, own, sizeof own);
}

// Returns a new arena, or null if there is no memory.
void *triolet_arena_new(void) { return new (std::nothrow) Arena; }

void triolet_arena_free(void *arena) { delete (Arena *)arena; }

// Returns the size in bytes that an arena needs for a step. Of the step, only the rows and the
// counts are read.
int64_t triolet_step_bytes(int64_t kind, const Model *model, const Step *step) {
    return kind ? step_bytes<bf16>(*model, *step) : step_bytes<float>(*model, *step);
}

// Runs one forward. Returns 0, or 1 if there was no memory; then nothing was computed.
int triolet_step(int64_t kind, const Model *model, const Step *step, void *arena) {
    return kind ? run_step<bf16>(*model, *step, *(Arena *)arena)
                : run_step<float>(*model, *step, *(Arena *)arena);
}

// Computes the attention of one layer for stock modules. Each tensor is [num_tokens][heads][width]
// in the cache's dtype. Returns 0, or 1 if there was no memory.
int triolet_attend(int64_t kind, const Attention *call, const Rows *rows, const void *query,
                   const void *key, const void *value, void *out, int64_t num_threads,
                   void *arena) {
    return kind ? run_attention<bf16>(*call, *rows, (const bf16 *)query, (const bf16 *)key,
                                      (const bf16 *)value, (bf16 *)out, num_threads,
                                      *(Arena *)arena)
                : run_attention<float>(*call, *rows, (const float *)query, (const float *)key,
                                       (const float *)value, (float *)out, num_threads,
                                       *(Arena *)arena);
}

// Computes one linear layer for stock modules. ``x`` is [rows][inputs] and ``out`` is
// [rows][outputs], both in the layer's dtype. Returns 0, or 1 if there was no memory.
int triolet_linear(int64_t kind, const Linear *layer, const void *x, int64_t rows, void *out,
                   int64_t num_threads, void *arena) {
    return kind ? run_linear<bf16>(*layer, (const bf16 *)x, rows, (bf16 *)out, num_threads,
                                   *(Arena *)arena)
                : run_linear<float>(*layer, (const float *)x, rows, (float *)out, num_threads,
                                    *(Arena *)arena);
}

}  // extern "C"
