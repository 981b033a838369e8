"""A live drawing: the mutable state that an image model's scheduler keeps of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.core.common.one_choice import OneChoice
from engine.core.common.phases import Phase
from engine.core.common.types import Timings
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


class LiveDrawing(OneChoice["ImageRequest"]):
    """A request that was accepted. ``num_done`` of its steps, in the order of `part`, are done.

    It waits until it gets a ``sequence``, by which the worker knows it. From then on it has a seat,
    until its end. ``in_step``: its next step is in flight.
    """

    __slots__ = ("encoded_at", "in_step", "num_done", "sequence")

    def __init__(self, request: ImageRequest, credit: Credit, now: float, number: int) -> None:
        super().__init__(request, credit, now, number)
        self.sequence: SequenceId | None = None
        self.encoded_at: float | None = None  # when the first step was done
        self.num_done = 0
        self.in_step = False

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
    def running_phase(self) -> Phase:
        """What its next step does."""
        return PHASES[self.part.verb]

    @property
    def has_begun(self) -> bool:
        """Whether it has been in a step."""
        return self.num_done > 0 or self.in_step

    @property
    def wants_preview(self) -> bool:
        """Whether the next step is one that gives a preview."""
        every, part = self.request.preview_every, self.part
        return part.verb is ImageVerb.DENOISE and bool(every) and (part.index + 1) % every == 0

    def step_done(self, now: float) -> None:
        """Count the step in flight as done."""
        self.num_done += 1
        if self.num_done == 1:
            self.encoded_at = now

    def timings(self, now: float) -> Timings:
        """Return the seconds that it waited, encoded its prompt, and took for the rest."""
        started = now if self.started_at is None else self.started_at
        encoded = now if self.encoded_at is None else self.encoded_at
        return Timings(
            queue_s=started - self.submitted_at,
            prefill_s=encoded - started,
            decode_s=max(0.0, now - encoded - self.parked_s),
            parked_s=self.parked_s,
        )
