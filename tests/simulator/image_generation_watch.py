"""The watcher of an image model's core (`tests.simulator.kind_watch`)."""

from dataclasses import dataclass
from math import inf

from engine.core.common.core import AnyCore
from engine.core.common.events import OutputEvent, Refused
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason
from engine.core.image_generation.least_times import Shape, shape_of
from engine.core.image_generation.types import (
    Drawn,
    ImageGenerationPlan,
    ImageGenerationResult,
    ImageGenerationRow,
    Stepped,
    Verb,
)
from engine.errors import DeadlineInfeasible
from tests.simulator.kind_watch import Live, Results, TurnsWatch

_EPSILON_S = 1e-9


@dataclass(eq=False)
class LiveDrawing(Live):
    """An accepted request. ``sequence`` is the drawing's number in plans; the worker itself checks
    the order of its steps."""

    sequence: int | None = None


class ImageGenerationWatch(TurnsWatch[LiveDrawing]):
    """Watch the scheduler of one image model."""

    live_type = LiveDrawing

    def __init__(self, scheduler: AnyCore) -> None:
        super().__init__(scheduler)
        self.known: set[int] = set()  # sequences that the worker has in memory
        self.ended: set[int] = set()  # sequences to be named by the next plan as ended
        self.least_s: dict[Shape, float] = {}  # the shortest time of a step, by shape

    # ---- plans

    def planned(
        self, plan: ImageGenerationPlan | None, events: list[OutputEvent], now: float
    ) -> str:
        """Judge a plan, None if there is nothing to compute."""
        if plan is None:
            return super().planned(plan, events, now)
        reason = self._judge_told(plan) or super().planned(plan, events, now)
        return reason or self._judge_preview(plan)

    def _judge_told(self, plan: ImageGenerationPlan) -> str:
        """Check that the plan names to the worker every drawing that has ended, and no other."""
        told = set(plan.ended)
        if told & self.known - self.ended:
            return f"{plan.ended} are told as ended, and live"
        self.known -= told
        if missing := self.known & self.ended:
            return f"{missing} have ended, and the worker is not told"
        self.ended -= told
        return ""

    def _judge_preview(self, plan: ImageGenerationPlan) -> str:
        [(live, _, _)] = self.step
        every = live.submit.request.preview_every
        wanted = plan.verb is Verb.DENOISE and every and (plan.index + 1) % every == 0
        if plan.preview != bool(wanted):
            return f"{live.name}: a preview of step {plan.index + 1}?"
        self.known.add(plan.sequence)
        return ""

    def price(self, live: LiveDrawing) -> float:
        """Return what a drawing's next step usually takes, in seconds."""
        request, tiles = live.submit.request, live.num_done - live.submit.request.num_steps
        verb = Verb.DECODE if tiles > 0 else Verb.DENOISE if live.num_done else Verb.ENCODE
        price: float = self.scheduler._prices.price(shape_of(request, verb))
        return price

    def gives(self, live: LiveDrawing) -> bool:
        """Return whether the next step gives the reader a message."""
        request, tiles = live.submit.request, live.num_done - live.submit.request.num_steps
        return tiles % request.num_tiles == 0 if tiles > 0 else live.num_done > 0

    def owner(self, plan: ImageGenerationPlan) -> LiveDrawing | None:
        """Return the request of a plan: found by the sequence or, at its first step, by the
        drawing."""
        for live in self.live.values():
            if plan.sequence == live.sequence:
                return live
            if live.sequence is None and plan.drawing is live.submit.request.drawing:
                live.sequence = plan.sequence
                return live
        return None

    # ---- inputs and their results

    def is_whole(self, live: LiveDrawing) -> bool:
        """Return whether all images of a request are computed."""
        request = live.submit.request
        tiles = request.drawing.num_images * request.num_tiles
        return live.num_done == 1 + request.num_steps + tiles

    def note_end(self, live: LiveDrawing) -> None:
        """Note that the next plan must name an end to the worker."""
        if live.sequence is not None:
            self.ended.add(live.sequence)

    def commit(
        self, result: ImageGenerationResult, now: float
    ) -> tuple[Results, list[LiveDrawing]]:
        """Note how long the step took, unless its row failed."""
        [(live, _, plan)] = self.step
        if now > self.began and not isinstance(result.row, RowFailure):
            shape = shape_of(live.submit.request, plan.verb)
            self.least_s[shape] = min(now - self.began, self.least_s.get(shape, inf))
        return super().commit(result, now)

    def message(
        self, live: LiveDrawing, part: int, row: ImageGenerationPlan, got: ImageGenerationRow
    ) -> Stepped | Drawn:
        """Return the event that must follow from a step's result."""
        request = live.submit.request
        if row.verb is Verb.DENOISE:
            return Stepped(request.request_id, row.index + 1, request.num_steps, got.image)
        assert got.image is not None
        return Drawn(request.request_id, row.index // request.num_tiles, got.image)

    def judge_refusal(self, live: LiveDrawing, output: Refused, now: float) -> str:
        """Judge a refusal because of the deadline."""
        is_for_time = isinstance(output.error, DeadlineInfeasible)
        return self._judge_infeasible(live, now) if is_for_time else ""

    def fits_tick(self, live: LiveDrawing, reason: EndReason, now: float) -> bool:
        """Return whether a Tick may end a request for this reason."""
        if reason is EndReason.DEADLINE:
            return live.sequence is None and not self._judge_infeasible(live, now)
        return super().fits_tick(live, reason, now)

    def _judge_infeasible(self, live: LiveDrawing, now: float) -> str:
        """Check that a drawing is given up only if, by the times of steps that are no larger than
        its own, it would miss its deadline."""
        request, seconds = live.submit.request, 0.0
        tiles = request.drawing.num_images * request.num_tiles
        for verb, times in zip(Verb, (1, request.num_steps, tiles), strict=True):
            own = shape_of(request, verb)
            smaller = (took for shape, took in self.least_s.items() if own.covers(shape))
            seconds += times * max(smaller, default=0.0)
        if request.deadline is None or now + seconds < request.deadline - _EPSILON_S:
            return f"{live.name} is given up, and would take {seconds} s"
        return ""
