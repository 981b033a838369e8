"""Drive an `ImageGenerationScheduler` with its fake runner (`tests.support.step_driver`).

The oracle is `image_of`: what an image must be, from its own drawing alone.
"""

from math import floor

from engine.config import ImageGenerationConfig
from engine.core.common.phases import Phase
from engine.core.image_generation.scheduler import ImageGenerationScheduler
from engine.core.image_generation.types import Drawing, Drawn, ImageGenerationRequest
from engine.worker.fakes.image_generation import FakeImageGenerationRunner, image_of, preview_of
from tests.simulator.image_generation_watch import ImageGenerationWatch
from tests.support.step_driver import OneChoiceDriver

SIZES = (8, 16, 72, 120)


class ImageGenerationDriver(OneChoiceDriver):
    """Drives an `ImageGenerationScheduler` with a fake image model."""

    fault = "image_fault"

    def __init__(self, *, runner=None, **config):
        scheduler = ImageGenerationScheduler(ImageGenerationConfig(**config))
        super().__init__(
            scheduler, runner or FakeImageGenerationRunner(), ImageGenerationWatch(scheduler)
        )

    def request(self, *, request_id, width=16, height=8, n=1, **fields):
        """Return a drawing; ``fields`` are of the drawing, or else of the request."""
        own = {"prompt": request_id, "steps": 3, "seed": len(self.requests), "guidance_scale": 1.0}
        given = {key: fields.pop(key) for key in list(fields) if key in Drawing.__slots__}
        drawing = Drawing(
            negative_prompt="", width=width, height=height, num_images=n, **(own | given)
        )
        steps, tiles = self.runner.info.num_steps(drawing), self.runner.info.num_tiles(drawing)
        return ImageGenerationRequest(
            request_id, drawing, num_steps=steps, num_tiles=tiles, **fields
        )

    # ---- outputs

    def check_result(self, event, request, got):
        """Check a progress event's step, or an image."""
        if isinstance(event, Drawn):
            index = sum(isinstance(one, Drawn) for one in got)
            expected = image_of(request.drawing, request.num_steps, index)
            assert (event.index, event.image) == (index, expected), "another's image"
        else:
            step, every = len(got) + 1, request.preview_every
            is_shown = bool(every) and step % every == 0
            preview = preview_of(request.drawing, step) if is_shown else None
            assert (event.step, event.steps) == (step, request.num_steps)
            assert event.preview == preview

    def num_messages(self, request):
        """Return the number of denoising steps and images."""
        return request.num_steps + request.drawing.num_images

    def check_explained(self, name, said):
        """Check also the explained place in the queue, by a plain sort."""
        super().check_explained(name, said)
        assert not said.position or said.position == self._place_of(name)

    def _place_of(self, name):
        """Return the place of a waiting request, 1 for the first."""
        waiting = [one for one in self.requests if self.phase_of(one) is Phase.QUEUED]
        return sorted(waiting, key=self._key).index(name) + 1

    def _key(self, name):
        request = self.requests[name]
        level = request.priority - floor(max(0.0, self.now - request.arrival) / 10.0)
        return (level, request.arrival, list(self.requests).index(name))

    def check_idle(self):
        """Check also that the worker forgets every drawing with the next plan."""
        super().check_idle()
        self.submit("last", steps=1)
        assert self.begin_step() is not None
        self.end_step()
        assert len(self.runner.drawings) == 1

    def check_ends(self):
        """Check the end of each request, except of the one that `check_idle` adds."""
        self.requests.pop("last", None)
        super().check_ends()
