"""Drive an `EncodeScheduler` with a `FakeEncoder` (`tests.support.step_driver`).

The oracle is `vector_of`: what an input's values must be, from its own tokens alone.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.config import EncoderConfig
from engine.core.common.phases import Phase
from engine.core.common.types import RequestId
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.encode.types import EncodeInput, EncodeRequest, ImageInput
from engine.images.fit import FittedImage
from engine.worker.fakes.encoder import FakeEncoder, ids_of, vector_of
from tests.simulator.encode_watch import EncodeWatch
from tests.support.step_driver import StepDriver


class Picture(NamedTuple):
    """An input that is an image of so many tokens."""

    num_tokens: int


class EncodeDriver(StepDriver):
    """Drives an `EncodeScheduler` with a fake encoder."""

    fault = "encode_fault"

    def __init__(self, *, runner=None, **config):
        scheduler = EncodeScheduler(EncoderConfig(**{"max_model_len": 64, **config}))
        runner = runner or FakeEncoder(max_model_len=64)
        super().__init__(scheduler, runner, EncodeWatch(scheduler))
        self.got = {}
        self._next_token = 1

    def submit(self, name, lengths, *, buffer=1000, arrival=None, **fields):
        """Submit a request whose inputs have these numbers of tokens; a `Picture` stands for an
        image. No two inputs are equal."""
        inputs = tuple(map(self._input, lengths))
        arrival = self.now if arrival is None else arrival
        self.got.setdefault(name, {})
        self.add(EncodeRequest(RequestId(name), inputs, arrival, **fields), buffer)

    def _input(self, length):
        if isinstance(length, Picture):
            pixels = bytes(number % 256 for number in (*self._tokens(1), self._next_token >> 8))
            return ImageInput(FittedImage(1, 1, pixels), length.num_tokens)
        return EncodeInput(tuple(self._tokens(length)))

    def _tokens(self, length):
        self._next_token += 1
        return [self._next_token, *range(length - 1)]

    # ---- outputs

    def take_result(self, event):
        """Check that values are those of their own input."""
        name = event.request_id
        assert event.index not in self.got[name], f"{event} came twice"
        one = self.requests[name].inputs[event.index]
        assert list(event.values) == vector_of(ids_of(one)), f"{name}: another's values"
        assert event.tokens == one.num_tokens
        self.got[name][event.index] = event
        self.unread[name] += 1

    def check_end(self, event):
        """Check that an end is a success if everything has come."""
        name = event.request_id
        whole = len(self.got[name]) == len(self.requests[name].inputs)
        assert whole == event.reason.is_success

    def check_explained(self, name, said):
        """Check the state by the phase."""
        phase = self.phase_of(name)
        assert (said.state == "WAITING") == (phase is Phase.QUEUED) == bool(said.position)
        assert (said.state == "PARKED") == (phase is Phase.PARKED)

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        super().check_counts()
        stats = self.scheduler.statistics()
        in_flight = 0 if self.in_flight is None else len(self.in_flight.rows)
        assert stats.running + stats.ending == in_flight
        left = sum(
            len(request.inputs) - len(self.got[name])
            for name, request in self.requests.items()
            if name not in self.finished and name not in self.refused
        )
        assert stats.running + stats.waiting + stats.parked == left
