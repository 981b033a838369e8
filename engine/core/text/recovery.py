"""How a scheduler goes on after a step that failed (D17).

After a step that ran out of memory, the next steps compute less and the newest prompt gives its
blocks back; after three tries the newest request fails. After any other failure, the step's rows
run again, each alone and without drafts, so that only the request that causes the failure fails.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.common.steps import FailureKind
from engine.core.common.types import EndReason
from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.common.step_budget import StepBudget
    from engine.core.common.steps import StepFailure
    from engine.core.text.endings import Endings
    from engine.core.text.ledger import Ledger
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence

MAX_OOM_RETRIES = 3  # steps in a row that may run out of memory before a request fails (D17)


@dataclass(eq=False)
class Recovery:
    """Decides after each step how to go on.

    ``on_preempt`` is called with a running sequence that lost its blocks. ``suspects`` are the
    sequences of a failed step that have to run alone. ``oom_retries`` is how many steps in a row
    have run out of memory. Both are read-only outside.
    """

    _ledger: Ledger
    _budget: StepBudget
    _endings: Endings
    _on_preempt: Callable[[Sequence], None]
    suspects: deque[Sequence] = field(default_factory=deque)
    oom_retries: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a step has failed whose sequences have not all run again."""
        return bool(self.suspects or self.oom_retries)

    def step_succeeded(self) -> None:
        """Note a step that succeeded."""
        self.oom_retries = 0
        self._budget.note_success()

    def step_failed(self, step: PlannedStep, failure: StepFailure, now: float) -> None:
        """Decide what becomes of the sequences of a failed step, which has been undone."""
        live = [seq for seq in step.sequences if not seq.has_ended]
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            self._relieve_memory(live, failure, now)
        elif len(step.sequences) == 1 and not step.num_drafts:
            for seq in live:
                self._endings.end_request(seq.live, EndReason.FAILED, now, failure.detail)
        else:
            self.suspects.extend(live)

    def next_suspect(self) -> Sequence | None:
        """Return the next sequence to run alone: one of a failed step that can still run, but none
        of background work while that gives way."""
        if not self.suspects:
            return None
        gives_way = self._ledger.background_gives_way()
        for _ in range(len(self.suspects)):
            seq = self.suspects.popleft()
            if gives_way and seq.is_background:
                self.suspects.append(seq)
            elif seq.state is State.RUNNING or (seq.state is State.WAITING and not seq.is_attached):
                return seq
        return None

    def _relieve_memory(self, live: list[Sequence], failure: StepFailure, now: float) -> None:
        """Halve the step budget and preempt the newest prompt; after three tries end the newest
        request."""
        if not live:
            return
        newest = max(live, key=lambda seq: seq.rank)
        self.oom_retries += 1
        if self.oom_retries > MAX_OOM_RETRIES:
            self.oom_retries = 0
            self._endings.end_request(newest.live, EndReason.FAILED, now, failure.cause)
            return
        self._budget.halve()
        if len(live) > 1 and newest.state is State.RUNNING and not newest.has_sampled:
            self._ledger.preempt(newest, now)
            self._on_preempt(newest)
