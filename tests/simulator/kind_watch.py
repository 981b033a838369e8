"""What the watchers of encoders and image models share: answers, ends, pauses, deadlines, order.

Rule: nothing here knows how a scheduler decides. A watcher judges by what went in, what was planned
and what came out, and by the credit that came with each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    Pause,
    PauseMode,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.types import EndReason

if TYPE_CHECKING:
    from engine.core.common.core import AnyCore
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.common.phases import Phase
    from engine.core.common.steps import StepFailure

Results: TypeAlias = dict[tuple[str, int], Any]  # by request and number


@dataclass(eq=False)
class Live:
    """An accepted request. ``has_begun``: a step had a row of it."""

    submit: Submit
    has_begun: bool = False
    has_ended: bool = False

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

    The watcher of a kind of work defines `accept`, `planned`, `commit`, `fail` and `is_whole`.
    """

    def __init__(self, scheduler: AnyCore) -> None:
        self.scheduler = scheduler
        self.config: Any = scheduler.config
        self.pause: PauseMode | None = None
        self.live: dict[str, LiveT] = {}

    # ---- plans

    def planned(self, plan: Any, events: list[OutputEvent], now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        raise NotImplementedError

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
        """Judge the results of an input."""
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
        """Return the results that an input must lead to, and the requests that it must end."""
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

    # ---- what each kind knows

    def accept(self, submit: Submit) -> LiveT:
        """Return the record of a request."""
        raise NotImplementedError

    def commit(self, result: Any, now: float) -> tuple[Results, list[LiveT]]:
        """Return the messages that a step's result must lead to, and the requests that it ends."""
        raise NotImplementedError

    def fail(self, failure: StepFailure) -> list[LiveT]:
        """Return the requests that a failed step ends."""
        raise NotImplementedError

    def number(self, output: Any) -> int:
        """Return the number of a message among those that one step gives its request."""
        return 0

    def is_whole(self, live: LiveT) -> bool:
        """Return whether all of a request is computed."""
        raise NotImplementedError

    def note_end(self, live: LiveT) -> None:
        """Take note that a request has ended."""

    def judge_refusal(self, live: LiveT, output: Refused, now: float) -> str:
        """Judge a refusal."""
        return ""

    def fits_tick(self, live: LiveT, reason: EndReason, now: float) -> bool:
        """Return whether time alone may end a request for this reason."""
        return reason is EndReason.STALLED
