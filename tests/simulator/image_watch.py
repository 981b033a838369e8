"""Watchers of an image model's core, which record every input from outside.

Rule: nothing here knows how `engine.core.image.scheduler` decides. A watcher judges by what went
in, what was planned and what came out, and by the credit that came with each request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import floor, inf
from typing import TYPE_CHECKING, NamedTuple

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
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason
from engine.core.image.seats import HELD_SHARE
from engine.core.image.types import Drawn, ImageRequest, ImageResult, ImageVerb, Stepped
from engine.errors import DeadlineInfeasible

if TYPE_CHECKING:
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.image.scheduler import ImageScheduler
    from engine.core.image.types import ImagePlan

_EPSILON_S = 1e-9


class _Shape(NamedTuple):
    """What decides how long a step takes at least: a smaller one does not take longer."""

    verb: ImageVerb
    pixels: int
    rows: int


def _shape_of(request: ImageRequest, verb: ImageVerb) -> _Shape:
    drawing = request.drawing
    pixels, rows = drawing.width * drawing.height, drawing.num_images
    if verb is ImageVerb.ENCODE:
        return _Shape(verb, pixels * bool(drawing.source), rows)
    if verb is ImageVerb.DECODE:
        return _Shape(verb, pixels, 1)
    return _Shape(verb, pixels, rows * (2 if drawing.guidance_scale > 1 else 1))


@dataclass(eq=False)
class _Live:
    """An accepted request. ``others`` counts the steps that each other drawing has got since this
    one could go on and got none."""

    submit: Submit
    request: ImageRequest
    sequence: int | None = None
    num_done: int = 0
    has_ended: bool = False
    others: Counter[str] = field(default_factory=Counter)

    @property
    def num_parts(self) -> int:
        request = self.request
        return 1 + request.num_steps + request.drawing.num_images * request.num_tiles

    @property
    def part(self) -> tuple[ImageVerb, int]:
        """The next step, by the order of a drawing's steps."""
        at = self.num_done - 1
        if at < 0:
            return ImageVerb.ENCODE, 0
        if at < self.request.num_steps:
            return ImageVerb.DENOISE, at
        return ImageVerb.DECODE, at - self.request.num_steps

    @property
    def gives(self) -> bool:
        """Whether the next step gives the reader a message."""
        verb, index = self.part
        if verb is ImageVerb.DECODE:
            return index % self.request.num_tiles == self.request.num_tiles - 1
        return verb is ImageVerb.DENOISE


@dataclass
class ImageWatch:
    """Watch one scheduler. Each method returns what is wrong with its arguments, or ""."""

    scheduler: ImageScheduler
    pause: PauseMode | None = None
    live: dict[str, _Live] = field(default_factory=dict)
    step: tuple[_Live, ImagePlan, float] | None = None
    known: set[int] = field(default_factory=set)  # sequences whose state the worker keeps
    ended: set[int] = field(default_factory=set)  # of these, those whose drawings have ended
    least_s: dict[_Shape, float] = field(default_factory=dict)  # the shortest time of each
    waiting: set[str] = field(default_factory=set)  # without a seat after the last plan

    # ---- plans

    def planned(self, plan: ImagePlan | None, now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        able = [live for live in self.live.values() if self._can_go_on(live, plan, now)]
        if plan is None:
            begun = [live for live in able if live.sequence is not None]
            if begun:
                return f"{begun[0].request.request_id} could go on, and nobody does"
            if able and len(self._active(now)) < self.scheduler.config.max_drawings:
                return self._judge_idle_seat(able[0])
            return self._judge_starts(now)
        if reason := self._judge_told(plan) or self._begin(plan, now):
            return reason
        assert self.step is not None
        return self._judge_turn(self.step[0], able) or self._judge_starts(now)

    def _judge_idle_seat(self, live: _Live) -> str:
        held = len(self.known - self.ended)
        if held >= HELD_SHARE * self.scheduler.config.max_drawings:
            return ""
        return f"{live.request.request_id} could start, and nobody does"

    def _active(self, now: float) -> list[_Live]:
        """Return the drawings with seats that are neither parked nor late."""
        return [
            live
            for live in self.live.values()
            if self._phase(live) not in ("queued", "parked")
            and (live.request.deadline is None or live.request.deadline > now)
        ]

    def _phase(self, live: _Live) -> str:
        phase = self.scheduler.phase_of(live.request.request_id)
        return "" if phase is None else phase.name

    def _judge_told(self, plan: ImagePlan) -> str:
        """Check that the plan tells the worker of every drawing that has ended, and of no other."""
        told = set(plan.ended)
        if told & self.known - self.ended:
            return f"{plan.ended} are told as ended, and live"
        self.known -= told
        if missing := self.known & self.ended:
            return f"{missing} have ended, and the worker is not told"
        self.ended -= told
        return ""

    def _begin(self, plan: ImagePlan, now: float) -> str:
        live = self._owner(plan)
        if live is None:
            return f"{plan.journal_line()}: of nobody"
        name = live.request.request_id
        if (plan.verb, plan.index) != live.part:
            return f"{name} takes {plan.verb} {plan.index}, and {live.part} is next"
        if self.pause is PauseMode.KEEP or (self.pause is not None and not live.num_done):
            return f"{name} goes on while the engine is paused"
        if live.submit.credit.reserved != live.gives:
            return f"{name} has {live.submit.credit.reserved} slots promised"
        every = live.request.preview_every
        wanted = plan.verb is ImageVerb.DENOISE and every and (plan.index + 1) % every == 0
        if plan.preview != bool(wanted):
            return f"{name}: a preview of step {plan.index + 1}?"
        self.known.add(plan.sequence)
        if len(self.known) > HELD_SHARE * self.scheduler.config.max_drawings:
            return f"the worker keeps {len(self.known)} drawings"
        self.step = (live, plan, now)
        return ""

    def _owner(self, plan: ImagePlan) -> _Live | None:
        """Return the request of a plan: the one that has the sequence or, for a first step, the one
        that has the drawing."""
        for live in self.live.values():
            if plan.sequence == live.sequence:
                return live
            if live.sequence is None and plan.drawing is live.request.drawing:
                live.sequence = plan.sequence
                return live
        return None

    def _can_go_on(self, live: _Live, plan: ImagePlan | None, now: float) -> bool:
        """Return whether only other requests can keep this one from the next step."""
        deadline = live.request.deadline
        is_late = deadline is not None and deadline <= now
        is_held = self.pause is PauseMode.KEEP or (self.pause is not None and not live.num_done)
        is_own = plan is not None and plan.sequence == live.sequence
        has_room = is_own or not live.gives or live.submit.credit.free > 0
        return not is_late and not is_held and has_room

    def _judge_turn(self, taken: _Live, able: list[_Live]) -> str:
        """Check that no drawing gets two steps while another one that could go on gets none."""
        name = taken.request.request_id
        for live in self.live.values():
            if live is taken or live not in able or live.sequence is None:
                live.others.clear()
                continue
            live.others[name] += 1
            if live.others[name] > 1:
                return f"{live.request.request_id} waits for a second step of {name}"
        return ""

    def _judge_starts(self, now: float) -> str:
        """Check that those which got seats were the first in the queue."""
        waiting = {name for name in self.live if self._is_waiting(name)}
        started, self.waiting = (self.waiting - waiting) & self.live.keys(), waiting
        if started and len(self._active(now)) > self.scheduler.config.max_drawings:
            return f"{started} got seats, of which there are none"
        last = max((self._key(name, now) for name in started), default=None)
        first = min((self._key(name, now) for name in waiting), default=None)
        if last is not None and first is not None and first < last:
            return f"the first of the queue, since {first[1]:.4f}, is passed over"
        return ""

    def _is_waiting(self, name: str) -> bool:
        return self._phase(self.live[name]) == "queued"

    def _key(self, name: str, now: float) -> tuple[float, float]:
        request = self.live[name].request
        if request.deadline is not None and request.deadline <= now:
            return inf, inf  # it is late, and starts no more
        waited = max(0.0, now - request.arrival)
        return request.priority - floor(waited / self.scheduler.config.aging_s), request.arrival

    # ---- inputs and their results

    def applied(self, event: InputEvent, events: list[OutputEvent], now: float) -> str:
        """Judge the results of an input."""
        answers = [one for one in events if isinstance(one, Admitted | Refused)]
        if len(answers) != isinstance(event, Submit):
            return f"{len(answers)} answers to it"
        expected, must_end = self._expect(event, now)
        for output in events:
            match output:
                case Stepped() | Drawn():
                    reason = "" if output == expected else f"{output!r} instead of {expected!r}"
                    expected = None
                case Finished():
                    reason = self._judge_end(output, event, now)
                case Refused(request_id):
                    reason = self._judge_refusal(output, self.live.pop(request_id, None), now)
                case _:
                    reason = ""
            if reason:
                return reason
        if expected is not None:
            return f"{expected!r} is lost"
        alive = [live.request.request_id for live in must_end if not live.has_ended]
        return f"{', '.join(alive)} must have ended" if alive else ""

    def _expect(self, event: InputEvent, now: float) -> tuple[Stepped | Drawn | None, list[_Live]]:
        """Return the message that an input must lead to, and the requests that it must end."""
        match event:
            case StepDone(ImageResult() as result):
                return self._commit(result, now)
            case StepFailed():
                assert self.step is not None
                live, self.step = self.step[0], None
                return None, [] if live.has_ended else [live]
            case Submit(ImageRequest() as request):
                self.live[request.request_id] = _Live(event, request)
                self.waiting.add(request.request_id)
            case Cancel(request_id) if request_id in self.live:
                return None, [self.live[request_id]]
            case Pause(mode):
                self.pause = mode
                return None, list(self.live.values()) if mode is PauseMode.ABORT else []
            case Resume():
                self.pause = None
        return None, []

    def _commit(
        self, result: ImageResult, now: float
    ) -> tuple[Stepped | Drawn | None, list[_Live]]:
        assert self.step is not None
        (live, plan, began), self.step = self.step, None
        got, request, gives = result.row, live.request, live.gives
        self._measure(live, plan, now - began, has_failed=isinstance(got, RowFailure))
        if live.has_ended:
            return None, []
        if isinstance(got, RowFailure):
            return None, [live]
        live.num_done += 1
        ending = [live] if live.num_done == live.num_parts else []
        if not gives:
            return None, ending
        if plan.verb is ImageVerb.DENOISE:
            name, steps = request.request_id, request.num_steps
            return Stepped(name, plan.index + 1, steps, got.image), ending
        assert got.image is not None
        return Drawn(request.request_id, plan.index // request.num_tiles, got.image), ending

    def _measure(self, live: _Live, plan: ImagePlan, took: float, *, has_failed: bool) -> None:
        if took > 0 and not has_failed:
            shape = _shape_of(live.request, plan.verb)
            self.least_s[shape] = min(took, self.least_s.get(shape, took))

    def _judge_refusal(self, output: Refused, live: _Live | None, now: float) -> str:
        if live is None:
            return "refused twice"
        if isinstance(output.error, DeadlineInfeasible):
            return self._judge_infeasible(live, now)
        return ""

    def _judge_infeasible(self, live: _Live, now: float) -> str:
        """Check that a drawing is given up only if steps no larger than its own took too long for
        its deadline."""
        request, seconds = live.request, 0.0
        tiles = request.drawing.num_images * request.num_tiles
        for verb, times in zip(ImageVerb, (1, request.num_steps, tiles), strict=True):
            own = _shape_of(request, verb)
            seconds += times * max(
                (
                    took
                    for shape, took in self.least_s.items()
                    if shape.verb is verb and shape.pixels <= own.pixels and shape.rows <= own.rows
                ),
                default=0.0,
            )
        if request.deadline is None or now + seconds < request.deadline - _EPSILON_S:
            return f"{request.request_id} is given up, and would take {seconds} s"
        return ""

    def _judge_end(self, output: Finished, event: InputEvent, now: float) -> str:
        live = self.live.pop(output.request_id, None)
        if live is None:
            return f"{output.request_id} ends, and does not live"
        live.has_ended = True
        if live.sequence is not None:
            self.ended.add(live.sequence)
        seconds = output.timings
        if min(seconds.queue_s, seconds.prefill_s, seconds.decode_s, seconds.parked_s) < 0:
            return f"negative seconds: {seconds}"
        is_whole = live.num_done == live.num_parts
        match event:
            case StepDone():
                fits = output.reason is (EndReason.STOP if is_whole else EndReason.FAILED)
            case StepFailed():
                fits = output.reason is EndReason.FAILED
            case Cancel():
                fits = output.reason is event.reason
            case Pause():
                fits = output.reason is EndReason.ABORTED
            case _:
                fits = isinstance(event, Tick) and self._fits_tick(live, output.reason, now)
        return "" if fits else f"{output.request_id} ends by {output.reason}"

    def _fits_tick(self, live: _Live, reason: EndReason, now: float) -> bool:
        if reason is EndReason.DEADLINE:
            return live.sequence is None and not self._judge_infeasible(live, now)
        return reason is EndReason.STALLED
