"""The watcher of an image model's core (`tests.simulator.kind_watch`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason
from engine.core.image.least_times import Shape, shape_of
from engine.core.image.seats import HELD_SHARE
from engine.core.image.types import Drawn, ImageVerb, Stepped
from engine.errors import DeadlineInfeasible
from tests.simulator.kind_watch import KindWatch, Live, Results

if TYPE_CHECKING:
    from engine.core.common.core import AnyCore
    from engine.core.common.events import OutputEvent, Refused, Submit
    from engine.core.common.steps import StepFailure
    from engine.core.image.types import ImagePlan, ImageResult

_EPSILON_S = 1e-9


@dataclass(eq=False)
class LiveDrawing(Live):
    """An accepted request. ``done`` counts its steps by their verbs, ``others`` the steps that each
    other drawing has got since this one could go on and got none. The worker knows it by its
    ``sequence``, and checks the order of its steps itself."""

    sequence: int | None = None
    done: Counter[ImageVerb] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    @property
    def gives(self) -> bool:
        """Whether the next step gives the reader a message."""
        request = self.submit.request
        if self.done[ImageVerb.DENOISE] < request.num_steps:
            return bool(self.done)
        return (self.done[ImageVerb.DECODE] + 1) % request.num_tiles == 0


class ImageWatch(KindWatch[LiveDrawing]):
    """Watch the scheduler of one image model."""

    def __init__(self, scheduler: AnyCore) -> None:
        super().__init__(scheduler)
        self.step: tuple[LiveDrawing, ImagePlan, float] | None = None
        self.known: set[int] = set()  # sequences whose state the worker keeps
        self.ended: set[int] = set()  # of these, those whose drawings have ended
        self.least_s: dict[Shape, float] = {}  # the shortest time of each
        self.waiting: set[str] = set()  # without a seat after the last plan

    # ---- plans

    def planned(self, plan: ImagePlan | None, events: list[OutputEvent], now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        able = [live for live in self.live.values() if self._can_go_on(live, plan, now)]
        if plan is None:
            begun = [live for live in able if live.sequence is not None]
            if begun:
                return f"{begun[0].name} could go on, and nobody does"
            held = len(self.known - self.ended)
            has_seat = len(self._active(now)) < self.config.max_drawings
            if able and has_seat and held < HELD_SHARE * self.config.max_drawings:
                return f"{able[0].name} could start, and nobody does"
            return self._judge_starts(now)
        if reason := self._judge_told(plan) or self._begin(plan, now):
            return reason
        assert self.step is not None
        return self._judge_turn(self.step[0], able) or self._judge_starts(now)

    def _active(self, now: float) -> list[LiveDrawing]:
        """Return the drawings with seats that are neither parked nor late."""
        return [
            live
            for live in self.live.values()
            if self.phase(live) not in (Phase.QUEUED, Phase.PARKED) and not live.is_late(now)
        ]

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
        if self.is_held(live):
            return f"{live.name} goes on while the engine is paused"
        if live.submit.credit.reserved != live.gives:
            return f"{live.name} has {live.submit.credit.reserved} slots promised"
        every = live.submit.request.preview_every
        wanted = plan.verb is ImageVerb.DENOISE and every and (plan.index + 1) % every == 0
        if plan.preview != bool(wanted):
            return f"{live.name}: a preview of step {plan.index + 1}?"
        self.known.add(plan.sequence)
        if len(self.known) > HELD_SHARE * self.config.max_drawings:
            return f"the worker keeps {len(self.known)} drawings"
        self.step = (live, plan, now)
        return ""

    def _owner(self, plan: ImagePlan) -> LiveDrawing | None:
        """Return the request of a plan: the one that has the sequence or, for a first step, the one
        that has the drawing."""
        for live in self.live.values():
            if plan.sequence == live.sequence:
                return live
            if live.sequence is None and plan.drawing is live.submit.request.drawing:
                live.sequence = plan.sequence
                return live
        return None

    def _can_go_on(self, live: LiveDrawing, plan: ImagePlan | None, now: float) -> bool:
        """Return whether only other requests can keep this one from the next step."""
        is_own = plan is not None and plan.sequence == live.sequence
        has_room = is_own or not live.gives or live.submit.credit.free > 0
        return has_room and not live.is_late(now) and not self.is_held(live)

    def _judge_turn(self, taken: LiveDrawing, able: list[LiveDrawing]) -> str:
        """Check that no drawing gets two steps while another one that could go on gets none."""
        for live in self.live.values():
            if live is taken or live not in able or live.sequence is None:
                live.others.clear()
                continue
            live.others[taken.name] += 1
            if live.others[taken.name] > 1:
                return f"{live.name} waits for a second step of {taken.name}"
        return ""

    def _judge_starts(self, now: float) -> str:
        """Check that those which got seats were the first in the queue."""
        waiting = {name for name, live in self.live.items() if self.phase(live) is Phase.QUEUED}
        started, self.waiting = (self.waiting - waiting) & self.live.keys(), waiting
        if started and len(self._active(now)) > self.config.max_drawings:
            return f"{started} got seats, of which there are none"
        last = max((self._start_key(name, now) for name in started), default=None)
        first = min((self._start_key(name, now) for name in waiting), default=None)
        if last is not None and first is not None and first < last:
            return f"the first of the queue, since {first[1]:.4f}, is passed over"
        return ""

    def _start_key(self, name: str, now: float) -> tuple[float, float]:
        live = self.live[name]
        return (inf, inf) if live.is_late(now) else self.key(live, now)  # a late one never starts

    # ---- inputs and their results

    def accept(self, submit: Submit) -> LiveDrawing:
        """Return the record of a request."""
        self.waiting.add(submit.request.request_id)
        return LiveDrawing(submit)

    def is_whole(self, live: LiveDrawing) -> bool:
        """Return whether all images of a request are computed."""
        request = live.submit.request
        return live.done[ImageVerb.DECODE] == request.drawing.num_images * request.num_tiles

    def note_end(self, live: LiveDrawing) -> None:
        """Take note that the worker must hear of an end."""
        if live.sequence is not None:
            self.ended.add(live.sequence)

    def commit(self, result: ImageResult, now: float) -> tuple[Results, list[LiveDrawing]]:
        """Return the message that a step's result must lead to, and the request that it ends."""
        assert self.step is not None
        (live, plan, began), self.step = self.step, None
        got, request, gives = result.row, live.submit.request, live.gives
        if isinstance(got, RowFailure):
            return {}, [] if live.has_ended else [live]
        if now > began:
            shape = shape_of(request, plan.verb)
            self.least_s[shape] = min(now - began, self.least_s.get(shape, inf))
        if live.has_ended:
            return {}, []
        live.has_begun = True
        live.done[plan.verb] += 1
        ending = [live] if self.is_whole(live) else []
        if not gives:
            return {}, ending
        name, steps = request.request_id, request.num_steps
        if plan.verb is ImageVerb.DENOISE:
            return {(name, 0): Stepped(name, plan.index + 1, steps, got.image)}, ending
        assert got.image is not None
        drawn = Drawn(name, plan.index // request.num_tiles, got.image)
        return {(name, 0): drawn}, ending

    def fail(self, failure: StepFailure) -> list[LiveDrawing]:
        """Return the request of a failed step, if it lives."""
        assert self.step is not None
        live, self.step = self.step[0], None
        return [] if live.has_ended else [live]

    def judge_refusal(self, live: LiveDrawing, output: Refused, now: float) -> str:
        """Judge a refusal for want of time."""
        is_for_time = isinstance(output.error, DeadlineInfeasible)
        return self._judge_infeasible(live, now) if is_for_time else ""

    def fits_tick(self, live: LiveDrawing, reason: EndReason, now: float) -> bool:
        """Return whether time alone may end a request for this reason."""
        if reason is EndReason.DEADLINE:
            return live.sequence is None and not self._judge_infeasible(live, now)
        return super().fits_tick(live, reason, now)

    def _judge_infeasible(self, live: LiveDrawing, now: float) -> str:
        """Check that a drawing is given up only if steps no larger than its own took too long for
        its deadline."""
        request, seconds = live.submit.request, 0.0
        tiles = request.drawing.num_images * request.num_tiles
        for verb, times in zip(ImageVerb, (1, request.num_steps, tiles), strict=True):
            own = shape_of(request, verb)
            smaller = (took for shape, took in self.least_s.items() if own.covers(shape))
            seconds += times * max(smaller, default=0.0)
        if request.deadline is None or now + seconds < request.deadline - _EPSILON_S:
            return f"{live.name} is given up, and would take {seconds} s"
        return ""
