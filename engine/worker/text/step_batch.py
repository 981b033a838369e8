"""One step's plan in the form that the model takes, and the tokens and scores of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.core.common.steps import RowFailure, RowPhase
from engine.worker.failures import describe
from engine.worker.sampling.constraint_compiler import LEAVES_NOTHING, refusal
from engine.worker.sampling.sampler import NothingToSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.common.types import SequenceId
    from engine.core.text.types import TokenLogprob
    from engine.worker.forward.adapters import AdapterGroup
    from engine.worker.forward.packing import Ints, PackedRows
    from engine.worker.forward.recurrent import RowState
    from engine.worker.sampling.guides import Guide
    from engine.worker.sampling.masks import Mask
    from engine.worker.sampling.sampler import SampleRow


@dataclass(frozen=True, slots=True)
class Choice:
    """One token to be sampled, for a row's sequence or for a child that forks from it."""

    sequence: SequenceId
    row: SampleRow
    logits: int  # The index of its row in the kept logits.
    drafts: tuple[int, ...] = ()  # The drafted tokens from here on, whose logits follow.


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row that scores tokens of its prompt, namely those after positions ``start`` to
    ``start + count - 1``. Its ``count`` kept logits begin at index ``logits``."""

    sequence: SequenceId
    start: int
    count: int
    logits: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities of one step: of sampled tokens, and of prompt tokens that it scored."""

    tokens: Mapping[SequenceId, tuple[TokenLogprob, ...]]
    prompts: Mapping[SequenceId, Sequence[TokenLogprob]]


NO_SCORES = Scores({}, {})
Drawn = tuple[int, ...] | RowFailure  # a choice's sampled tokens, at least one, or its failure


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan in the form that the model takes."""

    rows: PackedRows
    input_ids: Ints  # [num_tokens]
    tables: tuple[Ints, ...]  # each row's block table after the step, in the plan's order
    keep: Ints  # [num_kept] indices of the tokens whose logits are computed, ascending
    choices: tuple[Choice, ...]
    scored: tuple[ScoredRow, ...]
    masks: tuple[tuple[Guide, Mask], ...]  # Masks to fill before the choices are drawn.
    groups: tuple[AdapterGroup, ...]  # The tokens that have adapters.
    states: tuple[RowState, ...] = ()  # The state slots of each row, for recurrent layers.
    images: object = None  # The images' parts in the rows, as the runner needs them.


def draw(
    choices: Sequence[Choice],
    logits: torch.Tensor,
    generator: torch.Generator,
    sample: Callable[..., Sequence[int | RowFailure]],
) -> dict[SequenceId, int | RowFailure]:
    """Return a token for each choice, all drawn in one call of ``sample``. ``logits`` are
    [num_kept, vocab]."""
    where = [choice.logits for choice in choices]
    if where != list(range(len(logits))):
        logits = logits[torch.tensor(where, device=logits.device)]
    tokens = sample(logits, [choice.row for choice in choices], generator)
    return {choice.sequence: token for choice, token in zip(choices, tokens, strict=True)}


def failure_of(choice: Choice, logits: torch.Tensor, error: Exception) -> RowFailure:
    """Return the failure of a choice that got no token. It is the request's fault if the model's
    logits are finite and its constraint and other settings together exclude every token."""
    is_left_none = isinstance(error, NothingToSample) and error.is_empty
    if is_left_none and choice.row.mask is not None and bool(logits.isfinite().any()):
        return refusal(choice.sequence, choice.row.mask, LEAVES_NOTHING)
    return RowFailure(choice.sequence, RowPhase.SAMPLE, describe(error))
