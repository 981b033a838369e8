"""Drawings in a simulated world: their requests, what their readers must get, and its model.

Drawings come from generators of their own, so that worlds without them stay the same. The oracle
follows the fake's definition (`engine.worker.fakes.image_generation`) and shares only its primitive
functions.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, cast

from PIL import Image

from engine.config import EngineConfig, ModelConfig
from engine.core.image_generation.types import Drawing, RawImage
from engine.images.encode import encode
from engine.requests.image_generation import stream as image_generation_stream
from engine.requests.image_generation.values import (
    DrawingFinished,
    DrawingStarted,
    DrawRequest,
    GeneratedImage,
    ImageGenerationEvent,
    Progress,
)
from engine.status import Capability
from engine.worker.fakes.image_generation import FAKE_INFO, SLOW_SCHEDULER, image_of, preview_of
from tests.simulator.readers import Reader
from tests.simulator.watch import Violation

FAULT = "drawings"
SHARE = 0.3  # of worlds
MODEL = "artist"
SOURCE_SIZE = (16, 8)  # also the size of its drawing, so that no source is resized
_BAD = (
    ({"prompt": ""}, "INVALID_REQUEST"),
    ({"prompt": "x" * 100}, "REQUEST_TOO_LARGE"),
    ({"steps": 0}, "INVALID_REQUEST"),
    ({"guidance": float("nan")}, "INVALID_REQUEST"),
    ({"width": 2048, "height": 2048, "n": 1}, "REQUEST_TOO_LARGE"),
    ({"source": b"no image", "strength": 0.5}, "INVALID_REQUEST"),
    ({"scheduler": "nobody's"}, "INVALID_REQUEST"),
    ({"timeout_s": float("nan")}, "INVALID_REQUEST"),
)
# Fields of bad requests, each with the reason of the refusal.
BAD = [({"check": False} | fields, reason) for fields, reason in _BAD]


def is_drawn(seed: int) -> bool:
    """Return whether the world of this seed has drawings."""
    return random.Random(f"drawings {seed}").random() < SHARE


def add(seed: int, config: EngineConfig, name: str) -> EngineConfig:
    """Return a configuration with an image model of this name."""
    rng = random.Random(f"artist {seed}")
    model = ModelConfig(name, lazy=rng.random() < 0.3, capability=Capability.TEXT_TO_IMAGE)
    return replace(config, models=(*config.models, model), max_drawings=rng.choice([1, 2, 4]))


def ask(rng: random.Random, index: int, timeout_s: float | None) -> DrawRequest:
    source = None
    width, height = rng.choice([8, 16, 72, 120]), rng.choice([8, 16, 72])
    if rng.random() < 0.2:
        width, height = SOURCE_SIZE
        source = encode(rng.randbytes(3 * width * height), width, height, "png", 1)
    return DrawRequest(
        model=rng.choice(["", MODEL]),
        prompt=f"<{rng.randint(1, 900)}>",
        negative_prompt=rng.choice(["", "<3>"]),
        width=width,
        height=height,
        steps=rng.randint(2, 12),
        guidance=rng.choice([None, 0.0, 5.0]),
        seed=rng.choice([None, rng.randrange(2**64)]),
        n=rng.choice([None, 1, 2, 3]),
        source=source,
        strength=None if source is None else rng.choice([None, 0.5, 1.0]),
        scheduler=rng.choice(["", "euler", SLOW_SCHEDULER]),
        preview_every=rng.choice([None, None, 1, 3]),
        request_id=f"d{index}",
        priority=rng.choice([None, 0, 0, -1, 2]),
        timeout_s=timeout_s,
    )


@dataclass
class DrawReader(Reader):
    """The reader of a GenerateImage request, which compares each image with the oracle's."""

    num_steps: int = 0
    images: list[bytes] = field(default_factory=list)
    drawing: Drawing | None = None
    started: DrawingStarted | None = None
    finished: DrawingFinished | None = None

    @property
    def _request(self) -> DrawRequest:
        request = self.client.request
        assert isinstance(request, DrawRequest)
        return request

    @property
    def num_seen(self) -> int:
        ends = (self.started is not None) + (self.finished is not None)
        return ends + self.num_steps + len(self.images)

    @property
    def num_results(self) -> int:
        return len(self.images)

    def see(self, event: ImageGenerationEvent) -> None:
        name = self._request.request_id
        if isinstance(event, DrawingStarted):
            if self.started is not None:
                raise Violation(f"{name}: started twice")
            self.started, self.drawing = event, _drawing_of(self._request, event)
            return
        if self.started is None or self.drawing is None or self.finished is not None:
            raise Violation(f"{name}: {event} out of place")
        match event:
            case Progress():
                self._see_progress(event, self.started, self.drawing)
            case GeneratedImage():
                self._see_image(event, self.started, self.drawing)
            case DrawingFinished():
                self._see_end(event)

    def _see_progress(self, event: Progress, started: DrawingStarted, drawing: Drawing) -> None:
        self.num_steps += 1
        name, every = self._request.request_id, self._request.preview_every
        if (event.step, event.steps) != (self.num_steps, started.steps) or self.images:
            raise Violation(f"{name}: {event.step} of {event.steps} is not the next step")
        wanted = preview_of(drawing, event.step) if every and not event.step % every else None
        got = None if event.preview is None else _pixels_of(event.preview)
        if got != (None if wanted is None else wanted.pixels):
            raise Violation(f"{name}: a wrong preview of step {event.step}")

    def _see_image(self, event: GeneratedImage, started: DrawingStarted, drawing: Drawing) -> None:
        name = self._request.request_id
        if event.index != len(self.images) or self.num_steps != started.steps:
            raise Violation(f"{name}: image {event.index} out of place")
        wanted: RawImage = image_of(drawing, started.steps, event.index)
        if _pixels_of(event.data) != wanted.pixels:
            raise Violation(f"{name}: another's image {event.index}")
        self.images.append(event.data)

    def _see_end(self, event: DrawingFinished) -> None:
        limit = self.client.stall_after
        if limit is not None and limit < self.num_seen:
            name = self._request.request_id
            raise Violation(f"{name}: succeeded, though its reader has not taken its images")
        self.finished = event

    def check_whole(self) -> None:
        """Check that every step and every image has come."""
        name, end = self._request.request_id, self.finished
        if end is None or self.started is None or end.seed != self.started.seed:
            raise Violation(f"{name}: succeeded, and ended by {end}")
        if len(self.images) != self._request.num_images or self.num_steps != end.usage.steps:
            raise Violation(f"{name}: {len(self.images)} images after {self.num_steps} steps")


def _drawing_of(request: DrawRequest, started: DrawingStarted) -> Drawing:
    """Return the drawing that the worker must get."""
    source = None if request.source is None else _pixels_of(request.source)
    strength = 0.8 if request.strength is None else request.strength
    guidance = FAKE_INFO.default_guidance if request.guidance is None else request.guidance
    return Drawing(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=started.width,
        height=started.height,
        steps=request.steps or FAKE_INFO.default_steps,
        guidance_scale=guidance,
        seed=started.seed,
        num_images=request.num_images,
        scheduler=request.scheduler,
        source=source,
        strength=1.0 if source is None else strength,
    )


@contextmanager
def slow_files(sleep: Callable[[float], None], seconds: float) -> Iterator[None]:
    """Let each image take ``seconds`` to become a file, during the block."""

    def slowly(*given: Any) -> bytes:
        sleep(seconds)
        return encode(*given)

    original, module = image_generation_stream.encode, cast("Any", image_generation_stream)
    module.encode = slowly
    try:
        yield
    finally:
        module.encode = original


def _pixels_of(file: bytes) -> bytes:
    return Image.open(BytesIO(file)).convert("RGB").tobytes()
