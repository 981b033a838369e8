// Vectors of 16 lanes for processors whose registers are narrower. Such a vector is a few registers,
// and its operations are theirs, so that the compiler keeps it in registers. GCC would keep its own
// vectors in memory, if they are wider than a register.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace triolet {

// ``BYTES`` of numbers in registers of ``REGISTER`` bytes.
template <class E, int BYTES, int REGISTER>
struct Lanes {
    typedef E Part __attribute__((vector_size(REGISTER)));
    template <class F>
    using As = Lanes<F, BYTES, REGISTER>;
    typedef E Number;

    static constexpr int PARTS = BYTES / REGISTER, LANES_OF_PART = REGISTER / (int)sizeof(E);
    Part part[PARTS];

    // Returns the vector whose registers ``make`` returns. There is no loop, because GCC unrolls
    // loops only after it has decided what lies in memory.
    template <class Make>
    __attribute__((always_inline)) static inline Lanes each(Make make) {
        return each(make, std::make_integer_sequence<int, PARTS>{});
    }

    template <class Make, int... I>
    __attribute__((always_inline)) static inline Lanes each(Make make,
                                                            std::integer_sequence<int, I...>) {
        return {{make(I)...}};
    }

    __attribute__((always_inline)) static inline Lanes from(const void *memory) {
        return each([=](int i) {
            Part own;
            memcpy(&own, (const char *)memory + i * REGISTER, REGISTER);
            return own;
        });
    }

    // Stores register by register. To be copied as a whole, a vector would have to lie in memory, and
    // then GCC keeps it there in the loop before, too.
    __attribute__((always_inline)) inline void to(void *memory) const {
        to(memory, std::make_integer_sequence<int, PARTS>{});
    }

    template <int... I>
    __attribute__((always_inline)) inline void to(void *memory,
                                                  std::integer_sequence<int, I...>) const {
        (memcpy((char *)memory + I * REGISTER, &part[I], REGISTER), ...);
    }

    __attribute__((always_inline)) static inline Lanes splat(E value) {
        return each([=](int) { return value - Part{}; });
    }

    // The same bits as numbers of another type.
    template <class F>
    __attribute__((always_inline)) explicit operator Lanes<F, BYTES, REGISTER>() const {
        typedef typename As<F>::Part Other;
        return As<F>::each([this](int i) { return (Other)part[i]; });
    }

    E operator[](int lane) const { return part[lane / LANES_OF_PART][lane % LANES_OF_PART]; }

// Two vectors, or a vector and a number.
#define TRIOLET_OPERATOR(OPERATOR)                                                              \
    __attribute__((always_inline)) friend inline Lanes operator OPERATOR(Lanes a, Lanes b) {    \
        return each([=](int i) { return a.part[i] OPERATOR b.part[i]; });                       \
    }                                                                                           \
    __attribute__((always_inline)) friend inline Lanes operator OPERATOR(Lanes a, E b) {        \
        return each([=](int i) { return a.part[i] OPERATOR b; });                               \
    }                                                                                           \
    __attribute__((always_inline)) friend inline Lanes operator OPERATOR(E a, Lanes b) {        \
        return each([=](int i) { return a OPERATOR b.part[i]; });                               \
    }                                                                                           \
    template <class Other>                                                                      \
    __attribute__((always_inline)) Lanes &operator OPERATOR##=(Other other) {                   \
        return *this = *this OPERATOR other;                                                    \
    }
    TRIOLET_OPERATOR(+)
    TRIOLET_OPERATOR(-)
    TRIOLET_OPERATOR(*)
    TRIOLET_OPERATOR(/)
    TRIOLET_OPERATOR(&)
    TRIOLET_OPERATOR(|)
    TRIOLET_OPERATOR(<<)
    TRIOLET_OPERATOR(>>)
#undef TRIOLET_OPERATOR

    __attribute__((always_inline)) Lanes operator-() const {
        return each([this](int i) { return -part[i]; });
    }

    __attribute__((always_inline)) Lanes operator~() const {
        return each([this](int i) { return ~part[i]; });
    }

// A comparison gives -1 where it holds, and 0 elsewhere, as integers.
#define TRIOLET_COMPARISON(OPERATOR)                                                               \
    __attribute__((always_inline)) friend inline As<int32_t> operator OPERATOR(Lanes a, Lanes b) { \
        return As<int32_t>::each([=](int i) { return a.part[i] OPERATOR b.part[i]; });             \
    }                                                                                              \
    __attribute__((always_inline)) friend inline As<int32_t> operator OPERATOR(Lanes a, E b) {     \
        return As<int32_t>::each([=](int i) { return a.part[i] OPERATOR b; });                     \
    }
    TRIOLET_COMPARISON(<)
    TRIOLET_COMPARISON(>)
    TRIOLET_COMPARISON(>=)
    TRIOLET_COMPARISON(==)
    TRIOLET_COMPARISON(!=)
#undef TRIOLET_COMPARISON
};

// Picks lanes of two registers. Lane i is that of ``a`` or ``b`` which ``of`` (i) names; those of
// ``b`` come after those of ``a``.
template <class Of, class Part, int... I>
__attribute__((always_inline)) static inline Part mix(Part a, Part b,
                                                      std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Of::of(I)...);
#else
    typedef int32_t Places __attribute__((vector_size(sizeof(Part))));
    return __builtin_shuffle(a, b, (Places){Of::of(I)...});
#endif
}

template <int STRIDE, int COUNT, bool IS_OTHER>
struct FoldPlaces {
    static constexpr int of(int lane) {
        return (IS_OTHER ? lane ^ STRIDE : lane) + (lane & STRIDE ? COUNT : 0);
    }
};

// Does for such vectors what `fold` in simd.h says.
template <int STRIDE, class V>
__attribute__((always_inline)) static inline V fold_lanes(V a, V b) {
    constexpr int COUNT = V::LANES_OF_PART;
    if constexpr (STRIDE < COUNT) {
        constexpr std::make_integer_sequence<int, COUNT> lanes{};
        return V::each([=](int i) {
            return mix<FoldPlaces<STRIDE, COUNT, false>>(a.part[i], b.part[i], lanes) +
                   mix<FoldPlaces<STRIDE, COUNT, true>>(a.part[i], b.part[i], lanes);
        });
    } else {
        constexpr int OTHER = STRIDE / COUNT;
        return V::each([=](int i) {
            return i & OTHER ? b.part[i] + b.part[i ^ OTHER] : a.part[i] + a.part[i ^ OTHER];
        });
    }
}

}  // namespace triolet
