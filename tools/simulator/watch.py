"""Watchers of the core: what goes into and out of it, judged by rules of its own.

They know nothing of how the scheduler decides. Each sentence is an invariant of
engine/README.md; `tools.simulator.run` watches the readers.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from engine.core import journal
from engine.core.events import (
    Admitted,
    Finished,
    Pause,
    PauseMode,
    Refused,
    Resume,
    StepFailed,
    Submit,
    Tokens,
)
from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import EngineConfig
    from engine.core.events import OutputEvent
    from engine.core.lifecycle import Event

EVENTS_PER_REQUEST = 500  # the worst of 1000 drawn worlds needs 60; beyond it something spins


class Violation(AssertionError):
    """A watcher saw what must never happen."""


@dataclass
class Outcome:
    """What a run left: its journal, what was counted, and the transitions hit by cause."""

    seed: int
    journal: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    statistics: object = None


@dataclass
class _Choices:
    """What the core said of a request that lives: its choices' ends, in order."""

    n: int
    deadline: float | None
    ended: set[int] = field(default_factory=set)


class CoreWatch:
    """Hears every event of every scheduler. ``may_break``: the drawn runner breaks its promises,
    and a scheduler may stop in the middle."""

    def __init__(self, config: EngineConfig, num_clients: int, outcome: Outcome) -> None:
        self.violation: Violation | None = None
        self.outcome = outcome
        self._config = config
        self._limit = EVENTS_PER_REQUEST * (num_clients + 1)
        self._cause = "start"
        self._submitted: dict[str, Submit] = {}
        self._live: dict[str, _Choices] = {}
        self._pause: PauseMode | None = None
        # events do not say whose they are, and models may hear of a pause at different times
        self._judges_pauses = len(config.models) == 1

    def note(self, event: object) -> None:
        """Write an event down and judge it.

        Raises:
            Violation: the first is kept too, since the engine makes a status of what a hook raises.
        """
        text = journal.line(event)  # type: ignore[arg-type]
        self.outcome.journal.append(f"{trio.current_time():.4f} {text}")
        if not text.startswith(" "):
            words = text.split()
            named = ("cancel", "failed", "pause")
            self._cause = words[-1] if words[0] in named else words[0]
        reason = "it spins" if len(self.outcome.journal) > self._limit else self._judge(event)
        if reason:
            self.violation = self.violation or Violation(f"{text.strip()}: {reason}")
            raise self.violation

    def _judge(self, event: object) -> str:
        match event:
            case StepPlan():
                return self._judge_plan(event)
            case Submit(request):
                self._submitted[request.request_id] = event
            case StepFailed(failure) if "drawn" not in failure.detail:
                return failure.detail
            case Pause(mode):
                self._pause = mode
            case Resume():
                self._pause = None
            case Admitted(request_id):
                if request_id in self._live:
                    return "admitted twice"
                request = self._submitted[request_id].request
                self._live[request_id] = _Choices(request.n, request.deadline)
            case Refused(request_id, error):
                if request_id in self._live and error.reason != "DUPLICATE_REQUEST":
                    return "refused after it was admitted"
            case Tokens() | Finished():
                return self._judge_choice(event)
        return ""

    def _judge_choice(self, event: Tokens | Finished) -> str:
        live = self._live.get(event.request_id)
        if live is None or event.choice in live.ended:
            return "it has ended, or was never admitted"
        if isinstance(event, Tokens):
            return "" if event.token_ids else "no tokens"
        seconds = event.timings
        if min(seconds.queue_s, seconds.prefill_s, seconds.decode_s, seconds.parked_s) < 0:
            return f"negative seconds: {seconds}"
        live.ended.add(event.choice)
        if len(live.ended) == live.n:
            del self._live[event.request_id]
        return ""

    def _judge_plan(self, plan: StepPlan) -> str:
        config, rows = self._config, plan.rows
        named = [row.sequence for row in rows]
        named += [fork.sequence for row in rows for fork in row.children]
        if not rows or any(row.count < 1 for row in rows):
            return "nothing to compute"
        if len(set(named)) < len(named):
            return "a sequence twice in a step"
        if len(named) > config.max_num_seqs:
            return f"{len(named)} sequences of at most {config.max_num_seqs}"
        if plan.num_tokens > config.max_num_batched_tokens:
            return f"{plan.num_tokens} tokens of at most {config.max_num_batched_tokens}"
        if set(named) & set(plan.released):
            return "a sequence is released and computed"
        if not self._judges_pauses:
            return ""
        if self._pause is PauseMode.KEEP:
            return "a step while the engine is paused"
        if plan.admitted and self._pause is not None:
            return "a start while the engine is paused"
        return ""

    # ---- the table of transitions

    @contextmanager
    def watch_transitions(self) -> Iterator[None]:
        """Count every change of a sequence's state by what caused it, for the time of a run."""
        advance, plan, prepare = Sequence.advance, Scheduler.plan, Scheduler.prepare

        def counted(seq: Sequence, event: Event) -> None:
            before = seq.state
            advance(seq, event)
            self.outcome.transitions[f"{before.name} {event.name} by {self._cause}"] += 1

        def planning(scheduler: Scheduler, now: float) -> tuple[StepPlan | None, list[OutputEvent]]:
            self._cause = "plan"
            return plan(scheduler, now)

        def preparing(scheduler: Scheduler, now: float) -> None:
            self._cause = "plan"  # planning ahead is planning
            prepare(scheduler, now)

        Sequence.advance = counted  # type: ignore[method-assign]
        Scheduler.plan, Scheduler.prepare = planning, preparing  # type: ignore[method-assign]
        try:
            yield
        finally:
            Sequence.advance = advance  # type: ignore[method-assign]
            Scheduler.plan, Scheduler.prepare = plan, prepare  # type: ignore[method-assign]


__all__ = ["CoreWatch", "Outcome", "Violation"]
