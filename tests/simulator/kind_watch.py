"""The base classes of watchers for kinds of work whose requests have one choice.

Rule: nothing here knows how a scheduler decides. A watcher judges by a scheduler's inputs, plans
and outputs, and by each request's credit.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, Generic, TypeAlias, TypeVar

from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    InputEvent,
    OutputEvent,
    Pause,
    PauseMode,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.phases import Phase
from engine.core.common.steps import RowFailure, StepFailure
from engine.core.common.turns import HELD_SHARE
from engine.core.common.types import EndReason
from tests.simulator.share_watch import Leads

Results: TypeAlias = dict[tuple[str, int], Any]  # by request and number


@dataclass(eq=False)
class Live:
    """An accepted request. ``has_begun``: a step had a row of it. ``num_done`` of its parts are
    done. ``others`` counts, by request, the steps that others have got since this one could go
    on."""

    submit: Submit
    has_begun: bool = False
    has_ended: bool = False
    num_done: int = 0
    others: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The request's id."""
        return self.submit.request.request_id

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed."""
        deadline: float | None = self.submit.request.deadline
        return deadline is not None and deadline <= now


LiveT = TypeVar("LiveT", bound=Live)


class KindWatch(Generic[LiveT]):
    """Watch one scheduler. Each method returns what is wrong with its arguments, or "".

    The watcher of a kind of work defines `planned`, and how results follow from rows. ``step`` has
    the rows of the step in flight, each with its request and part; ``began`` is its start.
    """

    live_type: type[Any] = Live

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.config: Any = scheduler.config
        self.pause: PauseMode | None = None
        self.live: dict[str, LiveT] = {}
        self.step: list[tuple[LiveT, int, Any]] = []
        self.began = 0.0

    # ---- plans

    def planned(self, plan: Any, events: list[OutputEvent], now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        raise NotImplementedError

    def gives(self, live: LiveT) -> bool:
        """Return whether the request's next step gives its reader a message."""
        return True

    def is_held(self, live: LiveT) -> bool:
        """Return whether a pause keeps a request from the next step."""
        return self.pause is PauseMode.KEEP or (self.pause is not None and not live.has_begun)

    def phase(self, live: LiveT) -> Phase | None:
        """Return a request's phase."""
        return self.scheduler.phase_of(live.submit.request.request_id)

    def key(self, live: LiveT, now: float) -> tuple[float, float]:
        """Return a request's place in the queue: its priority after aging, and its arrival."""
        request = live.submit.request
        waited = max(0.0, now - request.arrival)
        return request.priority - floor(waited / self.config.aging_s), request.arrival

    # ---- inputs and their results

    def applied(self, event: InputEvent, events: list[OutputEvent], now: float) -> str:
        """Judge the events that an input has caused."""
        answers = [one for one in events if isinstance(one, Admitted | Refused)]
        if len(answers) != isinstance(event, Submit):
            return f"{len(answers)} answers to it"
        results, must_end = self._expect(event, now)
        for output in events:
            if reason := self._judge(output, event, results, now):
                return reason
        if results:
            return f"{[*results.values()]} are lost"
        alive = [live.name for live in must_end if not live.has_ended]
        return f"{', '.join(alive)} must have ended" if alive else ""

    def _expect(self, event: InputEvent, now: float) -> tuple[Results, list[LiveT]]:
        """Return the results that must follow from an input, and the requests that must end."""
        match event:
            case StepDone(result):
                return self.commit(result, now)
            case StepFailed(failure):
                return {}, self.fail(failure)
            case Submit(request):
                self.live[request.request_id] = self.accept(event)
            case Cancel(request_id) if request_id in self.live:
                return {}, [self.live[request_id]]
            case Pause(mode):
                self.pause = mode
                return {}, list(self.live.values()) if mode is PauseMode.ABORT else []
            case Resume():
                self.pause = None
        return {}, []

    def _judge(self, output: Any, event: InputEvent, results: Results, now: float) -> str:
        match output:
            case Admitted():
                return ""
            case Finished():
                return self._judge_end(output, event, now)
            case Refused(request_id):
                live = self.live.pop(request_id, None)
                return self.judge_refusal(live, output, now) if live else "refused twice"
        expected = results.pop((output.request_id, self.number(output)), None)
        return "" if output == expected else f"{output!r} instead of {expected!r}"

    def _judge_end(self, output: Finished, event: InputEvent, now: float) -> str:
        live = self.live.pop(output.request_id, None)
        if live is None:
            return f"{output.request_id} ends, and does not live"
        live.has_ended = True
        self.note_end(live)
        seconds = output.timings
        if min(seconds.queue_s, seconds.prefill_s, seconds.decode_s, seconds.parked_s) < 0:
            return f"negative seconds: {seconds}"
        match event:
            case StepDone():
                fits = output.reason is (
                    EndReason.STOP if self.is_whole(live) else EndReason.FAILED
                )
            case StepFailed():
                fits = output.reason is EndReason.FAILED
            case Cancel():
                fits = output.reason is event.reason
            case Pause():
                fits = output.reason is EndReason.ABORTED
            case _:
                fits = isinstance(event, Tick) and self.fits_tick(live, output.reason, now)
        return "" if fits else f"{output.request_id} ends by {output.reason}"

    # ---- for each kind of work to define

    def accept(self, submit: Submit) -> LiveT:
        """Return the record of a request."""
        return self.live_type(submit)

    def commit(self, result: Any, now: float) -> tuple[Results, list[LiveT]]:
        """Return the messages that must follow from a step, and the requests that must end."""
        step, self.step = self.step, []
        results: Results = {}
        ending: list[LiveT] = []
        for (live, part, row), got in zip(step, result.rows, strict=True):
            if live.has_ended or live in ending:
                continue
            if isinstance(got, RowFailure):
                ending.append(live)
                continue
            gives = self.gives(live)
            live.num_done += 1
            if gives:
                results[live.name, part] = self.message(live, part, row, got)
            if self.is_whole(live):
                ending.append(live)
        return results, ending

    def message(self, live: LiveT, part: int, row: Any, got: Any) -> Any:
        """Return the event that must follow from a row's result."""
        return got

    def fail(self, failure: StepFailure) -> list[LiveT]:
        """Return the requests that a failed step ends: a step of one row ends the row's request."""
        step, self.step = self.step, []
        return [live for live, _, _ in step if len(step) == 1 and not live.has_ended]

    def number(self, output: Any) -> int:
        """Return the message's number among those that one step gives its request."""
        return 0

    def is_whole(self, live: LiveT) -> bool:
        """Return whether a request is computed to its end."""
        return live.num_done == live.submit.request.num_tokens

    def note_end(self, live: LiveT) -> None:
        """Take note that a request has ended."""

    def judge_refusal(self, live: LiveT, output: Refused, now: float) -> str:
        """Judge a refusal."""
        return ""

    def fits_tick(self, live: LiveT, reason: EndReason, now: float) -> bool:
        """Return whether a Tick may end a request for this reason."""
        return reason is EndReason.STALLED


class TurnsWatch(KindWatch[LiveT]):
    """Watch one scheduler whose requests take turns."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.waiting: set[str] = set()  # requests that had no seat after the last plan
        self.leads = Leads(scheduler.shares)
        self.interrupted: set[str] = set()  # holders that had nothing to do since the last plan

    def applied(self, event: InputEvent, events: list[OutputEvent], now: float) -> str:
        """Judge an input, and take note of holders that have nothing to do."""
        wrong = super().applied(event, events, now)
        self._note_interrupted()
        return wrong

    def _note_interrupted(self) -> None:
        lives = self.live.values()
        active = {holder_of(live) for live in lives if self.phase(live) is not Phase.PARKED}
        self.interrupted |= self.leads.holders - active

    def planned(self, plan: Any, events: list[OutputEvent], now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        able = [live for live in self.live.values() if self.can_go_on(live, plan, now)]
        if plan is None:
            return self._judge_idle(able, now) or self._judge_starts(now)
        live = self.owner(plan)
        if live is None:
            return f"{plan.journal_line()}: of nobody"
        if self.is_held(live):
            return f"{live.name} goes on while the engine is paused"
        if live.submit.credit.reserved != self.gives(live):
            return f"{live.name} has {live.submit.credit.reserved} slots promised"
        live.has_begun = True
        if (held := self._num_held()) > HELD_SHARE * self.scheduler.max_seats:
            return f"{held} requests have seats"
        self.step, self.began = [(live, 0, plan)], now
        return (
            self.judge_turn(live, able) or self._judge_shares(live, able) or self._judge_starts(now)
        )

    def price(self, live: LiveT) -> float:
        """Return what the next step of a request costs its holder."""
        return 1.0

    def _judge_shares(self, taken: LiveT, able: list[LiveT]) -> str:
        """Check that no holder with a request that could go on gets more than another for its
        weight."""
        service = {holder_of(taken): self.price(taken)}
        weights = {holder_of(live): live.submit.request.weight for live in self.live.values()}
        self.leads.tell(service, weights)
        seated = [live for live in able if self.phase(live) not in (Phase.QUEUED, Phase.PARKED)]
        waiting = {*map(holder_of, seated), *service} - self.interrupted
        self.interrupted = set()
        largest = max(map(self.price, self.live.values()))
        wrong = self.leads.note(service, weights, waiting, largest)
        self._note_interrupted()  # planning may have parked requests
        return wrong

    def owner(self, plan: Any) -> LiveT | None:
        """Return the request of a plan."""
        return self.live.get(plan.row.request_id)

    def can_go_on(self, live: LiveT, plan: Any, now: float) -> bool:
        """Return whether the next step could be this request's, if there were no others."""
        is_own = plan is not None and self.owner(plan) is live
        has_room = is_own or not self.gives(live) or live.submit.credit.free > 0
        return has_room and not live.is_late(now) and not self.is_held(live)

    def judge_turn(self, taken: LiveT, able: list[LiveT]) -> str:
        """Check that no request gets two steps while another one of its holder that could go on
        gets none."""
        for live in self.live.values():
            if holder_of(live) != holder_of(taken):
                continue
            if live is taken or live not in able or self.phase(live) is Phase.QUEUED:
                live.others.clear()
                continue
            live.others[taken.name] += 1
            if live.others[taken.name] > 1:
                return f"{live.name} waits for a second step of {taken.name}"
        return ""

    def _judge_idle(self, able: list[LiveT], now: float) -> str:
        begun = [live for live in able if live.has_begun]
        if begun:
            return f"{begun[0].name} could go on, and nobody does"
        most = self.scheduler.max_seats
        if able and len(self._active(now)) < most and self._num_held() < HELD_SHARE * most:
            return f"{able[0].name} could start, and nobody does"
        return ""

    def _num_held(self) -> int:
        """Return how many requests have seats, with those that have had no step."""
        return sum(self.phase(live) is not Phase.QUEUED for live in self.live.values())

    def _active(self, now: float) -> list[LiveT]:
        """Return the requests with seats that are neither parked nor late."""
        return [
            live
            for live in self.live.values()
            if self.phase(live) not in (Phase.QUEUED, Phase.PARKED) and not live.is_late(now)
        ]

    def _judge_starts(self, now: float) -> str:
        """Check that the requests which got seats were the first of their holders in the queue,
        that no holder has seats beyond its part while there are none, and that each has one."""
        waiting = {name for name, live in self.live.items() if self.phase(live) is Phase.QUEUED}
        started, self.waiting = (self.waiting - waiting) & self.live.keys(), waiting
        active, most = self._active(now), self.scheduler.max_seats
        queued = [self.live[name] for name in waiting if not self.live[name].is_late(now)]
        lives = {holder_of(live): live.submit.request for live in (*active, *queued)}
        weights = sum(self._weight_of(holder) for holder in lives)
        for holder in {holder_of(self.live[name]) for name in started}:
            seats = sum(holder_of(live) == holder for live in active)
            part = max(1, most * self._weight_of(holder) // weights)
            if len(active) > most and seats > (most if len(lives) == 1 else part):
                return f"{holder} got {seats} seats, of which there are none"
        seated = {holder_of(x) for x in self.live.values() if self.phase(x) is not Phase.QUEUED}
        if self.pause is None and self._num_held() < HELD_SHARE * most:
            for live in queued:
                if holder_of(live) not in seated:
                    return f"{holder_of(live)} has no seat"
        for holder in lives:
            last = max(self._start_keys(started, holder, now), default=None)
            first = min(self._start_keys(waiting, holder, now), default=None)
            if last is not None and first is not None and first < last:
                return f"the first of the queue, since {first[1]:.4f}, is passed over"
        return ""

    def _weight_of(self, holder: str) -> int:
        weight: int = self.scheduler.shares._known[holder].weight
        return weight

    def _start_keys(self, names: set[str], holder: str, now: float) -> list[tuple[float, float]]:
        return [
            self._start_key(name, now) for name in names if holder_of(self.live[name]) == holder
        ]

    def _start_key(self, name: str, now: float) -> tuple[float, float]:
        live = self.live[name]
        return (inf, inf) if live.is_late(now) else self.key(live, now)  # never starts

    def accept(self, submit: Submit) -> LiveT:
        """Return the record of a request, which begins in the queue."""
        self.waiting.add(submit.request.request_id)
        return super().accept(submit)


def holder_of(live: Live) -> str:
    """Return the holder of a request."""
    holder: str = live.submit.request.holder
    return holder
