"""Drive an `ImageScheduler` with a `FakeImageRunner`, synchronously, and check what comes out.

The oracle is `image_of`: what an image must be, from its own drawing alone. Turns are judged by a
count of the steps that the others got, from outside.
"""

from __future__ import annotations

from math import floor

from engine.config import ImageConfig
from engine.core.common.credit import Credit
from engine.core.common.events import (
    Admitted,
    Finished,
    Refused,
    Submit,
)
from engine.core.common.types import RequestId
from engine.core.image.scheduler import ImageScheduler
from engine.core.image.types import Drawing, Drawn, ImageRequest, Stepped
from engine.worker.fakes.drawing import FakeImageRunner, image_of, preview_of
from tests.simulator.image_watch import ImageWatch
from tests.support.step_driver import StepDriver

SIZES = (8, 16, 72, 120)


class ImageDriver(StepDriver):
    """Drives an `ImageScheduler` with a fake image model, beside a watcher."""

    def __init__(self, *, runner=None, **config):
        self.config = ImageConfig(**config)
        super().__init__(ImageScheduler(self.config), runner or FakeImageRunner())
        self.watch = ImageWatch(self.scheduler)
        self.got = {}
        self.plans = []

    # ---- inputs

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
        credit = Credit(buffer)
        if name not in self.requests:
            self.requests[name], self.credits[name] = request, credit
            self.got[name], self.unread[name] = [], 0
        self.apply(Submit(request, credit))

    def apply(self, event):
        """Apply any event at the present time, and judge what it caused."""
        events = self.scheduler.apply(event, self.now)
        assert not (wrong := self.watch.applied(event, events, self.now)), wrong
        self._take(events)

    def tick(self, seconds):
        """Advance the clock, apply Tick, and check that nothing is due any more."""
        super().tick(seconds)
        due = self.scheduler.next_wakeup(self.now)
        assert due is None or due > self.now, "a Tick leaves something to do"

    # ---- steps

    def begin_step(self):
        """Plan a step, judge the plan, and return it; None if there is nothing to compute."""
        plan, events = self.scheduler.plan(self.now)
        assert events == []
        assert not (wrong := self.watch.planned(plan, self.now)), wrong
        self.in_flight = plan
        if plan is not None:
            self.plans.append(plan)
        return plan

    # ---- outputs

    def _take(self, events):
        for event in events:
            name = event.request_id
            assert name not in self.finished, f"{event} after the end"
            assert name not in self.refused or isinstance(event, Refused)
            match event:
                case Stepped() | Drawn():
                    self._check_result(event)
                    self.got[name].append(event)
                    self.unread[name] += 1
                case Finished():
                    self.finished[name] = event
                    request = self.requests[name]
                    whole = len(self.got[name]) == request.num_steps + request.drawing.num_images
                    assert whole == event.reason.is_success
                case Refused():
                    self.refused[name] = event
                case Admitted():
                    assert event.prompt_tokens == self.requests[name].prompt_tokens

    def _check_result(self, event):
        request = self.requests[event.request_id]
        if isinstance(event, Drawn):
            index = sum(isinstance(one, Drawn) for one in self.got[event.request_id])
            expected = image_of(request.drawing, request.num_steps, index)
            assert (event.index, event.image) == (index, expected), "another's image"
            return
        step = len(self.got[event.request_id]) + 1
        every = request.preview_every
        is_shown = bool(every) and step % every == 0
        preview = preview_of(request.drawing, step) if is_shown else None
        assert (event.step, event.steps, event.preview) == (step, request.num_steps, preview)

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        stats = self.scheduler.statistics()
        live = [n for n in self.requests if n not in self.finished and n not in self.refused]
        assert stats.running + stats.waiting + stats.parked == len(live)
        assert stats.waiting <= stats.peak_waiting
        assert stats.step_count == len(self.plans)
        for name, credit in self.credits.items():
            assert credit.filled == self.unread[name]

    def check_idle(self):
        """Check that every request is gone, every slot given back, and that the worker forgets
        every drawing with the next plan."""
        self.scheduler.check()
        self.check_counts()
        stats = self.scheduler.statistics()
        assert (stats.running, stats.waiting, stats.parked, stats.ending) == (0, 0, 0, 0)
        assert stats.queued_tokens == 0
        assert self.scheduler.is_idle
        self.submit("last", steps=1)
        assert self.begin_step() is not None
        self.end_step()
        assert len(self.runner.drawings) == 1

    def place_of(self, name):
        """Return how many waiting requests start before this one, by a plain sort."""
        waiting = [n for n in self.requests if self._is_waiting(n)]
        return sorted(waiting, key=self._key).index(name)

    def _is_waiting(self, name):
        phase = self.scheduler.phase_of(RequestId(name))
        return phase is not None and phase.name == "queued"

    def _key(self, name):
        request = self.requests[name]
        level = request.priority - floor(max(0.0, self.now - request.arrival) / 10.0)
        return (level, request.arrival, list(self.requests).index(name))
