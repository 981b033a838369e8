"""An image model's scheduler: which drawing takes the next step, and what the result gives it.

Rule 1: drawings that have begun take turns, one step each (`engine.core.image.seats`). Rule 2: each
accepted request emits at most one `Stepped` for each denoising step, one `Drawn` for each image,
and exactly one `Finished`. Rule 3: every sequence that got a seat is named in `ImagePlan.ended` of
one plan after its end.

Source: design D1, D18, D19.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from engine.core.common.events import PauseMode
from engine.core.common.live_requests import Places
from engine.core.common.one_choice import OneChoiceCore
from engine.core.common.rate import RecentRate
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import EndReason, SequenceId
from engine.core.image.deadlines import Deadlines
from engine.core.image.least_times import LeastTimes, shape_of
from engine.core.image.live_drawing import LiveDrawing, Part
from engine.core.image.seats import Seats
from engine.core.image.types import (
    Drawn,
    ImagePlan,
    ImageRequest,
    ImageResult,
    ImageVerb,
    Stepped,
)
from engine.errors import EngineBug

if TYPE_CHECKING:
    from engine.config import ImageConfig
    from engine.core.common.credit import Credit
    from engine.core.common.steps import StepFailure
    from engine.core.common.types import PlanId
    from engine.core.image.types import ImageRowResult
    from engine.errors import TrioletError


@dataclass(slots=True)
class _Step:
    """A step of one drawing."""

    plan: ImagePlan
    live: LiveDrawing
    part: Part
    started_at: float


class ImageScheduler(OneChoiceCore[ImageRequest, ImagePlan, ImageResult, LiveDrawing, _Step]):
    """One image model's scheduler."""

    config: ImageConfig
    token_word = "denoising steps"

    def __init__(self, config: ImageConfig) -> None:
        super().__init__(config)
        self._seats = Seats(config.max_drawings, self._park)
        self._ended: list[SequenceId] = []  # since the last plan; the next one names them
        self._numbers = count()
        self._times, self._rate = LeastTimes(), RecentRate()
        self._deadlines = Deadlines(self._waiting, self._times)

    def __repr__(self) -> str:
        return f"<ImageScheduler {len(self._seats)} drawings begun, {len(self._waiting)} queued>"

    # ---- requests

    @property
    def _tokens_per_s(self) -> float:
        return self._rate.tokens_per_s

    def _infeasible(self, request: ImageRequest, now: float) -> TrioletError | None:
        return self._deadlines.infeasible(request, now)

    def _admit(self, request: ImageRequest, credit: Credit, now: float) -> LiveDrawing:
        live = LiveDrawing(request, credit, now, next(self._numbers))
        self._waiting.add(live, now)
        return live

    def _end_due(self, now: float) -> None:
        """End the requests that have stalled, and those in the queue that cannot be done in time
        any more."""
        super()._end_due(now)
        for live, error in self._deadlines.too_late(now):
            self._end(live, EndReason.DEADLINE, now, str(error))

    def _stalled(self, now: float) -> list[LiveDrawing]:
        return sorted(super()._stalled(now), key=lambda live: live.rank)

    def _leave(self, live: LiveDrawing) -> None:
        if live.sequence is None:
            self._waiting.remove(live)
        else:
            self._seats.remove(live)
            self._ended.append(live.sequence)

    # ---- steps

    def _next_step(self, plan_id: PlanId, now: float) -> _Step | None:
        live = None if self._pause is PauseMode.KEEP else self._choose(now)
        return None if live is None else self._plan_step(live, plan_id, now)

    def _choose(self, now: float) -> LiveDrawing | None:
        """Return the drawing that takes the next step. If all those with seats turn out to be
        parked, others get seats."""
        if self._pause is not None:
            return self._seats.next_in_turn(now, only_begun=True)
        self._seats.fill(self._waiting, now)
        live = self._seats.next_in_turn(now)
        while live is None and self._seats.fill(self._waiting, now):
            live = self._seats.next_in_turn(now)
        return live

    def _plan_step(self, live: LiveDrawing, plan_id: PlanId, now: float) -> _Step:
        """Return a drawing's next step, which the drawing is in from now on."""
        assert live.sequence is not None
        part = live.part
        ended, self._ended = tuple(self._ended), []
        plan = ImagePlan(
            plan_id=plan_id,
            sequence=live.sequence,
            verb=part.verb,
            index=part.index,
            drawing=live.request.drawing if part.verb is ImageVerb.ENCODE else None,
            preview=live.wants_preview,
            ended=ended,
        )
        live.in_step = True
        return _Step(plan, live, part, now)

    def _take_step(self, plan_id: PlanId) -> _Step:
        step = super()._take_step(plan_id)
        step.live.in_step = False
        return step

    def _commit(self, step: _Step, result: ImageResult, now: float) -> None:
        live, part, got = step.live, step.part, result.row
        if got.sequence != step.plan.sequence:
            raise EngineBug(f"a result for {got.sequence} came in the step of {step.plan.sequence}")
        seconds = now - step.started_at
        if seconds > 0 and not isinstance(got, RowFailure):
            self._times.note(shape_of(live.request, part.verb), seconds)
            if part.verb is ImageVerb.DENOISE:
                self._rate.note(1, seconds)
        if live.is_ended:
            self._counters.late_results += 1
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

    def _step_failed(self, step: _Step, failure: StepFailure, now: float) -> None:
        """End the drawing of a failed step: nobody else was part of it, and it would fail again."""
        self._give_up_slot(step)
        if not step.live.is_ended:
            what = "memory: " if failure.kind is FailureKind.OUT_OF_MEMORY else ""
            self._end(step.live, EndReason.FAILED, now, f"{what}{failure.detail}")

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout, or the first drawing in the queue that cannot be done in
        time any more. None if there is neither."""
        dues = (super().next_wakeup(now), self._deadlines.next_too_late(now))
        return min((due for due in dues if due is not None), default=None)

    def _tokens_begun(self) -> int:
        return sum(live.request.num_steps - live.steps_done for live in self._seats)

    def _why_left_out(self, live: LiveDrawing) -> str:
        others = len(self._seats) - len(self._parked) - 1
        if not others or live.in_step:
            return ""
        return f"its turn: drawings take one step each, and {others} more go on"

    def _why_waiting(self, ahead: int) -> str:
        num_begun = len(self._seats)
        return f"a seat: {num_begun} drawings take turns" if num_begun else "a step"

    def _places(self) -> Places:
        """Count drawings: those with a seat, those in the queue, those with a seat that are parked,
        and the one in the step that has ended."""
        parked = len(self._parked)
        ending = int(self._step is not None and self._step.live.is_ended)
        return Places(len(self._seats) - parked, len(self._waiting), parked, ending)

    def check(self) -> None:
        """Check that each request is in one place, and that slots and seats agree with the places.

        Raises:
            AssertionError: It names the first request for which this does not hold.
        """
        super().check()
        waiting = self._waiting.items
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
