"""Finds the tokens that truncation leaves as candidates, with torch and for many rows at once.

Rule 1: top_k, top_p, min_p and typical_p are applied in this order, as
`engine.worker.sampling.sampler` defines them. Rule 2: the whole vocabulary is sorted only if a
prefix of the likeliest tokens is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.worker.sampling.sample_row import has_top_k

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.text.types import Sampling

# For a top_p without top_k, this many of the likeliest tokens are sorted first. Of 151,936 tokens,
# torch's topk finds 256 in 0.17 ms and 1,024 in 0.34 ms (2 cores, EPYC). In most real rows, 256
# tokens hold 0.95 of the mass.
PREFIX = 256
_GROWTH = 8  # a prefix that is too short grows by this factor: 256, 2,048, 16,384, all


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of some rows, with their scores.

    ``rows`` are positions in the batch. ``scores`` are [rows, n] float32, -inf for excluded tokens.
    ``ids`` are [rows, n] int64; None means that column i is token i.
    """

    rows: tuple[int, ...]
    scores: torch.Tensor
    ids: torch.Tensor | None = None

    def token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the token ids of columns [rows, m] int64, in the same shape."""
        return columns if self.ids is None else self.ids.gather(1, columns)


def whole(rows: tuple[int, ...], scores: torch.Tensor, limits: Sequence[Sampling]) -> Candidates:
    """Return the candidates of rows without top_k and top_p. ``scores`` [rows, vocab] float32 are
    not changed."""
    return Candidates(rows, _min_p(scores, limits))


def prefixes(
    rows: tuple[int, ...], scores: torch.Tensor, limits: Sequence[Sampling]
) -> Iterator[Candidates]:
    """Yield the candidates of rows with top_k or top_p. The rows of one result needed a prefix
    (the likeliest tokens, sorted) of the same length.

    ``scores`` are [rows, vocab] float32; the best of each row is finite.
    """
    vocab = scores.shape[1]
    masses = _masses(scores, limits)  # [rows, 1] float64
    width = max(_first_width(limit, vocab) for limit in limits)
    while rows:
        values, ids = scores.topk(width, dim=1)  # [rows, width] float32 descending, int64
        values, ids, is_closed = _cut(values, ids, masses, limits, vocab)
        closed, open_ = _split(is_closed.tolist())
        if closed:
            part = [limits[i] for i in closed]
            yield Candidates(
                tuple(rows[i] for i in closed), _min_p(values[closed], part), ids[closed]
            )
        rows = tuple(rows[i] for i in open_)
        limits = [limits[i] for i in open_]
        scores, masses = scores[open_], masses[open_]
        width = min(vocab, width * _GROWTH)


def typical(part: Candidates, limits: Sequence[Sampling]) -> Candidates:
    """Return each row's candidates that are locally typical (`engine.worker.sampling.sampler`)."""
    if all(limit.typical_p >= 1.0 for limit in limits):
        return part
    shares = part.scores.new_tensor([x.typical_p for x in limits], dtype=torch.float64)[:, None]
    log_p = part.scores.to(torch.float64).log_softmax(1)  # [rows, n]
    p = log_p.exp()
    entropy = -(log_p * p).nansum(1, keepdim=True)
    distance = (-log_p - entropy).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    reached = p.gather(1, order).cumsum(1)
    last = (reached < shares).sum(1, keepdim=True).clamp(max=p.shape[1] - 1)
    is_far = (distance > ordered.gather(1, last)) & (shares < 1.0)
    return Candidates(part.rows, part.scores.masked_fill(is_far, -torch.inf), part.ids)


def _split(flags: list[bool]) -> tuple[list[int], list[int]]:
    """Return the indices of the true flags, and those of the false ones."""
    return [i for i, x in enumerate(flags) if x], [i for i, x in enumerate(flags) if not x]


def _first_width(sampling: Sampling, vocab: int) -> int:
    """Return how many of the likeliest tokens are sorted first. For top_k it is k + 1, to see
    whether the k-th score is tied."""
    return sampling.top_k + 1 if has_top_k(sampling, vocab) else min(vocab, PREFIX)


def _masses(scores: torch.Tensor, limits: Sequence[Sampling]) -> torch.Tensor:
    """Return the sum of exp(score - best) over the vocabulary, [rows, 1] float64. Rows whose top_p
    does not need the sum may get any number."""
    if all(limit.top_p >= 1.0 or has_top_k(limit, scores.shape[1]) for limit in limits):
        return scores.new_ones((len(limits), 1), dtype=torch.float64)
    weights = (scores - scores.amax(1, keepdim=True)).exp_()  # [rows, vocab] float32
    return weights.sum(1, keepdim=True, dtype=torch.float64)


def _cut(
    values: torch.Tensor,
    ids: torch.Tensor,
    masses: torch.Tensor,
    limits: Sequence[Sampling],
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply top_k and top_p to a sorted prefix, whose ``values`` [rows, width] float32 descend.

    Return the values with -inf for excluded tokens, the ids in their order, and [rows] bool: no
    token outside the prefix can be a candidate.
    """
    width = values.shape[1]
    last = values[:, -1:]  # [rows, 1] float32
    top_k = [limit.top_k if has_top_k(limit, vocab) else vocab for limit in limits]
    counts = values.new_tensor(top_k, dtype=torch.int64)[:, None]  # [rows, 1] int64
    has_k = counts < vocab
    kth = values.gather(1, counts.clamp(max=width) - 1)  # [rows, 1] float32
    kept = values.masked_fill(has_k & (values < kth), -torch.inf)
    is_closed = has_k & ((last < kth) | (kth == -torch.inf))
    if any(limit.top_p < 1.0 for limit in limits):
        weights = (kept - kept[:, :1]).to(torch.float64).exp_()  # [rows, width] float64
        masses = torch.where(has_k, weights.sum(1, keepdim=True), masses)
        kept, ids, is_closed_p = _top_p(kept, ids, weights, masses, limits)
        is_closed = is_closed | (~has_k & is_closed_p)
    if width == vocab:
        is_closed = torch.ones_like(is_closed)
    return kept, ids, is_closed[:, 0]


def _top_p(
    values: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    masses: torch.Tensor,
    limits: Sequence[Sampling],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply top_p alone, as `_cut` does: a token stays if those before it hold less than top_p of
    the mass.

    The weights are not normalised: weights that equal the best are then exactly 1, which makes
    their sums and so the boundary exact.
    """
    shares = values.new_tensor([limit.top_p for limit in limits], dtype=torch.float64)[:, None]
    targets = shares * masses  # [rows, 1] float64
    reached = weights.cumsum(1)
    stays = (reached - weights < targets) | (shares >= 1.0)
    stays[:, 0] = True
    edge = values.gather(1, stays.sum(1, keepdim=True) - 1)  # each row's lowest score that stays
    is_closed = (reached[:, -1:] >= targets) & (edge > values[:, -1:])
    cuts_tie = (values[:, 1:] == values[:, :-1]) & (stays[:, 1:] != stays[:, :-1])
    if bool(cuts_tie.any()):
        ids = _ties_by_id(values, ids)
    return values.masked_fill(~stays, -torch.inf), ids, is_closed


def _ties_by_id(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the ids [rows, width] int64, ordered by ascending id where values are equal."""
    ids_up, order = ids.sort(1)
    again = values.gather(1, order).argsort(dim=1, descending=True, stable=True)
    return ids_up.gather(1, again)


def _min_p(values: torch.Tensor, limits: Sequence[Sampling]) -> torch.Tensor:
    """Return the values [rows, n] float32 with -inf where the probability is below min_p times the
    highest probability."""
    if all(limit.min_p <= 0.0 for limit in limits):
        return values
    shares = values.new_tensor([limit.min_p for limit in limits])[:, None]
    ratios = (values - values.amax(1, keepdim=True)).exp_()
    return values.masked_fill(ratios < shares, -torch.inf)
