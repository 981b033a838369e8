"""Samples with torch on any device: one call for all rows that are drawn in the same way.

Rule 1: greedy and seeded rows get exactly the token that `engine.worker.sampling.draw_rows` gives
them, unseeded rows a token of the same distribution. The same tests run against both.
Rule 2: Python loops over rows only to make small tensors of their settings.
Rule 3: the tokens are copied to the host once, together with each row's state. Only top_k and top_p
read from the device before, whether their prefix was long enough.

Unseeded draws invert the CDF in two levels: over blocks of the vocabulary, then in one block.
Seeded draws are a Gumbel-max over all candidates.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.worker.sampling import candidates, masks, noise
from engine.worker.sampling.edits import apply_batch
from engine.worker.sampling.sample_row import (
    LOGIT_MAX,
    TEMPERATURE_MIN,
    NothingToSample,
    needs_prefix,
    uniforms_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.worker.sampling.candidates import Candidates
    from engine.worker.sampling.sample_row import SampleRow

_BLOCK = 128  # tokens in a block of the unseeded draw; 64 to 512 are equally fast


class _Kind(NamedTuple):
    """The way in which a row is drawn. Rows of the same kind are drawn together."""

    is_greedy: bool
    is_seeded: bool
    is_narrow: bool  # Whether it has top_k or top_p.
    is_edited: bool  # Whether the request changes the row's logits.


def sample_batch(
    logits: torch.Tensor, rows: Sequence[SampleRow], generator: torch.Generator
) -> list[int]:
    """Implements `engine.worker.sampling.sampler.sample`; ``logits`` are [rows, vocab] float32."""
    if not rows:
        return []
    looked: list[int] = []  # the rows of `states`, in its order
    states: list[torch.Tensor] = []
    drawn: list[int] = []  # the rows of `tokens`, in its order
    tokens: list[torch.Tensor] = []
    for kind, members, scores in _groups(logits, rows):
        looked.extend(members)
        states.append(_states(scores))
        if kind.is_greedy:
            drawn.extend(members)
            tokens.append(scores.argmax(1))
            continue
        for part in _candidates(kind, members, scores, rows):
            if kind.is_seeded:
                columns = _perturbed(part, rows).argmax(1, keepdim=True)
            else:
                own = uniforms_of([rows[i] for i in part.rows], generator)
                columns = _draw_unseeded(part.scores, own.to(part.scores.device))
            drawn.extend(part.rows)
            tokens.append(part.token_ids(columns)[:, 0])
    token_ids, states_ = torch.stack((torch.cat(tokens), torch.cat(states))).tolist()
    _check(looked, states_)
    return [token for _, token in sorted(zip(drawn, token_ids, strict=True))]


# --- groups, processors, temperature --------------------------------------------------------


def _groups(
    logits: torch.Tensor, rows: Sequence[SampleRow]
) -> Iterator[tuple[_Kind, tuple[int, ...], torch.Tensor]]:
    """Yield the rows of each kind, with their edited logits [members, vocab] float32."""
    kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        kinds[_kind_of(row, logits.shape[1])].append(index)
    for kind, members in kinds.items():
        scores = logits if len(members) == len(rows) else logits[members]
        if kind.is_edited:
            scores = logits.clone() if scores is logits else scores
            _process(scores, [rows[i] for i in members])
        yield kind, tuple(members), scores


def _kind_of(row: SampleRow, vocab: int) -> _Kind:
    sampling = row.sampling
    if sampling.is_greedy:
        return _Kind(True, False, False, row.is_edited)
    is_narrow = needs_prefix(sampling, vocab)
    return _Kind(False, sampling.seed is not None, is_narrow, row.is_edited)


def _process(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply edits, bans and masks in this order, in place to [rows, vocab] float32."""
    apply_batch(scores, [row.edits for row in rows])
    _ban(scores, rows)
    masks.apply_batch(scores, [row.mask for row in rows])


def _ban(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    vocab = scores.shape[1]
    pairs = [(i, t) for i, row in enumerate(rows) for t in row.banned if 0 <= t < vocab]
    if pairs:
        at = torch.tensor(pairs, device=scores.device).T  # [2, pairs] int64
        scores[at[0], at[1]] = -torch.inf


_FINE, _EMPTY, _NOT_FINITE = range(3)


def _states(scores: torch.Tensor) -> torch.Tensor:
    """Return whether each row can be sampled, [rows] int64: `_FINE`, `_EMPTY` or `_NOT_FINITE`. A
    NaN anywhere in a row makes its best score NaN. For a row that is not `_FINE`, the drawn token
    has no meaning."""
    best = scores.amax(1)
    trouble = torch.where(best == -torch.inf, _EMPTY, _NOT_FINITE)
    return torch.where(best.abs() < LOGIT_MAX, _FINE, trouble)


def _check(members: Sequence[int], states: Sequence[int]) -> None:
    for row, state in zip(members, states, strict=True):
        if state != _FINE:
            raise NothingToSample(row, is_empty=state == _EMPTY)


def _candidates(
    kind: _Kind, members: tuple[int, ...], scores: torch.Tensor, rows: Sequence[SampleRow]
) -> Iterator[Candidates]:
    limits = [rows[i].sampling for i in members]
    heats = [max(limit.temperature, TEMPERATURE_MIN) for limit in limits]
    if any(heat != 1.0 for heat in heats):
        scores = scores / scores.new_tensor(heats)[:, None]
    if kind.is_narrow:
        parts = candidates.prefixes(members, scores, limits)
    else:
        parts = iter([candidates.whole(members, scores, limits)])
    for part in parts:
        yield candidates.typical(part, [rows[i].sampling for i in part.rows])


# --- draws ----------------------------------------------------------------------------------


def _draw_unseeded(scores: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw a column for each row of scores [rows, n] float32, by numbers ``u`` [rows, 2] in [0, 1);
    return [rows, 1] int64.

    Each level has its own uniform number and its own total weight, so that rounding between the
    levels cannot lead to a token of weight 0.
    """
    weights = _block_weights(scores)  # [rows, blocks, block] float32
    num_rows = weights.shape[0]
    blocks = _inverse_cdf(weights.sum(2), u[:, :1])  # [rows, 1] int64
    chosen = weights[torch.arange(num_rows, device=weights.device), blocks[:, 0]]
    columns = blocks * _BLOCK + _inverse_cdf(chosen, u[:, 1:])
    return columns.clamp_(max=scores.shape[1] - 1)  # as in `_inverse_cdf`


def _block_weights(scores: torch.Tensor) -> torch.Tensor:
    """Return exp(score - best), padded with 0 to whole blocks, [rows, blocks, _BLOCK] float32."""
    num_rows, width = scores.shape
    num_blocks = -(-width // _BLOCK)
    weights = scores.new_zeros((num_rows, num_blocks * _BLOCK))
    torch.sub(scores, scores.amax(1, keepdim=True), out=weights[:, :width]).exp_()
    return weights.view(num_rows, num_blocks, _BLOCK)


def _inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the columns [rows, 1] int64 that ``u`` [rows, 1] in [0, 1) draws by ``weights``
    [rows, n] float32.

    ``right=True`` finds the first column whose running sum exceeds the target; its weight is never
    0. A row with a NaN has no such column, so the result is clamped to the row.
    """
    sums = weights.cumsum(1, dtype=torch.float64)
    columns = torch.searchsorted(sums, sums[:, -1:] * u, right=True)
    return columns.clamp_(max=weights.shape[1] - 1)


def _perturbed(part: Candidates, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return score + Gumbel noise of every candidate, [rows, n] float64."""
    device = part.scores.device
    keys = torch.tensor([noise.signed(rows[i].key) for i in part.rows], device=device)[:, None]
    ids = part.ids
    if ids is None:
        ids = torch.arange(part.scores.shape[1], device=device)
    return noise.gumbel(noise.uniforms(keys, ids)).add_(part.scores)
