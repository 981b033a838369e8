"""Changes a request's logits before the temperature: bias, penalties, bans.

Rule 1: a row's edits depend on its own prompt and output alone, and preemption does not affect
them. Rule 2: the cost of a step grows with the ids that are edited; only ``allowed`` writes a whole
row of the vocabulary. A request without such settings has no `Edits`, and its logits are not
copied.

The order is the same as in transformers: bias; repetition penalty; presence and frequency penalty;
then bad words, banned ids and allowed ids, whose order does not matter.

- ``repetition_penalty`` is defined as in transformers. The logit of a token that is in the prompt
  *or* the output is divided by it, or multiplied if the logit is negative. This happens once,
  however often the token is there.
- ``presence_penalty`` and ``frequency_penalty`` are defined as by OpenAI and vLLM: they subtract
  ``presence + frequency * count`` from the logit of a token that is ``count`` times in the
  *output*.
- ``bad_words`` are lists of tokens. Where the output ends with all tokens of a bad word but the
  last, the last one is banned. As in vLLM, the prompt is not searched.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from engine.core.text.types import Sampling

    Floats = NDArray[np.float32]
    Ids = NDArray[np.int64]

# Penalties clip the logits that they change to this magnitude, because the sampler treats a best
# logit beyond `LOGIT_MAX` (1e18) as a failure of the model.
LOGIT_BOUND = 1e17


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often the output has each. A new
    token takes constant time; the memory grows with the distinct tokens."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        room = len(self._places) + 64
        self._ids: Ids = np.zeros(room, np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._counts: Floats = np.zeros(room, np.float32)

    @property
    def ids(self) -> Ids:
        """Each distinct token, [distinct] int64."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        """How often each token of ``ids`` is in the output, [distinct] float32."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1.0

    def fork(self) -> TokenCounts:
        """Return an independent copy."""
        twin = TokenCounts(())
        twin._places = self._places.copy()
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin


class Edits:
    """One sequence's changes to its logits. `push` must be called with each token of the output."""

    __slots__ = (
        "_tail",
        "_words",
        "allowed",
        "banned",
        "bias_ids",
        "biases",
        "counts",
        "frequency",
        "presence",
        "repetition",
    )

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.repetition = min(max(sampling.repetition_penalty, 1e-30), 1e30)  # fits float32
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.bias_ids: Ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.biases: Floats = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.allowed: Ids | None = None
        if sampling.allowed_token_ids:
            self.allowed = np.array(sampling.allowed_token_ids, np.int64)
        single = [word[0] for word in sampling.bad_words if len(word) == 1]
        self.banned: Ids = np.array([*sampling.banned_token_ids, *single], np.int64)
        self._words = tuple(word for word in sampling.bad_words if len(word) > 1)
        longest = max((len(word) for word in self._words), default=1)
        self._tail: deque[int] = deque(maxlen=longest - 1)
        self.counts: TokenCounts | None = None
        if _has_penalty(sampling):
            self.counts = TokenCounts(prompt if self.repetition != 1.0 else ())

    def push(self, token: int) -> None:
        """Append a token to the output."""
        self._tail.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def fork(self) -> Edits:
        """Return an independent copy, for another choice."""
        twin = Edits.__new__(Edits)
        for name in Edits.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._tail = self._tail.copy()
        twin.counts = None if self.counts is None else self.counts.fork()
        return twin

    def bans(self) -> Ids:
        """Return the ids that bans and bad words exclude now, without those that ``allowed``
        lacks."""
        if not self._words:
            return self.banned
        tail = tuple(self._tail)
        ends = [w[-1] for w in self._words if tail[len(tail) - len(w) + 1 :] == w[:-1]]
        return np.concatenate((self.banned, np.array(ends, np.int64)))

    def apply(self, scores: Floats) -> None:
        """Apply all edits in place to one row of logits, [vocab] float32."""
        if len(self.bias_ids):
            scores[self.bias_ids] += self.biases
        if self.counts is not None:
            ids, counts = self.counts.ids, self.counts.counts
            scores[ids] = self._penalised(scores[ids], counts)
        if len(bans := self.bans()):
            scores[bans] = -np.inf
        if self.allowed is not None:
            kept = scores[self.allowed]
            scores.fill(-np.inf)
            scores[self.allowed] = kept

    def _penalised(self, old: Floats, counts: Floats) -> Floats:
        new = old
        if self.repetition != 1.0:
            with np.errstate(over="ignore"):
                penalty = np.float32(self.repetition)
                new = np.where(old < 0, old * penalty, old / penalty)
            new = np.where(np.isfinite(old), np.clip(new, -LOGIT_BOUND, LOGIT_BOUND), old)
        taken = np.float32(self.frequency) * counts + np.float32(self.presence) * (counts > 0)
        return (new - taken).astype(np.float32, copy=False)


def make_edits(sampling: Sampling, prompt: Sequence[int]) -> Edits | None:
    """Return the edits of a sequence that begins with ``prompt``; None if its request has none."""
    is_edited = (
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sampling.bad_words
        or _has_penalty(sampling)
    )
    return Edits(sampling, prompt) if is_edited else None


def _has_penalty(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


# --- torch: many rows at once ---------------------------------------------------------------


def apply_batch(scores: torch.Tensor, edits: Sequence[Edits | None]) -> None:
    """Apply each row's edits, as `Edits.apply` does, in place to [rows, vocab] float32."""
    have = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    device = scores.device
    biased = [(row, edit) for row, edit in have if len(edit.bias_ids)]
    if biased:
        at = _places(((row, edit.bias_ids) for row, edit in biased), device)
        biases = np.concatenate([edit.biases for _, edit in biased])
        scores[at] += torch.from_numpy(biases).to(device)
    _penalise(scores, [(row, edit, edit.counts) for row, edit in have if edit.counts is not None])
    banned = [(row, bans) for row, edit in have if len(bans := edit.bans())]
    if banned:
        scores[_places(banned, device)] = -torch.inf
    limited = [(row, edit.allowed) for row, edit in have if edit.allowed is not None]
    if limited:
        at = _places(limited, device)
        kept = scores[at]
        scores[torch.tensor([row for row, _ in limited], device=device)] = -torch.inf
        scores[at] = kept


def _penalise(scores: torch.Tensor, rows: Sequence[tuple[int, Edits, TokenCounts]]) -> None:
    if not rows:
        return
    device = scores.device
    sizes = [len(counts.ids) for _, _, counts in rows]
    settings = np.array([(e.repetition, e.presence, e.frequency) for _, e, _ in rows], np.float32)
    # [3, pairs]: each row's settings, repeated for each of its ids
    wide = torch.from_numpy(np.repeat(settings, sizes, axis=0).T.copy()).to(device)
    repetition, presence, frequency = wide
    counts = torch.from_numpy(np.concatenate([c.counts for _, _, c in rows])).to(device)
    at = _places(((row, c.ids) for row, _, c in rows), device)
    old = scores[at]  # [pairs] float32
    new = torch.where(old < 0, old * repetition, old / repetition).clamp(-LOGIT_BOUND, LOGIT_BOUND)
    new = torch.where(old.isfinite() & (repetition != 1.0), new, old)
    scores[at] = new - (frequency * counts + presence * (counts > 0))


def _places(
    pairs: Iterable[tuple[int, Ids]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index into [rows, vocab] for pairs of a row and its ids: two [pairs] int64."""
    rows, ids = zip(*pairs, strict=True)
    owners = np.repeat(np.array(rows, np.int64), [len(id_) for id_ in ids])
    return _on(owners, device), _on(np.concatenate(ids), device)


def _on(array: Ids, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
