// Draws a token from a row of logits, as `engine.worker.sampling.draw_rows` does without kernels.
//
// Rule: a seeded draw gives the same token as there, as long as the two best scores with noise do not
// differ by a rounding alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace triolet {

constexpr long DRAW_BLOCK = 128;  // an unseeded draw draws one block of tokens, then a token
// e^3e-4. A weight computed in float32 may be too small by this factor: the winner still passes.
constexpr float SLACK = 1.0003f;

// A row of logits as a draw sees it: divided by ``heat``, with the ``best`` of the quotients. A token
// counts if its weight, exp(quotient - best), is at least ``least``.
struct Scores {
    const float *logits;
    int64_t count;
    float heat, best, least;

    float score(long token) const { return logits[token] / heat; }

    // Returns the weights of 16 tokens from ``first`` on, 0 of those beyond the end.
    v16 weights(long first) const {
        float own[LANES];
        const float *from = logits + first;
        if (count - first < LANES) {
            for (long i = 0; i < LANES; i++) own[i] = first + i < count ? from[i] : -INFINITY;
            from = own;
        }
        const v16 weight = exp16(load(from) / heat - best);
        return pick(weight < least, splat(0.0f), weight);
    }
};

// Returns the first of ``count`` numbers with which the running sum exceeds ``uniform`` of the total.
// That number is never 0.
static inline long inverse_cdf(const float *numbers, long count, double uniform) {
    double total = 0.0, running = 0.0;
    for (long i = 0; i < count; i++) total += numbers[i];
    long last = 0;  // the last index of a number above 0: the result where rounding ends the loop
    for (long i = 0; i < count; i++) {
        if (numbers[i] > 0.0f) last = i;
        running += numbers[i];
        if (running > total * uniform) return i;
    }
    return last;
}

// Returns the sum of the weights of `DRAW_BLOCK` tokens from ``first`` on.
static inline float sum_of_block(const Scores &scores, long first) {
    v16 total = splat(0.0f);
    for (long i = first; i < first + DRAW_BLOCK && i < scores.count; i += LANES)
        total += scores.weights(i);
    return sum(total);
}

// Returns the sum of all weights.
static inline double mass_of(const Scores &scores) {
    double total = 0.0;
    for (long first = 0; first < scores.count; first += DRAW_BLOCK)
        total += sum_of_block(scores, first);
    return total;
}

// Draws a token by two numbers in [0, 1): one for a block of tokens, and one for a token in it.
static inline int64_t draw_by_cdf(const Scores &scores, double of_block, double of_token) {
    std::vector<float> sums((scores.count + DRAW_BLOCK - 1) / DRAW_BLOCK);
    for (size_t block = 0; block < sums.size(); block++)
        sums[block] = sum_of_block(scores, block * DRAW_BLOCK);
    const long first = inverse_cdf(sums.data(), sums.size(), of_block) * DRAW_BLOCK;
    float weights[DRAW_BLOCK] = {};
    for (long i = first; i < first + DRAW_BLOCK && i < scores.count; i += LANES)
        store(weights + i - first, scores.weights(i));
    return first + inverse_cdf(weights, DRAW_BLOCK, of_token);
}

// Turns places on the walk of `engine.worker.sampling.noise` into 64 bits of noise, by its rounds.
template <class V>
static inline V mix_bits(V z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

// Returns the exponential noise of a token in the draw of ``key``.
static inline double exponential(uint64_t key, long token) {
    const uint64_t bits = mix_bits(key + (uint64_t)(token + 1) * GOLDEN) >> 12;
    return -std::log1p(-((double)bits + 0.5) * 0x1p-52);
}

// Returns 31 bits of the noise of 16 tokens from ``first`` on, the highest ones.
static inline v16 rough_noise(uint64_t key, long first) {
    constexpr int WIDTH = 4;
    typedef uint64_t places __attribute__((vector_size(8 * WIDTH)));
    uint64_t mixed[LANES];
    const places steps = {0, GOLDEN, 2 * GOLDEN, 3 * GOLDEN};
    for (int i = 0; i < LANES; i += WIDTH) {
        const places own = mix_bits(steps + (key + (uint64_t)(first + i + 1) * GOLDEN)) >> 33;
        memcpy(mixed + i, &own, sizeof own);
    }
    int32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)mixed[i];
    return to_floats(load_as<i16v>(bits));
}

// Draws the token of the highest score plus Gumbel noise, -log(E) of an exponential E = -log1p(-u).
// Let B be the highest sum so far, at first that of the likeliest token, ``top``. Another token
// reaches B only if E is at most exp(score - B), and E is never below u. So one comparison of a rough
// u with a weight leaves the few tokens that can still win. Only these need logarithms.
static inline int64_t draw_by_noise(const Scores &scores, long top, uint64_t key) {
    const double lead = exponential(key, top);
    float limit = (float)(lead * SLACK * 0x1p31);  // rough noise counts to 2^31, rounded down
    int64_t winner = top;
    double highest_seen = scores.score(top) - std::log(lead);
    for (long first = 0; first < scores.count; first += LANES) {
        const v16 weights = scores.weights(first);
        const v16 room = pick(weights > 0.0f, weights * limit - rough_noise(key, first),
                              splat(-1.0f));
        if (highest(room) < 0.0f) continue;
        float own[LANES];
        store(own, room);
        for (long i = 0; i < LANES; i++) {
            const long token = first + i;
            if (own[i] < 0.0f || token == top) continue;
            const double value = scores.score(token) - std::log(exponential(key, token));
            if (value < highest_seen || (value == highest_seen && token > winner)) continue;
            winner = token, highest_seen = value;
            limit = (float)(std::exp(scores.best - value) * SLACK * 0x1p31);
        }
    }
    return winner;
}

}  // namespace triolet
