"""Watchers of the core: its inputs and outputs, judged by rules of their own.

They know nothing of how the scheduler decides. Each sentence is an invariant of engine/README.md.
`tests.simulator.run` watches the readers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.events import (
    Admitted,
    Finished,
    Pause,
    PauseMode,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
)
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.encode.types import Encoded
from engine.core.image.scheduler import ImageScheduler
from engine.core.image.types import Drawn, Stepped
from engine.core.text.plan import StepPlan
from engine.core.text.scheduler import Scheduler
from engine.core.text.sequence import Sequence
from engine.core.text.types import Preempted, Tokens
from tests.simulator.encode_watch import EncodeWatch
from tests.simulator.guest_watch import AwayWatch, GuestWatch
from tests.simulator.image_watch import ImageWatch
from tests.simulator.pace_watch import PaceWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.config import EngineConfig
    from engine.core.common.events import InputEvent, Journaled, OutputEvent
    from engine.core.common.types import SequenceId
    from engine.core.encode.types import EncodePlan
    from engine.core.image.types import ImagePlan
    from engine.core.text.lifecycle import Event
    from engine.core.text.types import PromptImage
    from engine.requests.stream import RequestStream

    _Planned = tuple[StepPlan | None, list[OutputEvent]]
    _EncodePlanned = tuple[EncodePlan | None, list[OutputEvent]]
    _ImagePlanned = tuple[ImagePlan | None, list[OutputEvent]]

EVENTS_PER_REQUEST = 500  # the worst of 1000 drawn worlds needs 60; beyond it something spins


class Violation(AssertionError):
    """An invariant does not hold."""


def gave_way_for_nobody(plan: StepPlan | None, events: list[OutputEvent]) -> set[SequenceId]:
    """Return the sequences that lost their blocks to a plan in which nobody else gets any.

    Such work is lost for nothing, and perhaps again in the next plan. ``events`` are those of
    planning.
    """
    rows = () if plan is None else plan.rows
    lost = {event.sequence for event in events if isinstance(event, Preempted)}
    got = {row.sequence for row in rows if row.blocks is not None or row.children}
    return set() if got - lost else lost


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
    """What the core has reported of a live request: its choices' ends, in order."""

    n: int
    ended: set[int] = field(default_factory=set)


class CoreWatch:
    """Watch every event of every scheduler.

    A drawn runner may break its contract, and a scheduler may stop in the middle.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_clients: int,
        outcome: Outcome,
        streams: list[RequestStream[Any]],
    ) -> None:
        self.violation: Violation | None = None
        self.outcome = outcome
        self._config = config
        self._limit = EVENTS_PER_REQUEST * (num_clients + 1)
        self._cause = "start"
        self._submitted: dict[str, Submit] = {}
        self._live: dict[str, _Choices] = {}
        # Events do not name their model, and models may apply a pause at different times.
        self._images: dict[tuple[Scheduler | None, SequenceId], tuple[PromptImage, ...]] = {}
        self._pauses: dict[Scheduler, PauseMode | None] = {}
        self._planner: Scheduler | None = None
        self.num_deaths = 0
        self._encoders: dict[EncodeScheduler, EncodeWatch] = {}
        self._artists: dict[ImageScheduler, ImageWatch] = {}
        self._paces: dict[Scheduler, PaceWatch] = {}
        self._guests: defaultdict[Scheduler, GuestWatch] = defaultdict(GuestWatch)
        self._away = AwayWatch(streams)

    def note(self, event: Journaled) -> None:
        """Record an event and judge it.

        Raises:
            Violation: an invariant does not hold. The first one is also kept, because the
                engine turns what a hook raises into a status.
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
            case StepPlan():
                return self._judge_plan(event)
            case Submit(request):
                self._submitted[request.request_id] = event
                if self.num_deaths:  # it may have moved before its first step
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
        if (cost := self._image_cost(plan)) > config.max_num_batched_tokens - plan.num_tokens:
            return f"{cost} for images beside {plan.num_tokens} tokens"
        if set(named) & set(plan.released):
            return "a sequence is released and computed"
        pause = self._pauses.get(self._planner) if self._planner is not None else None
        if pause is PauseMode.KEEP:
            return "a step while the engine is paused"
        if plan.admitted and pause is not None:
            return "a start while the engine is paused"
        return ""

    def _image_cost(self, plan: StepPlan) -> int:
        """Return what encoding the images that begin in a step costs, 0 for one image alone."""
        own = self._planner
        self._images |= {(own, one.sequence): one.images for one in plan.admitted if one.images}
        met = [
            image.cost
            for row in plan.rows
            for image in self._images.get((own, row.sequence), ())
            if row.start <= image.start < row.start + row.count
        ]
        return sum(met) if len(met) > 1 else 0

    # ---- the schedulers' verbs

    @contextmanager
    def watch_schedulers(self) -> Iterator[None]:
        """Watch all schedulers while the block runs.

        Every change of a sequence's state is counted by its cause, and so is which text model plans
        and which is paused. Encoders and image models have watchers of their own.
        """
        verbs = (
            (Sequence, "advance", self._advance),
            (Scheduler, "apply", self._apply),
            (Scheduler, "plan", self._plan),
            (Scheduler, "prepare", self._prepare),
            (EncodeScheduler, "apply", self._apply_to_encoder),
            (EncodeScheduler, "plan", self._plan_encoder),
            (ImageScheduler, "apply", self._apply_to_artist),
            (ImageScheduler, "plan", self._plan_artist),
        )
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
        self, apply: Callable[..., list[OutputEvent]], scheduler: Scheduler, *args: Any
    ) -> list[OutputEvent]:
        match args[0]:
            case Pause(mode):
                self._pauses[scheduler] = mode
            case Resume():
                self._pauses[scheduler] = None
            case StepDone():
                self._pace_of(scheduler).done(args[1])
        return apply(*args)

    def _plan(
        self, make: Callable[[float], _Planned], scheduler: Scheduler, now: float
    ) -> _Planned:
        self._cause, self._planner = "plan", scheduler
        self._tell(self._away.planning(scheduler), "plan")
        plan, events = make(now)
        if lost := gave_way_for_nobody(plan, events):
            self._tell(f"{lost} gave way for nobody", "plan")
        if plan is not None:
            self._tell(self._pace_of(scheduler).planned(plan, now), "plan")
            self._tell(self._guests[scheduler].planned(scheduler, plan, now), "plan")
        return plan, events

    def _prepare(self, prepare: Callable[[float], None], scheduler: Scheduler, now: float) -> None:
        self._cause = "plan"  # planning ahead is planning, too
        prepare(now)

    def _apply_to_encoder(
        self,
        apply: Callable[[InputEvent, float], list[OutputEvent]],
        scheduler: EncodeScheduler,
        event: InputEvent,
        now: float,
    ) -> list[OutputEvent]:
        events = apply(event, now)
        self._tell(self._encode_watch_of(scheduler).applied(event, events), event.journal_line())
        return events

    def _plan_encoder(
        self, plan: Callable[[float], _EncodePlanned], scheduler: EncodeScheduler, now: float
    ) -> _EncodePlanned:
        planned = plan(now)
        text = "no plan" if planned[0] is None else planned[0].journal_line()
        self._tell(self._encode_watch_of(scheduler).planned(planned[0], now), text)
        return planned

    def _apply_to_artist(
        self,
        apply: Callable[[InputEvent, float], list[OutputEvent]],
        scheduler: ImageScheduler,
        event: InputEvent,
        now: float,
    ) -> list[OutputEvent]:
        events = apply(event, now)
        wrong = self._image_watch_of(scheduler).applied(event, events, now)
        self._tell(wrong, event.journal_line())
        return events

    def _plan_artist(
        self, plan: Callable[[float], _ImagePlanned], scheduler: ImageScheduler, now: float
    ) -> _ImagePlanned:
        planned = plan(now)
        text = "no plan" if planned[0] is None else planned[0].journal_line()
        self._tell(self._image_watch_of(scheduler).planned(planned[0], now), text)
        return planned

    def _image_watch_of(self, scheduler: ImageScheduler) -> ImageWatch:
        return self._artists.setdefault(scheduler, ImageWatch(scheduler))

    def _pace_of(self, scheduler: Scheduler) -> PaceWatch:
        return self._paces.setdefault(scheduler, PaceWatch(scheduler.config))

    def _encode_watch_of(self, scheduler: EncodeScheduler) -> EncodeWatch:
        return self._encoders.setdefault(scheduler, EncodeWatch(scheduler))


def _in_place_of(original: Any, watched: Any) -> Any:
    """Return a method that has ``watched`` call the ``original`` one."""

    def method(self: object, *args: Any) -> Any:
        return watched(partial(original, self), self, *args)

    return method


__all__ = ["CoreWatch", "Outcome", "Violation"]
