"""Watchers of the core: its inputs and outputs, judged by rules of their own.

They know nothing of how the scheduler decides. Each violation breaks an invariant of
engine/README.md. `tests.simulator.run` watches the readers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from engine.core.common.events import (
    Admitted,
    Finished,
    InputEvent,
    Journaled,
    OutputEvent,
    Refused,
    StepFailed,
    Submit,
)
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.encode.types import Encoded
from engine.core.image_generation.scheduler import ImageGenerationScheduler
from engine.core.image_generation.types import Drawn, Stepped
from engine.core.text.lifecycle import Event
from engine.core.text.scheduler import Scheduler
from engine.core.text.sequence import Sequence
from engine.core.text.types import Tokens
from engine.requests.stream import RequestStream
from tests.simulator.encode_watch import EncodeWatch
from tests.simulator.guest_watch import AwayWatch
from tests.simulator.image_generation_watch import ImageGenerationWatch
from tests.simulator.text_watch import TextWatch

# By a scheduler's class, the watcher of its plans and results.
WATCHES: dict[type, Callable[[Any], Any]] = {
    Scheduler: TextWatch,
    EncodeScheduler: EncodeWatch,
    ImageGenerationScheduler: ImageGenerationWatch,
}
EVENTS_PER_REQUEST = 500  # more means an endless loop; 1,000 drawn worlds had at most 60


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Outcome:
    """The results of a run: its journal, its counts, and the transitions hit by cause."""

    seed: int
    journal: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    statistics: object = None


@dataclass
class _Choices:
    """Which choices of a live request have ended, by the core's events."""

    n: int
    ended: set[int] = field(default_factory=set)


class CoreWatch:
    """Watch every event of every scheduler.

    If a fault makes a runner break its contract, its scheduler may stop with live requests.
    """

    def __init__(
        self, num_clients: int, outcome: Outcome, streams: list[RequestStream[Any]]
    ) -> None:
        self.violation: Violation | None = None
        self.outcome = outcome
        self._limit = EVENTS_PER_REQUEST * (num_clients + 1)
        self._cause = "start"
        self._submitted: dict[str, Submit] = {}
        self._live: dict[str, _Choices] = {}
        self.num_deaths = 0
        self._watches: dict[Any, Any] = {}  # by their schedulers
        self._away = AwayWatch(streams)

    def note(self, event: Journaled) -> None:
        """Record an event and judge it.

        Raises:
            Violation: an invariant does not hold. The first violation is also kept, because the
                engine turns an exception of this hook into a status.
        """
        text = event.journal_line()
        self.outcome.journal.append(f"{trio.current_time():.4f} {text}")
        if not text.startswith(" "):
            words = text.split()
            named = ("cancel", "failed", "pause")
            self._cause = words[-1] if words[0] in named else words[0]
        reason = (
            "the engine loops for ever"
            if len(self.outcome.journal) > self._limit
            else self._judge(event)
        )
        self._tell(reason, text)

    def note_death(self) -> None:
        """Take note that a worker dies in the step that is about to begin."""
        self.num_deaths += 1

    def _tell(self, reason: str, text: str) -> None:
        if reason:
            self.violation = self.violation or Violation(f"{text.strip()}: {reason}")
            raise self.violation

    def _judge(self, event: object) -> str:
        match event:
            case Submit(request):
                self._submitted[request.request_id] = event
                if self.num_deaths:  # requests without a step move from a dead worker to another
                    self._live.pop(request.request_id, None)
            case StepFailed(failure) if "drawn" not in failure.detail:
                return failure.detail
            case Admitted(request_id):
                if request_id in self._live:
                    return "admitted twice"
                request = self._submitted[request_id].request
                self._live[request_id] = _Choices(request.num_choices)
            case Refused(request_id, error):
                if request_id in self._live and error.reason != "DUPLICATE_REQUEST":
                    return "refused after it was admitted"
            case Encoded(request_id) | Stepped(request_id) | Drawn(request_id) if (
                request_id not in self._live
            ):
                return "it has ended, or was never admitted"
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

    # ---- the schedulers' verbs

    @contextmanager
    def watch_schedulers(self) -> Iterator[None]:
        """Watch all schedulers while the block runs, and count every change of a sequence's state
        by its cause."""
        verbs: list[tuple[type, str, Callable[..., Any]]] = [
            (Sequence, "advance", self._advance),
            (Scheduler, "prepare", self._prepare),
        ]
        for owner in WATCHES:
            verbs += [(owner, "apply", self._apply), (owner, "plan", self._plan)]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in verbs]
        for (owner, name, watched), (_, _, original) in zip(verbs, originals, strict=True):
            setattr(owner, name, _in_place_of(original, watched))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _advance(self, advance: Callable[[Event], None], seq: Sequence, event: Event) -> None:
        before = seq.state
        advance(event)
        self.outcome.transitions[f"{before.name} {event.name} by {self._cause}"] += 1

    def _apply(
        self,
        apply: Callable[[InputEvent, float], list[OutputEvent]],
        scheduler: Any,
        event: InputEvent,
        now: float,
    ) -> list[OutputEvent]:
        events = apply(event, now)
        if wrong := self._watch_of(scheduler).applied(event, events, now):
            self._tell(wrong, event.journal_line())
        return events

    def _plan(
        self,
        make: Callable[[float], tuple[Any, list[OutputEvent]]],
        scheduler: Any,
        now: float,
    ) -> tuple[Any, list[OutputEvent]]:
        if isinstance(scheduler, Scheduler):
            self._cause = "plan"
            self._tell(self._away.planning(scheduler), "plan")
        plan, events = make(now)
        if wrong := self._watch_of(scheduler).planned(plan, events, now):
            self._tell(wrong, "no plan" if plan is None else plan.journal_line())
        return plan, events

    def _prepare(self, prepare: Callable[[float], None], scheduler: Scheduler, now: float) -> None:
        self._cause = "plan"  # planning ahead is planning, too
        prepare(now)

    def _watch_of(self, scheduler: Any) -> Any:
        if scheduler not in self._watches:
            self._watches[scheduler] = WATCHES[type(scheduler)](scheduler)
        return self._watches[scheduler]


def _in_place_of(original: Any, watched: Any) -> Any:
    """Return a method that has ``watched`` call the ``original`` one."""

    def method(self: object, *args: Any) -> Any:
        return watched(partial(original, self), self, *args)

    return method


__all__ = ["CoreWatch", "Outcome", "Violation"]
