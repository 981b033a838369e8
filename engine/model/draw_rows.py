"""Sampling on a CPU: numpy, one row at a time, no threads.

A row of a vocabulary fits a core's cache and a batch does not; and torch starts its threads for
every operation on more than 32,768 numbers, which beside two busy processes turned a draw of
0.4 ms into 95 (151,936 tokens, seeded). So here each row is finished before the next begins.

Rule 1: no Python loop over tokens; the work of a row is a few calls on its whole vocabulary.
Rule 2: a seeded or greedy row's token depends on its logits and `SampleRow` alone; the batch,
its order and the generator do not enter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from engine.core.types import Sampling
from engine.model import noise
from engine.model.sample_row import (
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

    from engine.model.sample_row import SampleRow

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Ids = NDArray[np.int64]

# Tokens looked at first for a top_p without top_k; 256 hold 0.95 of the mass of most real rows.
PREFIX = 256
_GROWTH = 8  # a prefix that was too short is retried this much longer: 256, 2,048, 16,384, all
_BLOCK = 128  # tokens of a block of the unseeded draw; 64 to 512 measure alike
_SLAB = 1 << 14  # tokens hashed at once: 128 KB of uint64 stay in a core's cache
# exp(3e-4): how much too small a float32 weight may be without pruning a winner.
_SLACK = 1.0003
NO_LIMITS = Sampling()


def sample_rows(logits: Floats, rows: Sequence[SampleRow], uniforms: Doubles) -> list[int]:
    """One token for each row; ``logits`` [rows, vocab], ``uniforms`` [unseeded rows, 2] in
    [0, 1), used in the order of the rows."""
    tokens, draws = [], iter(uniforms)
    with np.errstate(over="ignore"):  # logits of -3e38 are as good as -inf
        for index, row in enumerate(rows):
            scores = _processed(logits[index], row)
            best = int(scores.argmax())  # the first of equal ones; the first NaN, if any
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
    """The logits [vocab] with every edit made, a copy where there is something to do."""
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
    """A token of ``logits`` [vocab], of which ``best`` is the highest, by inverse CDF."""
    if is_listed(sampling, len(logits)):
        ids, scores = listed(logits, best, sampling)
        return int(ids[_inverse_cdf(np.exp(scores - scores.max()), uniforms[0])])
    weights = whole(logits / _heat(sampling), best, sampling)
    sums = np.add.reduceat(weights, _block_starts(len(weights)))
    start = _inverse_cdf(sums, uniforms[0]) * _BLOCK
    # With its own uniform and total: rounding between the levels cannot pick a weight of 0.
    return start + _inverse_cdf(weights[start : start + _BLOCK], uniforms[1])


def _inverse_cdf(weights: Floats, uniform: float) -> int:
    """The first position whose running sum exceeds its share; never one of weight 0."""
    sums = weights.cumsum(dtype=np.float64)
    return int(sums.searchsorted(sums[-1] * uniform, side="right"))


def _draw_seeded(logits: Floats, best: int, sampling: Sampling, key: int) -> int:
    """The same by Gumbel-max: the highest of score + noise."""
    if is_listed(sampling, len(logits)):
        ids, scores = listed(logits, best, sampling)
    else:
        scores = logits / _heat(sampling)
        ids = _survivors(whole(scores, best, sampling), best, key)
        scores = scores[ids]
    return int(ids[(scores - np.log(noise.exponentials(key, ids))).argmax()])


def _survivors(weights: Floats, best: int, key: int) -> Ids:
    """The tokens of a whole vocabulary that can still win.

    Noise is -log(E) of an exponential E = -log1p(-u). Let B be the perturbed score of the
    likeliest token. Token i reaches B only if E_i is at most exp(s_i - B), and E_i is never
    below u_i: so one comparison of u_i with a float32 weight leaves the tokens that can still
    win, about 1 / p of them where p is the likeliest token's probability. Only those need
    logarithms. Compared are u_i * 2**52, the hash's own bits, with the weight times as much.
    """
    lead = float(noise.exponentials(key, np.array([best]))[0])  # exp(s_best - B)
    limits = weights * np.float32(lead * _SLACK * 2.0**noise.BITS)
    walk, size = _walk(len(weights)), min(_SLAB, len(weights))
    places, scratch = np.empty(size, np.uint64), np.empty(size, np.uint64)
    found = []
    for start in range(0, len(weights), size):
        part = walk[start : start + size]
        own = slice(0, len(part))
        bits = noise.mix(np.add(part, np.uint64(key), out=places[own]), scratch[own])
        limit = limits[start : start + size]
        found.append(np.flatnonzero(bits.astype(np.float32) <= limit) + start)
    ids = np.concatenate(found)
    return ids[weights[ids] > 0.0]


# --- candidates -----------------------------------------------------------------------------


def _heat(sampling: Sampling) -> np.float32:
    return np.float32(max(sampling.temperature, TEMPERATURE_MIN))


def whole(scores: Floats, best: int, sampling: Sampling) -> Floats:
    """exp(score - best score), 0 below min_p. [vocab] float32, a new array."""
    weights = scores - scores[best]
    np.exp(weights, out=weights)
    if sampling.min_p > 0.0:
        weights[weights < np.float32(sampling.min_p)] = 0.0
    return weights


def listed(logits: Floats, best: int, sampling: Sampling) -> tuple[Ids, Floats]:
    """The candidates of a row that `is_listed`: ids and scores [candidates]."""
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
    """Which of ``scores`` are locally typical: nearest to the entropy in information, until
    ``mass`` is reached, and all that are as near as the last of them."""
    alive = np.flatnonzero(scores > -np.inf)
    shifted = (scores[alive] - scores.max()).astype(np.float64)
    weights = np.exp(shifted)
    total = weights.sum()
    information = np.log(total) - shifted  # -log p
    distance = np.abs(information - (weights * information).sum() / total)
    order = distance.argsort(kind="stable")
    reached = weights[order].cumsum()
    last = min(int(np.count_nonzero(reached < mass * total)), len(alive) - 1)
    found: Ids = alive[distance <= distance[order[last]]]
    return found


def prefix(logits: Floats, best: int, sampling: Sampling) -> tuple[Ids, Floats]:
    """The candidates of a row with top_k or top_p, best first: ids and scores [candidates]."""
    vocab, heat = len(logits), _heat(sampling)
    if has_top_k(sampling, vocab):
        ids = likeliest(logits, sampling.top_k)
        scores = logits[ids] / heat
        scores = scores[scores >= scores[sampling.top_k - 1]]
        weights = np.exp((scores - scores[0]).astype(np.float64))
        count = _count_kept(weights, weights.sum(), sampling)
        return ids[:count], scores[:count]
    mass, width = whole(logits / heat, best, NO_LIMITS).sum(dtype=np.float64), PREFIX
    while True:
        ids = likeliest(logits, width)
        scores = logits[ids] / heat
        weights = np.exp((scores - scores[0]).astype(np.float64))
        if len(ids) == vocab or weights.sum() >= sampling.top_p * mass:
            count = _count_kept(weights, mass, sampling)
            return ids[:count], scores[:count]
        width *= _GROWTH


def _count_kept(weights: Doubles, mass: np.float64, sampling: Sampling) -> int:
    """How many of ``weights``, best first, top_p of ``mass`` and then min_p leave."""
    count = len(weights)
    if sampling.top_p < 1.0:
        before = weights.cumsum() - weights
        count = max(1, int(np.count_nonzero(before < sampling.top_p * mass)))
    if sampling.min_p > 0.0:
        ratios = weights[:count].astype(np.float32)
        count = int(np.count_nonzero(ratios >= np.float32(sampling.min_p)))
    return count


def likeliest(scores: Floats, count: int) -> Ids:
    """The ids of at least the ``count`` highest scores and of all that equal the last of them,
    best first, of equal ones the lowest id.

    The count-th highest of the maxima of blocks is a bar that at least ``count`` scores reach
    and few more do, as blocks are interleaved: 40 µs for 256 of 49,152 where torch's topk takes
    100 and numpy's partition 220.
    """
    ids = np.flatnonzero(scores >= _bar(scores, count))
    return ids[(-scores[ids]).argsort(kind="stable")]


def _bar(scores: Floats, count: int) -> np.float32:
    """A value that at least ``count`` scores reach; as high as is cheap."""
    vocab = len(scores)
    if count >= vocab:
        return np.float32(-np.inf)
    maxima = scores
    size = min(64, vocab // (4 * count))  # at least four blocks for each score asked for
    if size > 1:
        num_blocks = vocab // size
        whole = scores[: num_blocks * size].reshape(size, num_blocks)
        maxima = np.concatenate((whole.max(0), scores[num_blocks * size :]))
    bar: np.float32 = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    return bar


@lru_cache(maxsize=8)
def _walk(vocab: int) -> NDArray[np.uint64]:
    """`noise.walk` of every id, [vocab]; 8 bytes a token, kept for 8 models."""
    return noise.walk(np.arange(vocab))


@lru_cache(maxsize=8)
def _block_starts(vocab: int) -> Ids:
    return np.arange(0, vocab, _BLOCK)
