"""An image model's scheduler: which drawing takes the next step, and what the result gives it.

Rule 1: two methods drive it, as in `engine.core.common.core.Core`: `apply` takes everything that
happens, `plan` returns the next step, whose `StepDone` or `StepFailed` must be applied before the
next `plan`. Rule 2: time comes as ``now``, never from a clock, and decisions depend only on the
inputs. Rule 3: drawings that have begun take turns, one step each (`engine.core.image.seats`).
Rule 4: each accepted request emits at most one `Stepped` for each denoising step, one `Drawn` for
each image, and exactly one `Finished`. Rule 5: every sequence that got a seat is named in
`ImagePlan.ended` of one plan after its end.

Source: design D1, D18, D19.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from engine.core.common.core import CoreStatistics
from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    Pause,
    PauseMode,
    ReaderDrained,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.rate import RecentRate
from engine.core.common.stalls import next_stall, stalled
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import (
    EndReason,
    Explanation,
    PlanId,
    RequestId,
    SequenceId,
    Timings,
    Usage,
)
from engine.core.image.explain import explain
from engine.core.image.intake import Intake
from engine.core.image.least_times import LeastTimes, shape_of
from engine.core.image.live_drawing import LiveDrawing, Part
from engine.core.image.seats import Seats
from engine.core.image.types import Drawn, ImagePlan, ImageVerb, Stepped
from engine.core.image.waiting_queue import WaitingQueue
from engine.errors import EngineBug

if TYPE_CHECKING:
    from engine.config import ImageConfig
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.common.phases import Phase
    from engine.core.common.steps import StepFailure
    from engine.core.image.types import ImageRequest, ImageResult, ImageRowResult
    from engine.errors import FieldViolation


@dataclass(slots=True)
class _Step:
    """The step in flight."""

    plan: ImagePlan
    live: LiveDrawing
    part: Part
    started_at: float


class ImageScheduler:
    """One image model's scheduler. Synchronous, not thread-safe, and never waits."""

    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        self._requests: dict[RequestId, LiveDrawing] = {}
        self._queue = WaitingQueue(config.aging_s)
        self._seats = Seats(config.max_drawings)
        self._step: _Step | None = None
        self._ended: list[SequenceId] = []  # since the last plan; the next one names them
        self._pause: PauseMode | None = None
        self._events: list[OutputEvent] = []
        self._ties, self._plan_ids = count(), count(1)
        self._times, self._rate = LeastTimes(), RecentRate()
        self._intake = Intake(config, self._queue, self._times, self._rate)
        self._steps = self._prompt_tokens = self._late = 0

    def __repr__(self) -> str:
        return f"<ImageScheduler {len(self._seats)} drawings begun, {len(self._queue)} queued>"

    # ---- the two verbs

    def apply(self, event: InputEvent[ImageRequest, ImageResult], now: float) -> list[OutputEvent]:
        """Take one input event and return the output events that it caused, in order.

        Raises:
            EngineBug: The result is not of the plan in flight; nothing changed.
        """
        match event:
            case StepDone():
                self._commit(event.result, now)
            case StepFailed():
                self._step_failed(event.failure, now)
            case Submit():
                self._submit(event, now)
            case Cancel():
                live = self._requests.get(event.request_id)
                if live is not None:
                    self._end(live, event.reason, now)
            case ReaderDrained():
                live = self._requests.get(event.request_id)
                if live is not None and live.parked_since is not None:
                    live.unpark(now)
            case Tick():
                self._end_what_is_due(now)
            case Pause():
                self._pause = event.mode
                if event.mode is PauseMode.ABORT:
                    for live in list(self._requests.values()):
                        self._end(live, EndReason.ABORTED, now, "paused")
            case Resume():
                self._pause = None
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> tuple[ImagePlan | None, list[OutputEvent]]:
        """Return the next step to execute, or None if there is nothing to compute. Planning causes
        no events, so the list is empty.

        Raises:
            EngineBug: A plan is in flight already.
        """
        if self._step is not None:
            raise EngineBug(f"plan {self._step.plan.plan_id} is still in flight")
        if self._pause is PauseMode.KEEP:
            return None, []
        live = self._choose(now)
        return (None if live is None else self._plan_step(live, now)), []

    def prepare(self, now: float) -> None:
        """Do nothing: planning a step takes microseconds."""

    # ---- requests

    def _submit(self, event: Submit[ImageRequest], now: float) -> None:
        request = event.request
        refused = self._intake.refusal(request, self._requests, self._pause, now)
        if refused is not None:
            self._events.append(Refused(request.request_id, refused))
            return
        live = LiveDrawing(request, event.credit, now, next(self._ties))
        self._requests[request.request_id] = live
        self._queue.add(live)
        self._prompt_tokens += request.prompt_tokens
        self._events.append(Admitted(request.request_id, request.prompt_tokens))

    def _end_what_is_due(self, now: float) -> None:
        """End the requests that have stalled, and those in the queue that cannot be done in time
        any more."""
        for live in stalled(self._seats.parked, self.config.stall_timeout_s, now):
            self._end(live, EndReason.STALLED, now)
        for live, error in self._intake.too_late(now):
            self._end(live, EndReason.DEADLINE, now, str(error))

    def _end(
        self,
        live: LiveDrawing,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """End a request that has not ended yet. The result of its step in flight is dropped."""
        phase = live.phase
        if live.parked_since is not None:
            live.unpark(now)
        if live.sequence is None:
            self._queue.remove(live)
        else:
            self._seats.remove(live)
            self._ended.append(live.sequence)
        live.is_ended = True
        del self._requests[live.request.request_id]
        usage = Usage(live.request.prompt_tokens, 0, 0)
        timings = _timings_of(live, now)
        self._events.append(
            Finished(
                *(live.request.request_id, 0, reason, usage, timings),
                phase=phase,
                detail=detail,
                violation=violation,
            )
        )

    # ---- steps

    def _choose(self, now: float) -> LiveDrawing | None:
        """Return the drawing that takes the next step. If all those with seats turn out to be
        parked, others get seats."""
        if self._pause is not None:
            return self._seats.next_in_turn(now, only_begun=True)
        self._seats.fill(self._queue, now)
        live = self._seats.next_in_turn(now)
        while live is None and self._seats.fill(self._queue, now):
            live = self._seats.next_in_turn(now)
        return live

    def _plan_step(self, live: LiveDrawing, now: float) -> ImagePlan:
        """Return the plan of a drawing's next step, which is in flight from now on."""
        assert live.sequence is not None
        part = live.part
        ended, self._ended = tuple(self._ended), []
        plan = ImagePlan(
            plan_id=PlanId(next(self._plan_ids)),
            sequence=live.sequence,
            verb=part.verb,
            index=part.index,
            drawing=live.request.drawing if part.verb is ImageVerb.ENCODE else None,
            preview=live.wants_preview,
            ended=ended,
        )
        live.in_step = True
        self._step = _Step(plan, live, part, now)
        self._steps += 1
        return plan

    def _take_step(self, plan_id: int) -> _Step:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        step.live.in_step = False
        return step

    def _commit(self, result: ImageResult, now: float) -> None:
        """Take the result of a step that succeeded."""
        step, got = self._take_step(result.plan_id), result.row
        live, part = step.live, step.part
        if got.sequence != step.plan.sequence:
            raise EngineBug(f"a result for {got.sequence} came in the step of {step.plan.sequence}")
        seconds = now - step.started_at
        if seconds > 0 and not isinstance(got, RowFailure):
            self._times.note(shape_of(live.request, part.verb), seconds)
            if part.verb is ImageVerb.DENOISE:
                self._rate.note(1, seconds)
        if live.is_ended:
            self._late += 1
            self._give_up_slot(step)
        elif isinstance(got, RowFailure):
            self._give_up_slot(step)
            detail = f"{got.phase}: {got.detail}"
            self._end(live, EndReason.FAILED, now, detail, got.violation)
        else:
            self._take_result(live, part, got, now)

    def _take_result(self, live: LiveDrawing, part: Part, got: ImageRowResult, now: float) -> None:
        """Emit what a step gave its drawing, and end the drawing with its last step."""
        request = live.request
        live.step_done(now)
        if part.needs_slot:
            live.credit.fill()
        if part.verb is ImageVerb.DENOISE:
            step = part.index + 1
            event = Stepped(request.request_id, step, request.num_steps, got.image)
            self._events.append(event)
        elif part.needs_slot:
            if got.image is None:
                raise EngineBug(f"the last tile of {request.request_id} came without its image")
            index = part.index // request.num_tiles
            self._events.append(Drawn(request.request_id, index, got.image))
        if live.num_done == live.num_parts:
            self._end(live, EndReason.STOP, now)

    def _give_up_slot(self, step: _Step) -> None:
        if step.part.needs_slot:
            step.live.credit.cancel()

    def _step_failed(self, failure: StepFailure, now: float) -> None:
        """End the drawing of a failed step: nobody else was part of it, and it would fail again."""
        step = self._take_step(failure.plan_id)
        self._give_up_slot(step)
        if not step.live.is_ended:
            what = "memory: " if failure.kind is FailureKind.OUT_OF_MEMORY else ""
            self._end(step.live, EndReason.FAILED, now, f"{what}{failure.detail}")

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout, or the first drawing in the queue that cannot be done in
        time any more. None if there is neither."""
        stall = next_stall(self._seats.parked, self.config.stall_timeout_s, now)
        late = self._intake.next_too_late(now)
        return min((time for time in (stall, late) if time is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        return not self._requests and self._step is None

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether the request is queued or has a seat."""
        return request_id in self._requests

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a live request (`LiveDrawing.phase`), or None if it is not live."""
        live = self._requests.get(request_id)
        return None if live is None else live.phase

    def has_begun(self, request_id: RequestId) -> bool:
        """Return whether a live request has been in a step."""
        live = self._requests.get(request_id)
        return live is not None and (live.num_done > 0 or live.in_step)

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Return what a live request does and waits for, or None if it is not live."""
        live = self._requests.get(request_id)
        if live is None:
            return None
        rate = self._rate.tokens_per_s
        return explain(live, self._queue, self._seats, now, pause=self._pause, steps_per_s=rate)

    def prefix_keys(self, request: ImageRequest) -> list[bytes]:
        """Return no keys: an image model has no prefix cache."""
        return []

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return 0: an image model has no prefix cache."""
        return 0

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand.

        ``running``, ``waiting``, ``parked`` and ``ending`` count drawings: those with a seat, those
        in the queue, those with a seat that are parked, and the one in the step that has ended.
        ``queued_tokens`` are denoising steps.
        """
        parked = len(self._seats.parked)
        return CoreStatistics(
            running=len(self._seats) - parked,
            waiting=len(self._queue),
            parked=parked,
            ending=int(self._step is not None and self._step.live.is_ended),
            queued_tokens=self._queue.num_steps,
            peak_waiting=self._queue.peak,
            step_count=self._steps,
            step_rows_total=self._steps,
            prompt_tokens_total=self._prompt_tokens,
            late_results=self._late,
        )

    def check(self) -> None:
        """Check that each request is in one place, and that slots and seats agree with the places.

        Raises:
            AssertionError: It names the first request for which this does not hold.
        """
        waiting = list(self._queue)
        assert self._queue.num_steps == sum(live.request.num_steps for live in waiting)
        assert len(waiting) + len(self._seats) == len(self._requests), "a request is lost"
        self._seats.check()
        for live in waiting:
            assert live.sequence is None, f"{live} waits and has begun"
            assert live.parked_since is None, f"{live} is parked for nothing"
        for live in self._seats:
            assert live.sequence not in self._ended, f"{live} lives and is to be named as ended"
        for live in self._requests.values():
            assert not live.is_ended, f"{live} has ended"
            assert live.num_done < live.num_parts, f"{live} is done and has not ended"
            in_step = self._step is not None and self._step.live is live
            assert live.in_step == in_step, f"{live}: in the step or not?"
            promised = int(in_step and live.part.needs_slot)
            assert live.credit.reserved == promised, f"{live}: slots leaked"


def _timings_of(live: LiveDrawing, now: float) -> Timings:
    """Return the seconds of a drawing that ends now: waiting, encoding its prompt, and the rest."""
    started = now if live.started_at is None else live.started_at
    encoded = now if live.encoded_at is None else live.encoded_at
    return Timings(
        queue_s=started - live.submitted_at,
        prefill_s=encoded - started,
        decode_s=max(0.0, now - encoded - live.parked_s),
        parked_s=live.parked_s,
    )
