"""Drive an `ImageScheduler` with a `FakeImageRunner` (`tests.support.step_driver`).

The oracle is `image_of`: what an image must be, from its own drawing alone.
"""

from __future__ import annotations

from math import floor

from engine.config import ImageConfig
from engine.core.common.phases import Phase
from engine.core.common.types import RequestId
from engine.core.image.scheduler import ImageScheduler
from engine.core.image.types import Drawing, Drawn, ImageRequest
from engine.worker.fakes.drawing import FakeImageRunner, image_of, preview_of
from tests.simulator.image_watch import ImageWatch
from tests.support.step_driver import StepDriver

SIZES = (8, 16, 72, 120)


class ImageDriver(StepDriver):
    """Drives an `ImageScheduler` with a fake image model."""

    fault = "image_fault"

    def __init__(self, *, runner=None, **config):
        scheduler = ImageScheduler(ImageConfig(**config))
        super().__init__(scheduler, runner or FakeImageRunner(), ImageWatch(scheduler))
        self.got = {}

    def submit(self, name, *, buffer=1000, arrival=None, width=16, height=8, n=1, **fields):
        """Submit a drawing; ``fields`` are of the drawing, or else of the request."""
        own = {"prompt": name, "steps": 3, "seed": len(self.requests), "guidance_scale": 1.0}
        given = {key: fields.pop(key) for key in list(fields) if key in Drawing.__slots__}
        drawing = Drawing(
            negative_prompt="", width=width, height=height, num_images=n, **(own | given)
        )
        info = self.runner.info
        request = ImageRequest(
            RequestId(name),
            drawing,
            self.now if arrival is None else arrival,
            num_steps=info.num_steps(drawing),
            num_tiles=info.num_tiles(drawing),
            **fields,
        )
        self.got.setdefault(name, [])
        self.add(request, buffer)

    # ---- outputs

    def take_result(self, event):
        """Check a step, or an image."""
        name = event.request_id
        got, request = self.got[name], self.requests[name]
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
        got.append(event)
        self.unread[name] += 1

    def check_end(self, event):
        """Check that an end is a success if everything has come."""
        request = self.requests[event.request_id]
        num_messages = request.num_steps + request.drawing.num_images
        assert (len(self.got[event.request_id]) == num_messages) == event.reason.is_success

    def check_explained(self, name, said):
        """Check the state by the phase, and the place by a plain sort."""
        phase = self.phase_of(name)
        assert (said.state == "WAITING") == (phase is Phase.QUEUED) == bool(said.position)
        assert (said.state == "PARKED") == (phase is Phase.PARKED)
        assert not said.position or said.position == self._place_of(name)

    def _place_of(self, name):
        """Return the place of a waiting request, 1 for the first."""
        waiting = [one for one in self.requests if self.phase_of(one) is Phase.QUEUED]
        return sorted(waiting, key=self._key).index(name) + 1

    def _key(self, name):
        request = self.requests[name]
        level = request.priority - floor(max(0.0, self.now - request.arrival) / 10.0)
        return (level, request.arrival, list(self.requests).index(name))

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        super().check_counts()
        stats = self.scheduler.statistics()
        live = [n for n in self.requests if n not in self.finished and n not in self.refused]
        assert stats.running + stats.waiting + stats.parked == len(live)

    def check_idle(self):
        """Check also that the worker forgets every drawing with the next plan."""
        super().check_idle()
        self.submit("last", steps=1)
        assert self.begin_step() is not None
        self.end_step()
        assert len(self.runner.drawings) == 1

    def check_ends(self):
        """Check that each request was refused, or has ended, but for that of `check_idle`."""
        self.requests.pop("last", None)
        super().check_ends()
