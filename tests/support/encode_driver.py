"""Drive an `EncodeScheduler` with a `FakeEncoder` (`tests.support.step_driver`).

The oracle is `vector_of`: what an input's values must be, from its own tokens alone.
"""

from typing import NamedTuple

from engine.config import EncoderConfig
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.encode.types import EncodeInput, EncodeRequest, ImageInput
from engine.images.fit import FittedImage
from engine.worker.fakes.encode import SEPARATOR, FakeEncoder, ids_of, score_of, vector_of
from tests.simulator.encode_watch import EncodeWatch
from tests.support.step_driver import OneChoiceDriver


class Picture(NamedTuple):
    """An input that is an image of so many tokens."""

    num_tokens: int


class Apart(NamedTuple):
    """An input of so many tokens with a query beside it."""

    num_tokens: int
    query: EncodeInput


class EncodeDriver(OneChoiceDriver):
    """Drives an `EncodeScheduler` with a fake encoder."""

    fault = "encode_fault"

    def __init__(self, *, runner=None, **config):
        scheduler = EncodeScheduler(EncoderConfig(**{"max_model_len": 64, **config}))
        runner = runner or FakeEncoder(max_model_len=64)
        super().__init__(scheduler, runner, EncodeWatch(scheduler))
        self._next_token = 1

    def request(self, lengths, **fields):
        """Return a request whose inputs have these numbers of tokens; a `Picture` stands for an
        image, and an `Apart` for a text with a query. No two inputs are equal."""
        return EncodeRequest(inputs=tuple(map(self._input, lengths)), **fields)

    def _input(self, length):
        if isinstance(length, Picture):
            pixels = bytes(number % 256 for number in (*self._tokens(1), self._next_token >> 8))
            return ImageInput(FittedImage(1, 1, pixels), length.num_tokens)
        if isinstance(length, Apart):
            return EncodeInput(tuple(self._tokens(length.num_tokens)), query=length.query)
        return EncodeInput(tuple(self._tokens(length)))

    def _tokens(self, length):
        self._next_token += 1
        return [self._next_token, *range(length - 1)]

    # ---- outputs

    def check_result(self, event, request, got):
        """Check that a vector is the one of its own input."""
        assert event.index not in [one.index for one in got], f"{event} came twice"
        own = request.inputs[event.index]
        query = getattr(own, "query", None)
        want = vector_of(ids_of(own))
        if query is not None:
            want = [score_of((*query.token_ids, SEPARATOR, *own.token_ids))]
        assert list(event.result.values) == want, f"{event}: another's values"
        assert event.tokens == own.num_tokens

    def num_messages(self, request):
        """Return the number of inputs."""
        return len(request.inputs)

    def num_live(self):
        """Return how many inputs are not done, of requests that have not ended."""
        return sum(
            len(request.inputs) - len(self.got[name])
            for name, request in self.requests.items()
            if name not in self.finished and name not in self.refused
        )

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        super().check_counts()
        stats = self.scheduler.statistics()
        in_flight = 0 if self.in_flight is None else len(self.in_flight.rows)
        assert stats.running + stats.ending == in_flight
