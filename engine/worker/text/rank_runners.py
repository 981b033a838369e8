"""The runners of a divided model's ranks: a leader and its followers (D29).

Every rank computes the same plan over its part of the model. Only the leader, rank 0, has logits:
it samples, scores, detokenises and follows constraints, and shares the sampled tokens. A follower
keeps tokens and block tables only.

Nothing is drafted: the ranks would have to share the drafts, too.

Rule 1: a forward's shapes (rows, kept tokens) are the same on every rank, because they follow from
plans and shared tokens alone. Rule 2: after a step that failed, the ranks have begun equally many
collectives, or the group ends (`engine.worker.process.answers`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.common.steps import RowFailure, RowPhase
from engine.core.text.plan import RowResult
from engine.core.text.types import Sampling
from engine.errors import EngineBug
from engine.worker.forward.collectives import Ranks, connect
from engine.worker.text.runner import TorchRunner
from engine.worker.text.sequences import SequenceState
from engine.worker.text.step_batch import NO_SCORES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from engine.core.common.types import SequenceId
    from engine.core.text.plan import AdmittedSequence, Row
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.loader import LoadedModel
    from engine.worker.text.step_batch import Batch, Drawn, Scores

NO_TOKEN = -1  # The leader shares this in place of a choice's token if sampling it failed.
STEP_FAILED = -2  # The leader shares this in place of every token if it could not sample at all.


class LeadingRunner(TorchRunner):
    """Rank 0 of a divided model: a `engine.worker.text.interface.TextRunner` whose steps need the
    other ranks."""

    _ranks: Ranks | None = None

    @property
    def num_collectives(self) -> int:
        """How many collectives this rank has begun (Rule 2)."""
        return 0 if self._ranks is None else self._ranks.num_calls

    def close(self) -> None:
        """Free everything, as `TorchRunner.close`, and leave the group."""
        self._ranks = None
        super().close()

    def _connect(self, model: LoadedModel) -> None:
        spec = self._spec
        self._ranks = Ranks(spec.rank, spec.tp, spec.rendezvous, self._device)
        connect(model.module, model.architecture.name, self._ranks)

    def _choose(
        self, rows: Sequence[Row], batch: Batch, logits: torch.Tensor
    ) -> dict[SequenceId, Drawn]:
        sampled = sampled_sequences(rows)
        if not sampled:
            return {}
        assert self._ranks is not None
        try:
            drawn = super()._choose(rows, batch, logits)
        except BaseException:
            self._ranks.share([STEP_FAILED] * len(sampled), len(sampled))
            raise
        own = [drawn.get(sequence) for sequence in sampled]
        shared = [tokens[0] if isinstance(tokens, tuple) else NO_TOKEN for tokens in own]
        self._ranks.share(shared, len(shared))
        return drawn


class FollowingRunner(LeadingRunner):
    """A rank other than 0. Its results say only that it has computed its part."""

    def _admit(self, admitted: Sequence[AdmittedSequence]) -> None:
        for new in admitted:
            state = SequenceState.admit(replace(new, sampling=Sampling()))
            state.tokens += new.output
            self._sequences[new.sequence] = state

    def _choose(
        self, rows: Sequence[Row], batch: Batch, logits: torch.Tensor
    ) -> dict[SequenceId, Drawn]:
        sampled = sampled_sequences(rows)
        if not sampled:
            return {}
        assert self._ranks is not None
        shared = self._ranks.share(None, len(sampled))
        if STEP_FAILED in shared:
            raise EngineBug("the first rank could not sample")
        return {
            sequence: RowFailure(sequence, RowPhase.SAMPLE, "") if token == NO_TOKEN else (token,)
            for sequence, token in zip(sampled, shared, strict=True)
        }

    def _score(
        self,
        batch: Batch,
        logits: torch.Tensor,
        drawn: Mapping[SequenceId, Drawn],
    ) -> Scores:
        return NO_SCORES

    def _take(
        self,
        sequence: SequenceId,
        state: SequenceState,
        tokens: Drawn,
        scored: object,
        *,
        may_offer: bool,
    ) -> RowResult | RowFailure:
        if not isinstance(tokens, RowFailure):
            state.tokens += tokens
        self._sequences[sequence] = state
        return RowResult(sequence)


def sampled_sequences(rows: Sequence[Row]) -> list[SequenceId]:
    """Return the sequences that a plan samples a token for, in the order of its rows."""
    sequences: list[SequenceId] = []
    for row in rows:
        if row.logits.samples:
            sequences += (row.sequence, *(child.sequence for child in row.children))
    return sequences


def rank_runner(spec: RunnerSpec) -> LeadingRunner:
    """Return the unloaded runner of the rank that ``spec`` names."""
    return FollowingRunner(spec) if spec.rank else LeadingRunner(spec)
