// Replays recorded cases of the kernels: `kernel_replay LIBRARY CASES`. Prints each case that fails,
// and a last line with the number of cases; exits with 1 if one failed.
//
// `tests.support.kernel_cases` writes the file: whole numbers (8 bytes), numbers (8 bytes, double)
// and arrays (a count of bytes, then the bytes), in the order in which they are read here.
#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <vector>

#include "stock.h"

using namespace triolet;

// What of the library is called, as engine/kernels/triolet.cpp defines it.
extern "C" {
const char *triolet_kind(void);
const char *triolet_integer_kind(void);
int64_t triolet_packed_numbers(int64_t, int64_t, int64_t);
void triolet_pack(int64_t, int64_t, const void *, int64_t, int64_t, int64_t, void *);
int64_t triolet_small_bytes(int64_t, int64_t, int64_t);
void triolet_pack_small(int64_t, const uint8_t *, int64_t, int64_t, int64_t, uint8_t *);
int64_t triolet_scale_bytes(int64_t, int64_t, int64_t, int64_t);
void triolet_pack_scales(const uint16_t *, int64_t, int64_t, int64_t, int64_t, uint16_t *);
void triolet_pack_nested(int64_t, const int8_t *, const uint16_t *, int64_t, int64_t, int64_t, int64_t,
                         int64_t, uint8_t *);
void *triolet_arena_new(void);
void triolet_arena_free(void *);
int triolet_attend(int64_t, const Attention *, const Rows *, const void *, const void *,
                   const void *, void *, int64_t, void *);
int triolet_linear(int64_t, const Linear *, const void *, int64_t, void *, int64_t, void *);
}

struct Reader {
    FILE *file;

    void read(void *to, size_t size) {
        if (size && fread(to, 1, size, file) != size) {
            printf("the file of cases ends too early\n");
            exit(2);
        }
    }

    int64_t whole() {
        int64_t value;
        read(&value, sizeof value);
        return value;
    }

    double number() {
        double value;
        read(&value, sizeof value);
        return value;
    }

    template <class T>
    std::vector<T> array() {
        std::vector<T> values(whole() / sizeof(T));
        read(values.data(), values.size() * sizeof(T));
        return values;
    }

    std::string text() {
        const auto own = array<char>();
        return std::string(own.begin(), own.end());
    }
};

static void *library;

template <class Function>
static Function find(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        printf("the library has no %s\n", name);
        exit(2);
    }
    return (Function)found;
}

template <class T>
static T *or_null(std::vector<T> &values) {
    return values.empty() ? nullptr : values.data();
}

// Numbers of the kernels' dtype, as bytes.
typedef std::vector<uint8_t> Raw;

static double number_at(const Raw &values, int64_t kind, size_t index) {
    if (kind) return to_float(((const bf16 *)values.data())[index]);
    return ((const float *)values.data())[index];
}

static size_t size_of(int64_t kind) { return kind ? sizeof(bf16) : sizeof(float); }

// Compares with numbers in float64. Returns why it fails, or "".
static std::string compare(const Raw &out, int64_t kind, const std::vector<double> &wanted,
                           double tolerance) {
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double difference = number_at(out, kind, i) - wanted[i];
        error += difference * difference;
        norm += wanted[i] * wanted[i];
    }
    if (sqrt(error) <= tolerance * sqrt(norm)) return "";
    return "the relative error is " + std::to_string(sqrt(error / norm));
}

// Compares bit for bit.
static std::string compare_bits(const Raw &out, const Raw &wanted) {
    for (size_t i = 0; i < wanted.size(); i++)
        if (out[i] != wanted[i]) return "byte " + std::to_string(i) + " differs";
    return "";
}

static std::string replay_linear(Reader &from, void *arena) {
    Linear linear{};
    const int64_t kind = from.whole(), bits = from.whole(), rows = from.whole();
    linear.kind = from.whole();
    linear.outputs = from.whole();
    linear.inputs = from.whole();
    linear.group = from.whole();
    linear.nested = from.whole();
    linear.centre = from.whole();
    linear.bits = bits;
    auto weight = from.array<uint8_t>();
    auto scales = from.array<uint8_t>(), offsets = from.array<uint8_t>();
    auto factors = from.array<uint16_t>(), offset_factors = from.array<uint16_t>();
    auto table = from.array<int8_t>();
    auto bias = from.array<float>();
    auto x = from.array<uint8_t>();
    const auto exact = from.array<uint8_t>();
    const auto wanted = from.array<double>();
    const double tolerance = from.number();

    std::vector<uint8_t> panels;
    std::vector<uint8_t> packed_scales, packed_offsets;
    if (bits) {
        panels.resize(find<decltype(&triolet_small_bytes)>("triolet_small_bytes")(
            bits, linear.outputs, linear.inputs));
        find<decltype(&triolet_pack_small)>("triolet_pack_small")(
            bits, weight.data(), linear.outputs, linear.inputs, 0, panels.data());
        const size_t count = find<decltype(&triolet_scale_bytes)>("triolet_scale_bytes")(
            linear.outputs, linear.inputs, linear.group, linear.nested);
        auto pack = [&](int64_t kind, std::vector<uint8_t> &stored, std::vector<uint16_t> &own,
                        std::vector<uint8_t> &to) {
            if (stored.empty()) return;
            to.resize(count);
            if (linear.nested)
                find<decltype(&triolet_pack_nested)>("triolet_pack_nested")(
                    kind, (const int8_t *)stored.data(), own.data(), linear.outputs, linear.inputs,
                    linear.group, linear.nested, 0, to.data());
            else
                find<decltype(&triolet_pack_scales)>("triolet_pack_scales")(
                    (const uint16_t *)stored.data(), linear.outputs, linear.inputs, linear.group, 0,
                    (uint16_t *)to.data());
        };
        pack(0, scales, factors, packed_scales);
        pack(1, offsets, offset_factors, linear.nested ? packed_scales : packed_offsets);
    } else {
        panels.resize(find<decltype(&triolet_packed_numbers)>("triolet_packed_numbers")(
                          kind, linear.outputs, linear.inputs) * size_of(kind || linear.kind));
        find<decltype(&triolet_pack)>("triolet_pack")(kind, linear.kind, weight.data(),
                                                      linear.outputs, linear.inputs, 0,
                                                      panels.data());
    }
    bias.resize(bias.empty() ? 0 : (linear.outputs + PANEL - 1) / PANEL * PANEL);
    linear.weight = panels.data();
    linear.scales = or_null(packed_scales);
    linear.offsets = or_null(packed_offsets);
    linear.table = or_null(table);
    linear.bias = or_null(bias);
    Raw out(rows * linear.outputs * size_of(kind));
    if (find<decltype(&triolet_linear)>("triolet_linear")(kind, &linear, x.data(), rows, out.data(),
                                                          1, arena))
        return "there is no memory";
    return exact.empty() ? compare(out, kind, wanted, tolerance) : compare_bits(out, exact);
}

static std::string replay_attention(Reader &from, void *arena) {
    Attention call{};
    const int64_t kind = from.whole();
    call.kind = from.whole();
    call.heads = from.whole();
    call.kv_heads = from.whole();
    call.width = from.whole();
    call.window = from.whole();
    call.scaling = (float)from.number();
    call.softcap = (float)from.number();
    auto starts = from.array<int64_t>(), ends = from.array<int64_t>();
    auto offsets = from.array<int64_t>(), tables = from.array<int64_t>();
    auto slots = from.array<int64_t>(), untils = from.array<int64_t>();
    Rows rows{starts.data(), ends.data(), offsets.data(), tables.data(), slots.data(),
              untils.data(), (int64_t)starts.size(), (int64_t)(tables.size() / starts.size()), from.whole(),
              (int64_t)slots.size(), from.whole()};
    auto keys = from.array<uint8_t>(), values = from.array<uint8_t>();
    auto query = from.array<uint8_t>(), key = from.array<uint8_t>(), value = from.array<uint8_t>();
    auto key_scales = from.array<float>(), value_scales = from.array<float>();
    const auto sinks = from.array<float>();
    const auto wanted = from.array<double>();
    const double tolerance = from.number();
    call.key_scales = or_null(key_scales);
    call.value_scales = or_null(value_scales);
    call.keys = keys.data();
    call.values = values.data();
    call.sinks = sinks.empty() ? nullptr : sinks.data();
    Raw out(query.size());
    if (find<decltype(&triolet_attend)>("triolet_attend")(kind, &call, &rows, query.data(),
                                                          key.data(), value.data(), out.data(), 1,
                                                          arena))
        return "it was refused";
    return compare(out, kind, wanted, tolerance);
}

int main(int, char **arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        return 2;
    }
    Reader from{fopen(arguments[2], "rb")};
    if (!from.file) {
        printf("%s cannot be read\n", arguments[2]);
        return 2;
    }
    void *arena = find<decltype(&triolet_arena_new)>("triolet_arena_new")();
    const int64_t count = from.whole();
    int64_t failed = 0;
    for (int64_t i = 0; i < count; i++) {
        const std::string name = from.text();
        const bool is_linear = from.whole() == 0;
        const std::string why = is_linear ? replay_linear(from, arena) : replay_attention(from, arena);
        if (why.empty()) continue;
        failed++;
        printf("%s: %s\n", name.c_str(), why.c_str());
    }
    find<decltype(&triolet_arena_free)>("triolet_arena_free")(arena);
    printf("%ld of %ld cases failed, %s, %s\n", (long)failed, (long)count,
           find<decltype(&triolet_kind)>("triolet_kind")(),
           find<decltype(&triolet_integer_kind)>("triolet_integer_kind")());
    return failed ? 1 : 0;
}
