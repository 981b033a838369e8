// The memory of a model's steps, and how a step divides it.
#pragma once

#include <cstdlib>

namespace triolet {

// The memory that a model's steps use, one step at a time. It grows and never shrinks.
struct Arena {
    char *memory = nullptr;
    size_t size = 0;

    ~Arena() { free(memory); }

    bool reserve(size_t wanted) {
        if (wanted <= size) return true;
        wanted = (wanted + 63) / 64 * 64;  // `aligned_alloc` takes multiples of the alignment
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

}  // namespace triolet
