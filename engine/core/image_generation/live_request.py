"""A live drawing: the mutable state that an image model's scheduler keeps of a request."""

from __future__ import annotations

from typing import NamedTuple

from engine.core.common.phases import Phase
from engine.core.common.turns import InTurn
from engine.core.image_generation.types import ImageGenerationRequest, Verb

PHASES = {
    Verb.ENCODE: Phase.ENCODE,
    Verb.DENOISE: Phase.DENOISE,
    Verb.DECODE: Phase.DECODE,
}


class Part(NamedTuple):
    """One step of a drawing. ``needs_slot``: it gives the reader a message."""

    verb: Verb
    index: int  # type: ignore[assignment]  # as in `ImageGenerationPlan`, over tuple.index
    needs_slot: bool


class LiveDrawing(InTurn[ImageGenerationRequest]):
    """A request that was accepted. Its steps are done one by one, in the order of `part`."""

    __slots__ = ()

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
            return Part(Verb.ENCODE, 0, needs_slot=False)
        if done <= request.num_steps:
            return Part(Verb.DENOISE, done - 1, needs_slot=True)
        index = done - 1 - request.num_steps
        is_last_tile = (index + 1) % request.num_tiles == 0
        return Part(Verb.DECODE, index, needs_slot=is_last_tile)

    @property
    def queued_tokens(self) -> int:
        """How many denoising steps are left."""
        return self.request.num_steps - min(max(0, self.num_done - 1), self.request.num_steps)

    @property
    def running_phase(self) -> Phase:
        """The phase to which the drawing's next step belongs."""
        return PHASES[self.part.verb]

    @property
    def wants_preview(self) -> bool:
        """Whether the next step is one that gives a preview."""
        every, part = self.request.preview_every, self.part
        return part.verb is Verb.DENOISE and bool(every) and (part.index + 1) % every == 0

    def needs_slot(self, part: Part) -> bool:
        """Return whether a step gives the reader a message."""
        return part.needs_slot
