"""A step that is planned, and how it ends: handed out, kept, undone, or reconciled with sequences'
ends.

Rule: undoing a step leaves blocks, message slots, places and counters as they were before it was
planned. Each step ends once, by `keep` or `undo`, or by a `reconcile` that returns False.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.types import PlanId
from engine.core.text.lifecycle import State
from engine.core.text.memory.states import StepStates
from engine.core.text.plan import AdmittedSequence, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from engine.core.common.shares import Share
    from engine.core.common.types import BlockId, SequenceId
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import Row
    from engine.core.text.sequence import Rank, Sequence

EMPTY_PLAN = StepPlan(PlanId(0), ())


class PlannedStep:
    """A step's rows, and the records by which it is kept or undone.

    ``sequences`` runs parallel to ``rows``; ``forks`` maps a parent's id to the choices that fork
    in its row; ``started`` are the sequences that this step took from the waiting queue;
    ``pending_keys`` are the prefix-cache keys of the blocks that it computes. ``num_drafts`` counts
    the drafted tokens of its rows, and ``image_cost`` what encoding its rows' images may cost, in
    tokens. ``states`` are the state slots that it takes; None if the model has no states.
    ``is_shared``: it was planned for several holders. Then ``passed`` are the holders behind those
    of its rows that it could compute nothing for, and ``turns`` has the rank of the last decode of
    each holder that it had no room for all decodes of.
    `seal` sets ``plan``, ``num_tokens``, which its rows compute, and ``started_at``.
    """

    # Values that most steps have. As attributes of the class they cost a step nothing.
    started_at = 0.0
    num_drafts = num_tokens = image_cost = 0
    plan = EMPTY_PLAN
    states: StepStates | None = None
    is_shared = False
    passed: SequenceOf[Share] = ()
    turns: dict[Share, Rank]  # of a step with ``is_shared``

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.reservation = ledger.pool.open()
        if ledger.states is not None:
            self.states = StepStates(ledger.states)
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.forks: dict[SequenceId, list[Sequence]] = {}
        self.started: list[Sequence] = []
        self.pending_keys: set[bytes] = set()
        self.copies: list[tuple[BlockId, BlockId]] = []

    def seal(self, plan_id: PlanId, now: float) -> None:
        """Make the plan as it goes to the worker now, with the sequences that the worker sees for
        the first time and those that it can release."""
        admitted = []
        for seq in self.started:
            if not seq.is_known_to_worker:
                seq.is_known_to_worker = True
                admitted.append(_admission(seq))
        released, self._ledger.released = self._ledger.released, []
        self.started_at = now
        self.plan = StepPlan(
            plan_id, tuple(self.rows), tuple(self.copies), tuple(admitted), tuple(released)
        )
        self.num_tokens = self.plan.num_tokens

    def keep(self) -> None:
        """End a step that succeeded: its blocks belong to their sequences, and the worker knows the
        choices that forked."""
        self._ledger.pool.commit(self.reservation)
        if self.states is not None:
            self.states.keep()
        for forks in self.forks.values():
            for child in forks:
                child.is_known_to_worker = True

    def undo(self, now: float) -> None:
        """End a step that failed or is discarded: blocks and slots go back, and the sequences that
        it started wait again. Sequences that have ended meanwhile are finished."""
        for seq, row in zip(self.sequences, self.rows, strict=True):
            forks = self.forks.get(seq.sequence_id, [])
            samples = row.logits.samples
            if samples:
                seq.credit.cancel(1 + len(forks))
            _take_back_blocks(seq, row)
            seq.count_back(row.start, samples=samples)
            for child in forks:
                child.blocks = []
                child.count_back(0, samples=True)
        self._roll_back()
        for seq in self.sequences:
            for child in self.forks.get(seq.sequence_id, []):
                if not self._finish_ended(child):
                    self._ledger.unfork(child, now)
            if not self._finish_ended(seq) and seq in self.started:
                self._ledger.preempt(seq, now)
                if not seq.is_known_to_worker:
                    seq.enter(Phase.QUEUED, now)

    def _finish_ended(self, seq: Sequence) -> bool:
        """Return whether a sequence of an undone step has ended. If so, it is finished, unless
        another step still uses it."""
        if seq.state is not State.ENDING:
            return False
        if not seq.in_step:
            self._ledger.finish(seq)
        return True

    def reconcile(self) -> bool:
        """Drop the rows of sequences that ended since the step was prepared, once the step before
        it is over. Return False if no row is left; the step is then undone."""
        is_ending = State.ENDING
        ended = [seq for seq in self.sequences if seq.state is is_ending]
        for seq in ended:
            index = self.sequences.index(seq)
            self._drop(index)
            del self.sequences[index], self.rows[index]
        if not self.rows:
            self._roll_back()
        return bool(self.rows)

    def _roll_back(self) -> None:
        """Give back every block and every state slot that the step took."""
        self._ledger.pool.rollback(self.reservation)
        if self.states is not None:
            forked = [child for forks in self.forks.values() for child in forks]
            self.states.undo((*self.started, *forked))

    def _drop(self, index: int) -> None:
        """Give back what one row reserved. The choices that were to fork in the row have ended,
        too: before its fork a request ends as a whole."""
        seq, row = self.sequences[index], self.rows[index]
        forks = self.forks.pop(seq.sequence_id, [])
        taken = _take_back_blocks(seq, row)
        for child in forks:
            taken, child.blocks = [*taken, *child.blocks], []
        own = {target for child in row.children for target in child.blocks}
        self.copies = [copy for copy in self.copies if copy[1] not in own]
        seq.credit.cancel((1 + len(forks)) if row.logits.samples else 0)
        self._ledger.pool.give_back(self.reservation, taken)
        if self.states is not None:
            self.states.drop(row.state, [*forks, *([seq] if seq in self.started else ())])
        for child in forks:
            child.count_back(0, samples=True)
            self._ledger.finish(child)
        if seq in self.started:
            self.started.remove(seq)
        seq.count_back(row.start, samples=row.logits.samples)
        if not seq.in_step:
            self._ledger.finish(seq)


def _take_back_blocks(seq: Sequence, row: Row) -> list[BlockId]:
    """Take the row's new blocks out of the sequence's block table, and return them."""
    if row.blocks is None:
        return []
    taken = seq.blocks[row.blocks.keep :]
    del seq.blocks[row.blocks.keep :]
    return taken


def _admission(seq: Sequence) -> AdmittedSequence:
    request, sampling = seq.live.request, seq.live.request.sampling
    if seq.choice:  # continued choices do not fork, so each is admitted
        sampling = replace(sampling, choice=seq.choice)
    return AdmittedSequence(
        seq.sequence_id,
        request.prompt,
        sampling,
        request.stops,
        request.constraint,
        tuple(seq.output),
        request.adapter,
        request.speculates,
        request.images,
        request.reasoning,
    )
