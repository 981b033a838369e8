"""Samples on a CPU with numpy, one row at a time and without threads.

One row of logits fits into a core's cache, a batch does not. And torch starts its threads for each
operation on more than 32,768 numbers; beside two busy processes, a draw then took 95 ms instead of
0.4 ms (151,936 tokens, seeded). So each row is finished before the next begins.

Rule 1: Python does not loop over tokens; a row takes a few calls on its whole vocabulary. If the
compiled kernels are loaded, a draw from a whole vocabulary is one call of a kernel.
Rule 2: the token of a seeded or greedy row depends on its logits and `SampleRow` alone, and not on
the batch, the order of its rows or the generator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from engine.core.text.types import Sampling
from engine.worker.forward import native
from engine.worker.sampling import noise
from engine.worker.sampling.sample_row import (
    LOGIT_MAX,
    TEMPERATURE_MIN,
    NothingToSample,
    has_top_k,
    is_listed,
    needs_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.worker.sampling.sample_row import SampleRow

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Ids = NDArray[np.int64]

# For a top_p without top_k, this many of the likeliest tokens are sorted first. In most real rows,
# 256 tokens hold 0.95 of the mass.
PREFIX = 256
_GROWTH = 8  # a prefix that is too short grows by this factor: 256, 2,048, 16,384, all
_BLOCK = 128  # tokens in a block of the unseeded draw; 64 to 512 are equally fast
_SLAB = 1 << 14  # tokens hashed at once: 128 KB of uint64 stay in a core's cache
# exp(3e-4): by this factor a weight computed in float32 may be too small, and still the token with
# the highest score plus noise is among the survivors (`_survivors`).
_SLACK = 1.0003
NO_LIMITS = Sampling()


def sample_rows(logits: Floats, rows: Sequence[SampleRow], uniforms: Doubles) -> list[int]:
    """Sample one token for each row of ``logits`` [rows, vocab]. ``uniforms`` [unseeded rows, 2]
    are numbers in [0, 1), used in the order of the rows.

    Raises:
        NothingToSample: A row has no token that can be sampled, or is not finite.
    """
    logits = np.ascontiguousarray(logits)  # as the kernels need them
    tokens, draws = [], iter(uniforms)
    with np.errstate(over="ignore"):  # a logit of -3e38 may overflow to -inf
        for index, row in enumerate(rows):
            scores = _processed(logits[index], row)
            best = int(scores.argmax())  # the first NaN, or else the first of the highest
            if not abs(float(scores[best])) < LOGIT_MAX:
                raise NothingToSample(index, is_empty=scores[best] == -np.inf)
            if row.sampling.is_greedy:
                tokens.append(best)
            elif row.sampling.seed is None:
                tokens.append(_draw(scores, best, row.sampling, next(draws)))
            else:
                tokens.append(_draw_seeded(scores, best, row.sampling, row.key))
    return tokens


def _processed(scores: Floats, row: SampleRow) -> Floats:
    """Return the logits [vocab] after the row's edits, bans and mask: a copy if it has any."""
    if not row.is_edited:
        return scores
    scores = scores.copy()
    if row.edits is not None:
        row.edits.apply(scores)
    if row.banned:
        scores[[token for token in row.banned if 0 <= token < len(scores)]] = -np.inf
    if row.mask is not None:
        row.mask.apply(scores)
    return scores


def _draw(logits: Floats, best: int, sampling: Sampling, uniforms: Doubles) -> int:
    """Draw a token of ``logits`` [vocab] by inverse CDF. ``best`` is the likeliest token."""
    if is_listed(sampling, len(logits)):
        ids, scores = listed(logits, best, sampling)
        return int(ids[_inverse_cdf(np.exp(scores - scores.max()), uniforms[0])])
    if (kernels := native.loaded()) is not None:
        row = _as_kernels_take_it(logits, best, _heat(sampling), sampling.min_p)
        return int(kernels.triolet_draw_by_cdf(*row, *uniforms))
    weights = whole(logits / _heat(sampling), best, sampling)
    sums = np.add.reduceat(weights, _block_starts(len(weights)))
    start = _inverse_cdf(sums, uniforms[0]) * _BLOCK
    # A second uniform number and total weight: rounding cannot lead to a token of weight 0.
    return start + _inverse_cdf(weights[start : start + _BLOCK], uniforms[1])


def _as_kernels_take_it(
    logits: Floats, best: int, heat: np.float32, min_p: float
) -> tuple[int, int, np.float32, np.float32, float]:
    """Return a row as the arguments `Scores` of engine/kernels/draws.h. ``logits`` must be
    contiguous, and live until the kernel returns."""
    return logits.ctypes.data, len(logits), heat, logits[best] / heat, min_p


def _inverse_cdf(weights: Floats, uniform: float) -> int:
    """Return the first position whose running sum exceeds ``uniform`` of the total. That position
    never has the weight 0."""
    sums = weights.cumsum(dtype=np.float64)
    return int(sums.searchsorted(sums[-1] * uniform, side="right"))


def _draw_seeded(logits: Floats, best: int, sampling: Sampling, key: int) -> int:
    """Draw a token by Gumbel-max: the token with the highest score + noise."""
    if is_listed(sampling, len(logits)):
        ids, scores = listed(logits, best, sampling)
    elif (kernels := native.loaded()) is not None:
        row = _as_kernels_take_it(logits, best, _heat(sampling), sampling.min_p)
        return int(kernels.triolet_draw_by_noise(*row, best, key))
    else:
        scores = logits / _heat(sampling)
        ids = _survivors(whole(scores, best, sampling), best, key)
        scores = scores[ids]
    return int(ids[(scores - np.log(noise.exponentials(key, ids))).argmax()])


def _survivors(weights: Floats, best: int, key: int) -> Ids:
    """Return the tokens of a whole vocabulary that can still win a seeded draw.

    The noise is -log(E) of an exponential E = -log1p(-u). Let B be the perturbed score of the
    likeliest token. Token i reaches B only if E_i is at most exp(s_i - B), and E_i is never below
    u_i. So one comparison of u_i with a float32 weight leaves the tokens that can still win, about
    1 / p of them if p is the likeliest token's probability. Only these need logarithms. Both sides
    are multiplied by 2**52, so that the left side is the hash itself.
    """
    lead = float(noise.exponentials(key, np.array([best]))[0])  # exp(s_best - B)
    limits = weights * np.float32(lead * _SLACK * 2.0**noise.BITS)
    walk, size = _walk(len(weights)), min(_SLAB, len(weights))
    places, scratch = np.empty(size, np.uint64), np.empty(size, np.uint64)
    survivors = []
    for start in range(0, len(weights), size):
        part = walk[start : start + size]
        own = slice(0, len(part))
        bits = noise.mix(np.add(part, np.uint64(key), out=places[own]), scratch[own])
        limit = limits[start : start + size]
        survivors.append(np.flatnonzero(bits.astype(np.float32) <= limit) + start)
    ids = np.concatenate(survivors)
    return ids[weights[ids] > 0.0]


# --- candidates -----------------------------------------------------------------------------


def _heat(sampling: Sampling) -> np.float32:
    return np.float32(max(sampling.temperature, TEMPERATURE_MIN))


def whole(scores: Floats, best: int, sampling: Sampling) -> Floats:
    """Return exp(score - best score), and 0 below min_p, in a new array [vocab] float32."""
    weights = scores - scores[best]
    np.exp(weights, out=weights)
    if sampling.min_p > 0.0:
        weights[weights < np.float32(sampling.min_p)] = 0.0
    return weights


def listed(logits: Floats, best: int, sampling: Sampling) -> tuple[Ids, Floats]:
    """Return the ids and the scores of the candidates of a row that `is_listed`, [candidates]."""
    if needs_prefix(sampling, len(logits)):
        ids, scores = prefix(logits, best, sampling)
    else:
        scores = logits / _heat(sampling)
        ids = np.flatnonzero(whole(scores, best, sampling))
        scores = scores[ids]
    if sampling.typical_p < 1.0:
        kept = _typical(scores, sampling.typical_p)
        ids, scores = ids[kept], scores[kept]
    return ids, scores


def _typical(scores: Floats, mass: float) -> Ids:
    """Return the indices of the locally typical scores: the scores whose information is nearest to
    the entropy, until they hold ``mass``, and all that are as near as the last of these."""
    alive = np.flatnonzero(scores > -np.inf)
    shifted = (scores[alive] - scores.max()).astype(np.float64)
    weights = np.exp(shifted)
    total = weights.sum()
    information = np.log(total) - shifted  # -log p
    distance = np.abs(information - (weights * information).sum() / total)
    order = distance.argsort(kind="stable")
    reached = weights[order].cumsum()
    last = min(int(np.count_nonzero(reached < mass * total)), len(alive) - 1)
    return alive[distance <= distance[order[last]]]


def prefix(logits: Floats, best: int, sampling: Sampling) -> tuple[Ids, Floats]:
    """Return the ids and the scores of the candidates of a row with top_k or top_p, [candidates],
    the best first."""
    vocab, heat = len(logits), _heat(sampling)
    if has_top_k(sampling, vocab):
        ids = likeliest(logits, sampling.top_k)
        scores = logits[ids] / heat
        scores = scores[scores >= scores[sampling.top_k - 1]]
        weights = np.exp((scores - scores[0]).astype(np.float64))
        count = _count_kept(weights, weights.sum(), sampling)
        return ids[:count], scores[:count]
    mass, width = _mass(logits, best, heat), PREFIX
    while True:
        ids = likeliest(logits, width)
        scores = logits[ids] / heat
        weights = np.exp((scores - scores[0]).astype(np.float64))
        if len(ids) == vocab or weights.sum() >= sampling.top_p * mass:
            count = _count_kept(weights, mass, sampling)
            return ids[:count], scores[:count]
        width *= _GROWTH


def _mass(logits: Floats, best: int, heat: np.float32) -> float:
    """Return the sum of the weights of a whole vocabulary."""
    if (kernels := native.loaded()) is not None:
        logits = np.ascontiguousarray(logits)
        return float(kernels.triolet_mass(*_as_kernels_take_it(logits, best, heat, 0.0)))
    return float(whole(logits / heat, best, NO_LIMITS).sum(dtype=np.float64))


def _count_kept(weights: Doubles, mass: float, sampling: Sampling) -> int:
    """Return how many of ``weights``, which descend, remain after top_p of ``mass`` and min_p."""
    count = len(weights)
    if sampling.top_p < 1.0:
        before = weights.cumsum() - weights
        count = max(1, int(np.count_nonzero(before < sampling.top_p * mass)))
    if sampling.min_p > 0.0:
        ratios = weights[:count].astype(np.float32)
        count = int(np.count_nonzero(ratios >= np.float32(sampling.min_p)))
    return count


def likeliest(scores: Floats, count: int) -> Ids:
    """Return the ids of at least the ``count`` highest scores and of all scores that equal the last
    of them: the best first, and the lowest id first among equal scores.

    The vocabulary is divided into interleaved blocks. At least ``count`` scores, and few more,
    reach the ``count``-th highest of the blocks' maxima. For 256 of 49,152 scores that takes 40 µs,
    where torch's topk takes 100 and numpy's partition 220.
    """
    ids = np.flatnonzero(scores >= _bar(scores, count))
    return ids[(-scores[ids]).argsort(kind="stable")]


def _bar(scores: Floats, count: int) -> np.float32:
    """Return a value such that ``count`` scores, or a few more, are at least as high."""
    vocab = len(scores)
    if count >= vocab:
        return np.float32(-np.inf)
    maxima = scores
    size = min(64, vocab // (4 * count))  # scores of a block: at least 4 * count blocks result
    if size > 1:
        num_blocks = vocab // size
        whole = scores[: num_blocks * size].reshape(size, num_blocks)
        maxima = np.concatenate((whole.max(0), scores[num_blocks * size :]))
    return np.partition(maxima, len(maxima) - count)[len(maxima) - count]


@lru_cache(maxsize=8)
def _walk(vocab: int) -> NDArray[np.uint64]:
    """Return `noise.walk` of every id, [vocab] uint64, cached for 8 sizes of a vocabulary."""
    return noise.walk(np.arange(vocab))


@lru_cache(maxsize=8)
def _block_starts(vocab: int) -> Ids:
    """Return the first token of each block of the unseeded draw, [blocks]."""
    return np.arange(0, vocab, _BLOCK)
