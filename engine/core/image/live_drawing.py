"""A live drawing: the mutable state that an image model's scheduler keeps of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.core.common.phases import Phase
from engine.core.image.types import ImageVerb

if TYPE_CHECKING:
    from engine.core.common.credit import Credit
    from engine.core.common.types import SequenceId
    from engine.core.image.types import ImageRequest


PHASES = {
    ImageVerb.ENCODE: Phase.ENCODE,
    ImageVerb.DENOISE: Phase.DENOISE,
    ImageVerb.DECODE: Phase.DECODE,
}


class Part(NamedTuple):
    """One step of a drawing. ``needs_slot``: it gives the reader a message."""

    verb: ImageVerb
    index: int  # type: ignore[assignment]  # as in `ImagePlan`, over tuple.index
    needs_slot: bool


class LiveDrawing:
    """A request that was accepted. ``num_done`` of its steps, in the order of `part`, are done.

    It waits until it gets a ``sequence``, by which the worker knows it. From then on it has a seat,
    until its end. ``in_step``: its next step is in flight. ``is_ended``: its `Finished` event was
    emitted; the result of its step in flight is dropped.
    """

    __slots__ = (
        "credit",
        "denoised_at",
        "encoded_at",
        "in_step",
        "is_ended",
        "num_done",
        "parked_s",
        "parked_since",
        "rank",
        "request",
        "sequence",
        "started_at",
        "submitted_at",
    )

    def __init__(self, request: ImageRequest, credit: Credit, now: float, tie: int) -> None:
        self.request = request
        self.credit = credit
        self.rank = (request.priority, request.arrival, tie)
        self.submitted_at = now
        self.sequence: SequenceId | None = None
        self.started_at: float | None = None
        self.encoded_at: float | None = None  # when the first step was done
        self.denoised_at: float | None = None  # when the last denoising step was done
        self.parked_since: float | None = None
        self.parked_s = 0.0
        self.num_done = 0
        self.in_step = False
        self.is_ended = False

    def __repr__(self) -> str:
        done = f"{self.num_done} of {self.num_parts} steps done"
        return f"<LiveDrawing {self.request.request_id} {self.phase.value}, {done}>"

    @property
    def num_parts(self) -> int:
        """How many steps the whole drawing takes."""
        request = self.request
        return 1 + request.num_steps + request.drawing.num_images * request.num_tiles

    @property
    def part(self) -> Part:
        """The step that comes next, or is in flight."""
        request, done = self.request, self.num_done
        if done == 0:
            return Part(ImageVerb.ENCODE, 0, needs_slot=False)
        if done <= request.num_steps:
            return Part(ImageVerb.DENOISE, done - 1, needs_slot=True)
        index = done - 1 - request.num_steps
        is_last_tile = (index + 1) % request.num_tiles == 0
        return Part(ImageVerb.DECODE, index, needs_slot=is_last_tile)

    @property
    def steps_done(self) -> int:
        """How many denoising steps are done."""
        return min(max(0, self.num_done - 1), self.request.num_steps)

    @property
    def phase(self) -> Phase:
        """The request's phase: QUEUED, PARKED, ENCODE, DENOISE or DECODE."""
        if self.parked_since is not None:
            return Phase.PARKED
        return Phase.QUEUED if self.started_at is None else PHASES[self.part.verb]

    @property
    def wants_preview(self) -> bool:
        """Whether the next step is one that gives a preview."""
        every, part = self.request.preview_every, self.part
        return part.verb is ImageVerb.DENOISE and bool(every) and (part.index + 1) % every == 0

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed; the request is then about to be cancelled."""
        return self.request.deadline is not None and self.request.deadline <= now

    def step_done(self, now: float) -> None:
        """Count the step in flight as done."""
        self.num_done += 1
        if self.num_done == 1:
            self.encoded_at = now
        if self.num_done == 1 + self.request.num_steps:
            self.denoised_at = now

    def park(self, now: float) -> None:
        """Start counting the time that the request waits for its reader."""
        self.parked_since = now

    def unpark(self, now: float) -> None:
        """Stop counting the time that the request waits for its reader."""
        assert self.parked_since is not None
        self.parked_s += now - self.parked_since
        self.parked_since = None
