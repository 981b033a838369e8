"""An image model's scheduler: which drawing takes the next step, and what the result gives it.

Rule 1: drawings that have begun take turns, one step each, and holders share the time of all steps
(`engine.core.common.turns`). Rule 2: each accepted request emits at most one `Stepped` for each
denoising step, one `Drawn` for each image, and exactly one `Finished`. Rule 3: every request that a
plan has started is named in `ImageGenerationPlan.ended` of exactly one later plan, after its end.

Source: docs/decisions.md, D1, D18, D19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.steps import RowFailure
from engine.core.common.turns import TurnsCore
from engine.core.common.types import EndReason
from engine.core.image_generation.deadlines import Deadlines
from engine.core.image_generation.least_times import LeastTimes, shape_of
from engine.core.image_generation.live_request import LiveDrawing, Part
from engine.core.image_generation.types import (
    Drawn,
    ImageGenerationPlan,
    ImageGenerationRequest,
    ImageGenerationResult,
    Stepped,
    Verb,
)
from engine.core.image_generation.usual_times import UsualTimes
from engine.errors import EngineBug

if TYPE_CHECKING:
    from engine.config import ImageGenerationConfig
    from engine.core.common.one_choice import OneChoiceStep, Parts
    from engine.core.common.types import PlanId, SequenceId
    from engine.core.image_generation.types import ImageGenerationRow
    from engine.errors import TrioletError


class ImageGenerationScheduler(
    TurnsCore[ImageGenerationRequest, ImageGenerationPlan, ImageGenerationResult, LiveDrawing]
):
    """One image model's scheduler."""

    config: ImageGenerationConfig
    live_type = LiveDrawing
    token_word, plural = "denoising steps", "drawings"

    def __init__(self, config: ImageGenerationConfig) -> None:
        super().__init__(config, config.max_drawings)
        self._ended: list[SequenceId] = []  # requests that ended since the last plan
        self._times = LeastTimes()
        self._prices = UsualTimes()
        self._deadlines = Deadlines(self._waiting, self._times)

    def __repr__(self) -> str:
        return f"<ImageGenerationScheduler: {len(self._seats)} begun, {len(self._waiting)} queued>"

    # ---- requests

    def _infeasible(self, request: ImageGenerationRequest, now: float) -> TrioletError | None:
        return self._deadlines.infeasible(request, now)

    def _end_due(self, now: float) -> None:
        """End the requests that have stalled, and those in the queue that will be late."""
        super()._end_due(now)
        for live, error in self._deadlines.too_late(now):
            self._end(live, EndReason.DEADLINE, now, str(error))

    def _leave(self, live: LiveDrawing) -> None:
        super()._leave(live)
        if live.sequence is not None:
            self._ended.append(live.sequence)

    # ---- steps

    def _price_of(self, live: LiveDrawing) -> float:
        return self._prices.price(shape_of(live.request, live.part.verb))

    def _plan_of(self, plan_id: PlanId, rows: Parts[LiveDrawing]) -> ImageGenerationPlan:
        [(live, part)] = rows
        assert live.sequence is not None
        ended, self._ended = tuple(self._ended), []
        return ImageGenerationPlan(
            plan_id=plan_id,
            sequence=live.sequence,
            verb=part.verb,
            index=part.index,
            drawing=live.request.drawing if part.verb is Verb.ENCODE else None,
            preview=live.wants_preview,
            ended=ended,
        )

    def _note_step(
        self, step: OneChoiceStep, result: ImageGenerationResult, seconds: float
    ) -> None:
        [(live, part)] = step.rows
        if isinstance(result.row, RowFailure):
            return
        shape = shape_of(live.request, part.verb)
        self._times.note(shape, seconds)
        self._prices.note(shape, seconds)
        if part.verb is Verb.DENOISE:
            super()._note_step(step, result, seconds)

    def _take_result(
        self, live: LiveDrawing, part: Part, got: ImageGenerationRow, now: float
    ) -> None:
        request = live.request
        if part.verb is Verb.ENCODE:
            live.prefilled_at = now
        elif part.verb is Verb.DENOISE:
            step = part.index + 1
            event = Stepped(request.request_id, step, request.num_steps, got.image)
            self._events.append(event)
        elif part.needs_slot:
            if got.image is None:
                raise EngineBug(f"the last tile of {request.request_id} came without its image")
            index = part.index // request.num_tiles
            self._events.append(Drawn(request.request_id, index, got.image))

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout, or the first drawing in the queue that cannot be done in
        time any more. None if there is neither."""
        dues = (super().next_wakeup(now), self._deadlines.next_too_late(now))
        return min((due for due in dues if due is not None), default=None)

    def check(self) -> None:
        """Check also that no live drawing is among those that the next plan names as ended.

        Raises:
            AssertionError: One is.
        """
        super().check()
        for live in self._seats:
            assert live.sequence not in self._ended, f"{live} lives and is to be named as ended"
