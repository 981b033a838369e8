"""What a step's results mean for its sequences: progress, tokens and ends.

Rule: each row of the step has its result in the same place; a row's message slot becomes one
message (`Tokens`), or is given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason
from engine.core.text.lifecycle import State
from engine.core.text.memory import snapshots
from engine.core.text.plan import RowResult
from engine.core.text.types import Replayed, Tokens
from engine.errors import EngineBug

if TYPE_CHECKING:
    from engine.core.common.events import OutputEvent
    from engine.core.common.live_requests import Counters
    from engine.core.text.drafting.drafts import Drafts
    from engine.core.text.endings import Endings
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import Row, StepResult
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence


@dataclass(eq=False)
class Committer:
    """Commits steps and appends their events to ``events``. ``completion_tokens`` count
    since the start."""

    _ledger: Ledger
    _endings: Endings
    _drafts: Drafts
    _events: list[OutputEvent]
    _counters: Counters
    completion_tokens: int = 0

    def commit(self, step: PlannedStep, result: StepResult, now: float) -> None:
        """Take the results of a step that succeeded.

        A decode that goes on is the common case, and its time is most of the scheduler's cost
        (`python -m tools.lab.bench schedule`). So it is committed here, with `Credit.fill` inlined,
        to the same effect as `_commit_row`, which takes all other rows.
        """
        step.keep()
        results = iter(result.rows)
        size, make = self._ledger.config.block_size, tuple.__new__
        is_running, decodes = State.RUNNING, Phase.DECODE
        emit, num_sampled = self._events.append, 0
        for seq, row in zip(step.sequences, step.rows, strict=True):
            got = next(results)
            if got.__class__ is RowResult and seq.phase is decodes and seq.state is is_running:
                name, tokens, text, logprobs, prompt_logprobs, finish = got[:6]
                offered, has_model = got[8:10]
                _, start, computed, _, _, _, _, _, _ = row
                if len(tokens) == computed == 1 and finish is None and name == seq.sequence_id:
                    end = start + 1
                    if end % size == 0:
                        self._ledger.publish_computed(seq, start, end)
                    seq.output += tokens
                    seq.num_pending -= 1
                    num_sampled += 1
                    if offered or has_model:
                        self._drafts.offer(seq, offered, has_model=has_model)
                    seq.credit.reserved -= 1
                    event = (
                        seq.request_id,
                        seq.choice,
                        tokens,
                        text,
                        logprobs,
                        prompt_logprobs,
                        False,
                    )
                    emit(make(Tokens, event))
                    continue
            self._commit_row(seq, row, got, now)
            for child in step.forks.get(seq.sequence_id, ()):
                self._take_result(child, next(results), now, has_slot=True)
        self.completion_tokens += num_sampled

    def _commit_row(
        self, seq: Sequence, row: Row, result: RowResult | RowFailure, now: float
    ) -> None:
        if result.sequence != seq.sequence_id:
            raise EngineBug(f"a result for {result.sequence} came in the row of {seq}")
        if not row.logits.samples:
            seq.num_chunks -= 1
        is_computed = seq.state is State.RUNNING and isinstance(result, RowResult)
        if is_computed:
            self._ledger.publish_computed(seq, row.start, row.start + row.count - row.drafts)
        if row.state is not None:
            snapshots.publish(self._ledger, seq, row, is_computed=is_computed)
        self._take_result(seq, result, now, row=row, has_slot=row.logits.samples)

    def _take_result(
        self,
        seq: Sequence,
        result: RowResult | RowFailure,
        now: float,
        *,
        has_slot: bool,
        row: Row | None = None,
    ) -> None:
        """Turn a row's result into progress and events, and its message slot into a message. A
        choice that forked in the row of another one has no ``row``."""
        if has_slot:
            seq.num_pending -= 1
            seq.num_tokens -= 1
        if seq.state is not State.RUNNING:  # the sequence ended while the step ran
            if has_slot:
                seq.credit.cancel()
            self._counters.late_results += 1
            if not seq.in_step:
                self._ledger.finish(seq)
            return
        if isinstance(result, RowFailure):
            if has_slot:
                seq.credit.cancel()
            cause, violation = result.cause, result.violation
            self._endings.end_request(seq.live, EndReason.FAILED, now, cause, violation)
            return
        seq.num_reasoning = result.num_reasoning
        if result.finish is not None and not result.tokens:  # the continued choice had ended
            if has_slot:
                seq.credit.cancel()
            self._endings.end(seq, result.finish, now, matched=result.matched)
            return
        if not has_slot:
            return
        if not result.tokens:
            raise EngineBug(f"{seq} was to get a token and got none")
        planned = 0 if row is None else row.drafts
        if result.drafted > planned:
            raise EngineBug(f"{seq} got {result.drafted} drafts, and {planned} were planned")
        if len(result.tokens) > 1 + result.drafted:
            raise EngineBug(f"{seq} got {len(result.tokens)} tokens for {result.drafted} drafts")
        self._take_tokens(seq, result, now, row)

    def _take_tokens(self, seq: Sequence, result: RowResult, now: float, row: Row | None) -> None:
        if not seq.has_sampled:
            seq.enter(Phase.DECODE, now)
            if result.replayed:
                self._events.append(Replayed(seq.request_id, seq.choice, result.replayed))
        seq.output.extend(result.tokens)
        seq.num_tokens += len(result.tokens)
        self.completion_tokens += len(result.tokens)
        if row is not None and row.drafts:
            self._take_drafts(seq, result, by_model=row.by_model)
        seq.credit.fill()
        self._events.append(
            Tokens(
                seq.request_id,
                seq.choice,
                result.tokens,
                result.text,
                result.logprobs,
                result.prompt_logprobs,
                result.finish is not None,
            )
        )
        if result.finish is not None:
            self._endings.end(seq, result.finish, now, matched=result.matched)
        elif result.offered or result.has_model:
            self._drafts.offer(seq, result.offered, has_model=result.has_model)

    def _take_drafts(self, seq: Sequence, result: RowResult, *, by_model: bool) -> None:
        """Count the accepted drafts as computed, and give back the blocks that only the rejected
        drafts needed. In the last block, the rejected drafts' keys and values are overwritten by
        the sequence's next rows, which begin behind the accepted drafts."""
        start, drafts, accepted = seq.num_computed, result.drafted, len(result.tokens) - 1
        seq.num_computed = start + accepted
        self._ledger.publish_computed(seq, start, start + accepted)
        self._ledger.give_back_behind(seq)
        if drafts:
            self._drafts.note(seq, drafts, accepted, forced=result.forced, by_model=by_model)
