// The functions that Python calls through ctypes. This file includes every other one, so that one
// compilation makes the library. A ``kind`` of 0 is float32, 1 is bfloat16.
#include <sys/mman.h>
#include <unistd.h>

#include <new>

#include "draws.h"
#include "pack_blocks.h"
#include "stock.h"

using namespace triolet;

// Returns the place of one of ``count`` panels. The panels of a pair, gate and up, alternate.
static long place_of(long panel, long count, long pair) {
    return pair ? (panel % (count / pair)) * pair + panel / (count / pair) : panel;
}

// Calls ``put(place, first output, number of outputs)`` for each panel, in parallel.
template <class Put>
static void each_panel(long outputs, long pair, Put put) {
    const long count = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (long panel = 0; panel < count; panel++) {
        const long first = panel * PANEL, left = outputs - first;
        put(place_of(panel, count, pair), first, left < PANEL ? left : (long)PANEL);
    }
}

// Packs weights of type W for rows of type T.
template <class T, class W>
static void pack(const W *weight, long outputs, long inputs, long pair, W *panels) {
    const long depth = padded_depth<T>(inputs);
    each_panel(outputs, pair, [&](long place, long first, long count) {
        W *to = panels + place * depth * PANEL;
        memset(to, 0, depth * PANEL * sizeof *to);
        for (long lane = 0; lane < count; lane++) {
            const W *from = weight + (first + lane) * inputs;
            for (long k = 0; k < inputs; k++) to[panel_index<T>(k, lane)] = from[k];
        }
    });
}

#pragma GCC visibility push(default)  // all else is hidden (`engine.worker.forward.variants`)
extern "C" {

// Returns the name of the instructions that this library multiplies floats with, for people to
// read: "AMX", or a name by `float_kind`.
const char *triolet_kind(void) { return has_amx() ? "AMX" : float_kind(); }

// Returns the instructions that this library multiplies integers with, as `integer_kind` names them.
const char *triolet_integer_kind(void) { return integer_kind(); }

// Returns how many numbers the panels of a layer have, with their padding.
int64_t triolet_packed_numbers(int64_t kind, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    return panels * PANEL * (kind ? padded_depth<bf16>(inputs) : padded_depth<float>(inputs));
}

// Packs ``weight`` [outputs][inputs] into panels (see matmul.h) for rows of a ``kind``; its numbers
// are of a `WeightKind`. With a ``pair`` of 2, the first half of the outputs are gates and the
// second half ups, each a multiple of 16; otherwise ``pair`` is 0.
void triolet_pack(int64_t kind, int64_t weight_kind, const void *weight, int64_t outputs,
                  int64_t inputs, int64_t pair, void *panels) {
    if (kind)
        pack<bf16>((const bf16 *)weight, outputs, inputs, pair, (bf16 *)panels);
    else if (weight_kind)
        pack<float>((const bf16 *)weight, outputs, inputs, pair, (bf16 *)panels);
    else
        pack<float>((const float *)weight, outputs, inputs, pair, (float *)panels);
}

// Returns how many bytes the panels of a layer with weights of ``bits`` have (see small_weights.h).
int64_t triolet_small_bytes(int64_t bits, int64_t outputs, int64_t inputs) {
    return (outputs + PANEL - 1) / PANEL * panel_bytes(bits, inputs);
}

// Packs ``numbers`` [outputs][inputs] of a byte each into panels of 8 ``bits``, or 2 to 6: int8, or
// codes. ``pair`` is as for `triolet_pack`.
void triolet_pack_small(int64_t bits, const uint8_t *numbers, int64_t outputs, int64_t inputs,
                        int64_t pair, uint8_t *panels) {
    const long stride = panel_bytes(bits, inputs);
    const long together = bits == 5 ? 32 : bits == 4 || bits == 8 ? 8 : 16;
    each_panel(outputs, pair, [&](long place, long first, long count) {
        uint8_t *panel = panels + place * stride;
        memset(panel, bits == 8 ? ZERO : 0, stride);
        for (long lane = 0; lane < count; lane++) {
            const uint8_t *from = numbers + (first + lane) * inputs;
            for (long k = 0; k < inputs; k++) {
                uint8_t *to = panel + k / together * together * PANEL * bits / 8 + lane * 4 + k % 4;
                const long quad = k % together / 4;
                if (bits == 8) {
                    to[quad * 64] = (uint8_t)(from[k] + ZERO);
                    continue;
                }
                if (bits < 4) {
                    to[0] |= (from[k] & 3) << 2 * quad;
                    const long at = lane * 4 + k % 4;
                    if (bits == 3) to[64 - at + at / 2] |= (from[k] >> 2) << (quad + at % 2 * 4);
                    continue;
                }
                to[quad / 2 * 64] |= (from[k] & 15) << (quad % 2 ? 4 : 0);
                if (bits > 4) to[together * 8] |= (from[k] >> 4) << (quad * (bits - 4));
            }
        }
    });
}

// Returns how many bytes the packed scales of a layer have; as many have its offsets, unless they are
// nested, too (`Linear::nested`).
int64_t triolet_scale_bytes(int64_t outputs, int64_t inputs, int64_t group, int64_t nested) {
    return (outputs + PANEL - 1) / PANEL * scale_bytes(inputs, group, nested);
}

// Packs scales or offsets [outputs][groups] of half precision into panels [groups][16], with zeros
// for the groups of the padding.
void triolet_pack_scales(const uint16_t *scales, int64_t outputs, int64_t inputs, int64_t group,
                         int64_t pair, uint16_t *panels) {
    const long stored = (inputs + group - 1) / group, room = num_groups(inputs, group) * PANEL;
    each_panel(outputs, pair, [&](long place, long first, long count) {
        uint16_t *to = panels + place * room;
        memset(to, 0, room * sizeof *to);
        for (long lane = 0; lane < count; lane++)
            for (long own = 0; own < stored; own++)
                to[own * PANEL + lane] = scales[(first + lane) * stored + own];
    });
}

// Packs nested scales or offsets, int8 [outputs][groups], and their factors [outputs][inputs / NESTED].
// Those of ``kind`` 0 are scales and those of 1 offsets; the memory is zeroed before.
void triolet_pack_nested(int64_t kind, const int8_t *scales, const uint16_t *factors,
                         int64_t outputs, int64_t inputs, int64_t group, int64_t nested,
                         int64_t pair, uint8_t *panels) {
    const long room = scale_bytes(inputs, group, nested);
    const long groups = (inputs + group - 1) / group, parts = (inputs + NESTED - 1) / NESTED;
    const NestedPlaces places(group, nested);
    each_panel(outputs, pair, [&](long place, long first, long count) {
        uint8_t *to = panels + place * room;
        for (long lane = kind * PANEL; lane < kind * PANEL + count; lane++) {
            const long output = first + lane - kind * PANEL;
            for (long own = 0; own < groups; own++) {
                const long input = own * group;
                ((uint16_t *)(to + places.factors(input)))[lane] =
                    factors[output * parts + input / NESTED];
                const uint8_t scale = (uint8_t)scales[output * groups + own];
                if (nested == 3)
                    to[places.scales(input) + lane % PANEL] |= kind ? scale << 4 : scale & 15;
                else
                    to[places.scales(input) + lane] = scale;
            }
        }
    });
}

// Packs the rows of ``count`` tensors in blocks of one kind as one layer. Sizes and ``pair`` are as
// above; ``offsets`` is null if there are none, or they are nested. Of all panels it packs those at the
// places ``begin`` to ``end`` - 1, and the memory begins with the first of them. Returns 1, or 0 if a
// scale or an offset is not finite.
int triolet_pack_blocks(const BlockRows *sources, int64_t count, int64_t outputs, int64_t inputs,
                        int64_t pair, int64_t begin, int64_t end, uint8_t *panels, uint8_t *scales,
                        uint8_t *offsets) {
    PackedPanels to{panels, scales, offsets, {}, inputs};
    if (!find_form(sources[0].kind, &to.form)) return 0;
    int are_finite = 1;
    const long number = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 4) reduction(& : are_finite)
    for (long place = begin; place < end; place++) {
        const long panel = pair ? place % pair * (number / pair) + place / pair : place;
        const long first = panel * PANEL, left = outputs - first;
        are_finite &= pack_panel(sources, count, first, left < PANEL ? left : (long)PANEL, to,
                                 place - begin);
    }
    return are_finite;
}

// Returns a number of ``count`` bytes that changes with them, except for 1 of 2^32 changes.
uint64_t triolet_checksum(const uint8_t *from, int64_t count) {
    const long parts = (count + CHECKED_AT_ONCE - 1) / CHECKED_AT_ONCE;
    uint64_t total = (uint64_t)count;
#pragma omp parallel for schedule(dynamic, 16) reduction(^ : total)
    for (long part = 0; part < parts; part++) {
        const long first = part * CHECKED_AT_ONCE, left = count - first;
        const uint64_t own =
            checksum_of(from + first, left < CHECKED_AT_ONCE ? left : CHECKED_AT_ONCE);
        total ^= (own ^ (uint64_t)part * 0xff51afd7ed558ccdull) * 0xc4ceb9fe1a85ec53ull;
    }
    return total;
}

// Returns 1 if all pages of a mapped file are in memory, and has the process map them; else 0. A
// page is touched for every MAPPED_AT_ONCE bytes, which Linux maps at once, and not by one call of
// madvise, during which no other thread could allocate memory.
int64_t triolet_in_memory(const uint8_t *from, int64_t count) {
    constexpr int64_t PAGES = 4096, MAPPED_AT_ONCE = 1 << 16;
    const int64_t page = sysconf(_SC_PAGESIZE), step = PAGES * page;
    unsigned char has[PAGES];
    for (int64_t at = 0; at < count; at += step) {
        const int64_t size = count - at < step ? count - at : step;
        if (mincore((void *)(from + at), size, has)) return 0;
        for (int64_t i = 0; i * page < size; i++)
            if (!(has[i] & 1)) return 0;
    }
    for (int64_t at = 0; at < count; at += MAPPED_AT_ONCE) (void)*(const volatile uint8_t *)(from + at);
    return 1;
}

// Reads ``count`` texts of a GGUF file's header, each behind its length in 8 bytes. Copies each to
// ``to``, if that is not null, with a zero byte behind it. Returns the number of bytes read; -1 if
// the texts do not end within ``size`` bytes, or one that is copied has a zero byte.
int64_t triolet_texts(const uint8_t *from, int64_t size, int64_t count, uint8_t *to) {
    int64_t place = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t length;
        if (size - place < (int64_t)sizeof length) return -1;
        memcpy(&length, from + place, sizeof length);
        place += sizeof length;
        if (length > (uint64_t)(size - place)) return -1;
        if (to) {
            if (memchr(from + place, 0, length)) return -1;
            memcpy(to, from + place, length);
            to += length;
            *to++ = 0;
        }
        place += length;
    }
    return place;
}

// Returns what a packed layer's bytes depend on beside its weights: the layout's version, and what
// is added to numbers of 8 bits, which the processor decides.
int64_t triolet_layout(void) { return PACKED_LAYOUT << 8 | ZERO; }

// Writes the sizes of the structs that ctypes mirrors, in the order of
// `engine.worker.forward.kernel_structs.MIRRORED`.
void triolet_sizes(int64_t *sizes) {
    const int64_t own[] = {sizeof(Linear), sizeof(Rows),  sizeof(Attention), sizeof(Experts),
                           sizeof(Layer),  sizeof(Model), sizeof(Step), sizeof(Expansion),
                           sizeof(Adapted), sizeof(Group), sizeof(Convolution),
                           sizeof(StateRows), sizeof(BlockRows)};
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

// Runs one forward. Returns a `Status`: with OUT_OF_BOUNDS or NO_MEMORY, nothing was computed.
int triolet_step(int64_t kind, const Model *model, const Step *step, void *arena) {
    return kind ? run_step<bf16>(*model, *step, *(Arena *)arena)
                : run_step<float>(*model, *step, *(Arena *)arena);
}

// Computes the attention of one layer for stock modules. Each tensor is [num_tokens][heads][width].
// Returns a `Status`.
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
// [rows][outputs], both in the layer's dtype. Returns a `Status`.
int triolet_linear(int64_t kind, const Linear *layer, const void *x, int64_t rows, void *out,
                   int64_t num_threads, void *arena) {
    return kind ? run_linear<bf16>(*layer, (const bf16 *)x, rows, (bf16 *)out, num_threads,
                                   *(Arena *)arena)
                : run_linear<float>(*layer, (const float *)x, rows, (float *)out, num_threads,
                                    *(Arena *)arena);
}

// Returns the sum of exp(logit / heat - best) of a row. ``best`` is the highest of the quotients. A
// token counts, here and below, if its probability is at least ``least`` times the best one.
double triolet_mass(const float *logits, int64_t count, float heat, float best, float least) {
    return mass_of({logits, count, heat, best, least});
}

// Draws a token of a row by two numbers in [0, 1).
int64_t triolet_draw_by_cdf(const float *logits, int64_t count, float heat, float best, float least,
                            double of_block, double of_token) {
    return draw_by_cdf({logits, count, heat, best, least}, of_block, of_token);
}

// Draws a token of a row by the noise of ``key``. ``top`` is the token of the highest logit.
int64_t triolet_draw_by_noise(const float *logits, int64_t count, float heat, float best,
                              float least, int64_t top, uint64_t key) {
    return draw_by_noise({logits, count, heat, best, least}, top, key);
}

}  // extern "C"
#pragma GCC visibility pop
