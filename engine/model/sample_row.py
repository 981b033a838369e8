"""What sampling is asked, what the two implementations share, and the one way it can fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model import noise

if TYPE_CHECKING:
    from engine.core.types import Sampling
    from engine.model.edits import Edits
    from engine.model.masks import Mask

# A best logit beyond this counts as not finite, and a lower temperature as this one: one
# divided by the other is still a float32. Logits of real models stay below 1e3.
LOGIT_MAX = 1e18
TEMPERATURE_MIN = 1e-20


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits needs to be sampled.

    ``position`` counts output tokens from 0. ``banned`` ids cannot be sampled now (a stop id
    before min_tokens); ids beyond the vocabulary do not matter. ``edits`` is what the request
    does to its logits, None for nothing; ``mask`` what its constraint lets follow, after both.
    """

    sampling: Sampling
    position: int
    banned: frozenset[int] = frozenset()
    edits: Edits | None = None
    mask: Mask | None = None

    @property
    def is_edited(self) -> bool:
        """Its logits are not sampled as they are."""
        return bool(self.banned) or self.edits is not None or self.mask is not None

    @property
    def key(self) -> int:
        """The key of this draw's noise; of a seeded row only."""
        assert self.sampling.seed is not None, "an unseeded row has no key"
        return noise.draw_key(self.sampling.seed, self.sampling.choice, self.position)


def needs_prefix(sampling: Sampling, vocab: int) -> bool:
    """True where the likeliest tokens must be sorted to know the candidates."""
    return has_top_k(sampling, vocab) or sampling.top_p < 1.0


def is_listed(sampling: Sampling, vocab: int) -> bool:
    """True where the candidates must be known before the draw, each of them."""
    return needs_prefix(sampling, vocab) or sampling.typical_p < 1.0


def has_top_k(sampling: Sampling, vocab: int) -> bool:
    return 0 < sampling.top_k < vocab


class NothingToSample(ValueError):
    """Row ``row`` has no token that can be sampled (``is_empty``), or its best logit is not
    finite."""

    def __init__(self, row: int, *, is_empty: bool = False) -> None:
        super().__init__(f"row {row} has nothing to sample: its best logit is not finite")
        self.row = row
        self.is_empty = is_empty
