"""Clients of drawn worlds whose inputs come as a stream: EmbedStream.

Such a client is one of Embed whose request was drawn as ever. Its inputs come in parts, with waits,
some wrong inputs among them; its reader, its faults and its ends are those that the world has drawn
for every client. `tests.simulator.embed_streams` has worlds of one stream each, which judge how far
its source is read.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from engine.errors import InvalidRequest, StepFailed
from engine.requests.encode import feed
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    EmbedStreamRequest,
    IndexedInput,
    InputFault,
)
from engine.requests.text.values import Started
from tests.simulator.clients import Client
from tests.simulator.encode_oracle import expected_results, tokens_of
from tests.simulator.readers import Reader
from tests.simulator.watch import Violation

SHARE = 0.4  # of worlds with encoders
SMALL = {"WINDOW_INPUTS": 48, "WINDOW_BYTES": 16_000, "CHUNK_INPUTS": 9, "CHUNK_BYTES": 4000}
STEP_FAULTS = frozenset({"row_failures", "step_failures", "out_of_memory"})
# Inputs that are refused by themselves.
WRONG: tuple[Any, ...] = (None, (), "\ud800", (1, 1000), (-1,))


@contextmanager
def small_windows() -> Iterator[None]:
    """Let streams have small windows and chunks while the block runs, so that they meet their
    ends."""
    before = {name: getattr(feed, name) for name in SMALL}
    vars(feed).update(SMALL)
    try:
        yield
    finally:
        vars(feed).update(before)


class Source:
    """The source of a client's inputs: those of ``whole``, an Embed request, and wrong ones.

    ``places`` has for each index that the client gives an input its place in ``whole``, None for a
    wrong one. ``waits_s`` come before each of its parts and before its end, or before the error of
    a message that ``breaks``. ``may_fail``: steps of the world may fail.
    """

    def __init__(
        self,
        rng: random.Random,
        whole: EmbedRequest,
        step_s: float,
        *,
        breaks: bool,
        may_fail: bool,
    ) -> None:
        self.whole, self.breaks, self.may_fail = whole, breaks, may_fail
        self.places: dict[int, int | None] = {}
        self._parts: list[list[IndexedInput]] = [[]]
        wrong_share = rng.choice([0.0, 0.0, 0.2])
        wrong = WRONG if whole.prompt_name else (*WRONG, "")  # with a prompt, "" has tokens
        left = list(enumerate(whole.inputs))
        while left:
            is_wrong = rng.random() < wrong_share
            place, given = (None, rng.choice(wrong)) if is_wrong else left.pop(0)
            index = 3 * len(self.places) + 7
            self.places[index] = place
            self._parts[-1].append(IndexedInput(index, given))
            while rng.random() < 0.3:  # some parts have no inputs
                self._parts.append([])
        slowest_s = step_s * rng.choice([0.0, 0.5, 5.0])
        self._waits_s = [rng.uniform(0, slowest_s) for _ in range(len(self._parts) + 1)]
        self._num_read = 0

    async def __call__(self) -> Sequence[IndexedInput] | None:
        """Return the next part, None behind the last one. Cancellation: safe.

        Raises:
            InvalidRequest: the client's next message is none.
        """
        number = self._num_read
        self._num_read += 1
        if self._waits_s[number]:
            await trio.sleep(self._waits_s[number])
        if number < len(self._parts):
            return self._parts[number]
        if self.breaks:
            raise InvalidRequest.of("", "the message is broken")
        return None


def feed_inputs(
    seed: int, clients: Iterable[Client], active: frozenset[str], step_s: float
) -> tuple[Client, ...]:
    """Return the clients, some of which send the inputs of their Embed as a stream, if the world of
    this seed has such."""
    rng = random.Random(f"feeds {seed}")  # a generator of its own: other worlds stay the same
    if rng.random() >= SHARE:
        return tuple(clients)
    return tuple(_feed(rng, client, active, step_s) for client in clients)


def _feed(rng: random.Random, client: Client, active: frozenset[str], step_s: float) -> Client:
    whole = client.request
    is_right = isinstance(whole, EmbedRequest) and not (client.must_fail or client.may_end)
    if not is_right or rng.random() < 0.4:
        return client
    assert isinstance(whole, EmbedRequest)
    breaks = "bad_requests" in active and rng.random() < 0.1
    source = Source(rng, whole, step_s, breaks=breaks, may_fail=bool(active & STEP_FAULTS))
    request = EmbedStreamRequest(replace(whole, inputs=(), check=False), source)
    if breaks:
        client = replace(client, may_end=frozenset({InvalidRequest.reason}), must_fail=True)
    return replace(client, request=request)


@dataclass
class FeedReader(Reader):
    """The reader of an EmbedStream, which compares each vector with the oracle's."""

    results: dict[int, Embedding | InputFault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = self.client.request.source
        assert isinstance(source, Source)
        self._source = source
        self._wanted: list[tuple[int, list[float]]] = []

    @property
    def num_seen(self) -> int:
        return (self.prompt_tokens is not None) + len(self.results)

    @property
    def num_results(self) -> int:
        return sum(isinstance(one, Embedding) for one in self.results.values())

    def see(self, event: Any) -> None:
        name = self.client.request.request_id
        if isinstance(event, Started):
            if self.prompt_tokens is not None:
                raise Violation(f"{name}: started twice")
            whole = self._source.whole
            self._wanted = list(zip(tokens_of(whole), expected_results(whole), strict=True))
            self.prompt_tokens = event.prompt_tokens
            return
        if event.index not in self._source.places or event.index in self.results:
            raise Violation(f"{name}: a second result for input {event.index}, or of none")
        self.results[event.index] = event
        place = self._source.places[event.index]
        if isinstance(event, InputFault):
            allowed = InvalidRequest.reason
            if place is not None:
                allowed = StepFailed.reason if self._source.may_fail else ""
            if event.reason != allowed:
                raise Violation(f"{name}: {event}")
            return
        if self.prompt_tokens is None or place is None:
            raise Violation(f"{name}: {event} out of place")
        if (event.tokens, [*(event.indices or ()), *event.values]) != self._wanted[place]:
            raise Violation(f"{name}: a wrong vector of input {event.index}")

    def check_whole(self) -> None:
        if missing := self._source.places.keys() - self.results.keys():
            raise Violation(f"{self.client.request.request_id}: no results for {missing}")
