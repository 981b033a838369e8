"""The stream of a GenerateImage request: Started, progress, images, and Finished.

Rule 1: images become files in threads, one at a time for each request, in the request's own task.
Events that come meanwhile wait behind them, so that the reader gets everything in order. Rule 2: an
event of the core keeps its message slot until the reader has taken the event that was made of it.
Rule 3: a drawing has succeeded once its reader has taken its images. So a reader that takes none
ends its request by the stall timeout, and images do not gather for clients that have left. The time
in which images become files does not count towards that timeout.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from random import SystemRandom
from typing import TYPE_CHECKING

import trio

from engine.core.common.events import Tick
from engine.core.common.phases import Phase
from engine.core.common.types import EndReason
from engine.core.image_generation.types import Drawn, Stepped
from engine.errors import DeadlineInfeasible
from engine.images.encode import DEFAULT_QUALITY, encode
from engine.requests.image_generation.values import (
    DrawingFinished,
    DrawingStarted,
    GeneratedImage,
    ImageGenerationEvent,
    ImageUsage,
    Progress,
)
from engine.requests.stream import RequestStream

if TYPE_CHECKING:
    from engine.core.common.events import Admitted, Finished, OutputEvent
    from engine.core.image_generation.types import RawImage
    from engine.errors import TrioletError
    from engine.requests.image_generation.prepare import PreparedDrawing
    from engine.requests.image_generation.values import DrawRequest
    from engine.requests.stream import StreamOptions

DRAWN_SEEDS = 2**32  # seeds that the server draws are below this, so that they are short to type


class ImageGenerationStream(RequestStream[ImageGenerationEvent]):
    """A GenerateImage request's life on the Trio thread. ``seed`` is the client's or drawn here."""

    operation = "generate_content"
    how_far = "after {0.tokens_done} steps"
    result_types = (GeneratedImage,)

    def __init__(self, request: DrawRequest, options: StreamOptions[ImageGenerationEvent]) -> None:
        # Started and Finished hold no message slot.
        super().__init__(request, options, num_beside=2, credited=(Progress, GeneratedImage))
        # Each slot is freed at once, as the stream's end waits for that; a step takes far longer.
        self.num_per_release = 1
        self.seed = SystemRandom().randrange(DRAWN_SEEDS) if request.seed is None else request.seed
        self._prepared: PreparedDrawing | None = None
        self._waiting: deque[Stepped | Drawn] = deque()  # waiting images and the events behind them
        self._finished: Finished | None = None  # the core's event, kept until the images are taken
        self._news = trio.Event()

    def _take(self, prepared: PreparedDrawing) -> None:
        self._prepared = prepared
        self.how_far = f"after {{0.tokens_done}} of {prepared.request.num_steps} steps"

    @property
    def _ready(self) -> PreparedDrawing:
        assert self._prepared is not None, "the core knows only requests that were prepared"
        return self._prepared

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core. Progress without a preview is passed on if no event waits."""
        if not isinstance(event, Stepped | Drawn):
            super().push(event)
            return
        if isinstance(event, Stepped):
            self._note_result(Phase.DENOISE, event.step)
        else:
            self._note_result(Phase.DECODE, self.tokens_done)
        if isinstance(event, Stepped) and event.preview is None and not self._waiting:
            self._reader.push(Progress(event.step, event.steps))
            return
        self._waiting.append(event)
        self.credit.waits_until = math.inf
        self._news.set()

    def _admit(self, event: Admitted) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        prepared = self._ready
        drawing = prepared.request.drawing
        self._reader.push(
            DrawingStarted(
                *(self.request_id, self.model, self.seed, drawing.width, drawing.height),
                prepared.request.num_steps,
                prepared.scheduler,
            )
        )

    def _finish(self, event: Finished) -> None:
        """Leave the stream's end to the request's task, which first hands the images over."""
        self.phase = Phase.WRITE
        self._finished = event
        self._news.set()

    def _end_early(self, event: Finished) -> None:
        if event.reason is not EndReason.DEADLINE or not event.detail:
            super()._end_early(event)
            return
        self.phase, self.reason = event.phase or self.phase, self.reason or event.reason
        self.close(DeadlineInfeasible(event.detail, phase=self.phase.value))

    def lose_replica(self, error: TrioletError, *, has_begun: bool) -> None:
        """Act on the death of the replica, unless the replica has finished the drawing."""
        if self._finished is None:
            super().lose_replica(error, has_begun=has_begun)
            self._news.set()

    def report_drained(self) -> None:
        """Let the core and the request's task know that there are free slots again."""
        super().report_drained()
        self._news.set()

    def note_taken(self) -> None:
        """Let the stall timeout begin anew: an image has many parts, and its slot is free only
        after the last part."""
        self.credit.waits_until = max(self.credit.waits_until, trio.current_time())
        self._news.set()

    def close(self, error: TrioletError | None) -> None:
        """End the stream: no event follows. Idempotent; the first call decides ``error``."""
        super().close(error)
        self._waiting.clear()
        self._news.set()

    # ---- the request's task

    async def wait_turn(self) -> None:
        """Make files of the images as they come, until the stream is closed or must change its
        replica.

        Cancellation: at once; a thread that writes an image goes on to its end.
        """
        while not self._turn.is_set():
            if self._waiting:
                await self._hand_over_first()
            elif self._finished is None:
                await self._wait_for_news()
            elif self.credit.filled:
                await self._wait_for_reader()
            else:
                self._end_well(self._finished)

    async def _hand_over_first(self) -> None:
        """Encode the image of the oldest waiting event, and hand the event to the reader."""
        event = self._waiting[0]
        made: Progress | GeneratedImage
        if isinstance(event, Drawn):
            data = await self._file_of(event.image)
            made = GeneratedImage(event.index, data, self._format)
        else:
            data = b"" if event.preview is None else await self._file_of(event.preview)
            made = Progress(event.step, event.steps, data or None)
        if not self.is_closed:
            self._waiting.popleft()
            self.num_made += isinstance(made, GeneratedImage)
            self._reader.push(made)
            if not self._waiting:
                self._count_stall()

    def _count_stall(self) -> None:
        """Let the stall timeout of the reader begin now, if it has not begun."""
        self.credit.waits_until = trio.current_time()
        if self.credit.starved and self.replica is not None:
            self.replica.loop.post(Tick())  # the loop then wakes when the timeout ends

    async def _file_of(self, image: RawImage) -> bytes:
        quality = self.request.quality or DEFAULT_QUALITY
        width, height, pixels = image
        job = partial(encode, pixels, width, height, self._format, quality)
        return await self._ready.in_thread(job)

    @property
    def _format(self) -> str:
        return self.request.format or "png"

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news = trio.Event()

    async def _wait_for_reader(self) -> None:
        """Wait until the reader takes something, or end the request by the stall timeout."""
        assert self.replica is not None
        self.credit.mark_starved()
        with trio.move_on_after(self.replica.loop.core.config.stall_timeout_s) as patience:
            await self._wait_for_news()
        if patience.cancelled_caught and not self.is_closed:
            self.reason = self.reason or EndReason.STALLED
            self.close(self.early_end(self.reason))

    def _end_well(self, finished: Finished) -> None:
        request = self._ready.request
        usage = ImageUsage(
            finished.usage.prompt_tokens, request.num_steps, request.drawing.num_images
        )
        self._reader.push(DrawingFinished(self.request_id, self.seed, usage, finished.timings))
        self.close(None)
