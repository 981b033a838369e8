"""Computes the log-probabilities that a step's requests ask for, of sampled tokens and of prompts.

Rule: nothing here changes a sequence's state; the runner stores the scores once the step can no
longer fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.steps import RowFailure
from engine.errors import EngineBug
from engine.worker.sampling.logprobs import Wanted, score
from engine.worker.text.step_batch import NO_SCORES, Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from engine.core.common.types import SequenceId
    from engine.core.text.types import TokenLogprob
    from engine.worker.text.sequences import SequenceState
    from engine.worker.text.step_batch import Batch, Drawn, ScoredRow


def score_batch(
    batch: Batch,
    logits: torch.Tensor,
    drawn: Mapping[SequenceId, Drawn],
    sequences: Mapping[SequenceId, SequenceState],
    text_of: Callable[[int], str],
) -> Scores:
    """Return the log-probabilities of a step. ``logits`` are [num_kept, vocab].

    Raises:
        EngineBug: A row skips tokens that are not scored yet.
    """
    chosen = [
        (choice.sequence, Wanted(choice.logits + place, token, choice.row.sampling.logprobs))
        for choice in batch.choices
        if choice.row.sampling.logprobs is not None
        and not isinstance(tokens := drawn[choice.sequence], RowFailure)
        for place, token in enumerate(tokens)
    ]
    if not chosen and not batch.scored:
        return NO_SCORES
    entries = score(logits, [wanted for _, wanted in chosen], text_of)
    logprobs: dict[SequenceId, tuple[TokenLogprob, ...]] = {}
    for (sequence, _), entry in zip(chosen, entries, strict=True):
        logprobs[sequence] = (*logprobs.get(sequence, ()), entry)
    prompts = {
        row.sequence: score(logits, _unscored(row, sequences[row.sequence]), text_of)
        for row in batch.scored
    }
    return Scores(logprobs, prompts)


def _unscored(row: ScoredRow, state: SequenceState) -> list[Wanted]:
    """Return the prompt tokens that this row scores and no earlier row has scored. A preempted
    sequence computes positions again that are scored already.

    Raises:
        EngineBug: The row skips tokens that are not scored yet.
    """
    alternatives = state.admission.sampling.prompt_logprobs or 0
    known = len(state.prompt_logprobs) + 1
    if row.start + 1 > known:
        raise EngineBug(f"sequence {row.sequence} skipped the scores of its tokens from {known}")
    end = min(row.start + row.count + 1, len(state.admission.prompt))
    return [
        Wanted(row.logits + place - row.start - 1, state.tokens[place], alternatives)
        for place in range(known, end)
    ]
