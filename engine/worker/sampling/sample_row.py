"""The input of sampling, its error, and functions that its two implementations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.worker.sampling import noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.types import Sampling
    from engine.worker.sampling.edits import Edits
    from engine.worker.sampling.masks import Mask

# A best logit beyond LOGIT_MAX counts as not finite, and temperatures as TEMPERATURE_MIN at least,
# so that a logit divided by its temperature fits float32. Logits of real models stay below 1e3.
LOGIT_MAX = 1e18
TEMPERATURE_MIN = 1e-20


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The settings for sampling one row of logits.

    ``position`` counts output tokens from 0. ``banned`` are ids that cannot be sampled now, such as
    stop ids before min_tokens; ids outside the vocabulary have no effect. ``edits`` are the
    request's changes to its logits. ``mask`` has the tokens that its constraint allows, and is
    applied last.
    """

    sampling: Sampling
    position: int
    banned: frozenset[int] = frozenset()
    edits: Edits | None = None
    mask: Mask | None = None

    @property
    def is_edited(self) -> bool:
        """Whether anything changes the row's logits before the temperature."""
        return bool(self.banned) or self.edits is not None or self.mask is not None

    @property
    def key(self) -> int:
        """The key of this draw's noise. Only a seeded row has one."""
        assert self.sampling.seed is not None, "an unseeded row has no key"
        return noise.draw_key(self.sampling.seed, self.sampling.choice, self.position)


def uniforms_of(rows: Sequence[SampleRow], generator: torch.Generator) -> torch.Tensor:
    """Return the uniform numbers of draws without a client's seed, [rows, 2] float64 on the CPU. If
    the server has drawn a seed for a row, its numbers follow from that seed, so that another server
    can continue the stream; other rows' numbers come from the generator."""
    drawn = [
        None
        if row.sampling.drawn_seed is None
        else noise.draw_uniforms(row.sampling.drawn_seed, row.sampling.choice, row.position)
        for row in rows
    ]
    if None not in drawn:
        return torch.tensor(drawn, dtype=torch.float64).reshape(len(rows), 2)
    shape, device = (len(rows), 2), generator.device
    uniforms = torch.rand(shape, dtype=torch.float64, device=device, generator=generator).cpu()
    for index, own in enumerate(drawn):
        if own is not None:
            uniforms[index] = torch.tensor(own, dtype=torch.float64)
    return uniforms


def needs_prefix(sampling: Sampling, vocab: int) -> bool:
    """Return whether top_k or top_p limits the candidates to a sorted prefix of the tokens."""
    return has_top_k(sampling, vocab) or sampling.top_p < 1.0


def is_listed(sampling: Sampling, vocab: int) -> bool:
    """Return whether the draw needs a list of all candidates."""
    return needs_prefix(sampling, vocab) or sampling.typical_p < 1.0


def has_top_k(sampling: Sampling, vocab: int) -> bool:
    """Return whether top_k excludes any token."""
    return 0 < sampling.top_k < vocab


class NothingToSample(ValueError):
    """Row ``row`` cannot be sampled: every token is excluded (``is_empty``), or its best logit is
    not finite."""

    def __init__(self, row: int, *, is_empty: bool = False) -> None:
        super().__init__(f"row {row} has nothing to sample: its best logit is not finite")
        self.row = row
        self.is_empty = is_empty
