"""How a simulated client reads, in process or over the wire, and what it saw."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from engine.core import journal
from engine.core.events import Finished
from engine.encode_requests import EmbedRequest, Score
from engine.errors import TrioletError
from engine.requests import GenerateRequest, Started
from grpc_service.zombies import ZOMBIE_AGE_S
from tools.simulator.encode_oracle import expected_results, inputs_of
from tools.simulator.watch import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.encode_requests import EncodeEvent
    from engine.generation import Lifetime
    from engine.requests import StreamEvent
    from grpc_service.bridge import Bridge, BridgeCall
    from tools.simulator.clients import Client


@dataclass
class Reader:
    """What one client has seen. ``error``: what its handler heard, over the wire."""

    client: Client
    prompt_tokens: int | None = None
    has_left: bool = False
    error: TrioletError | None = None

    @property
    def num_seen(self) -> int:
        """Events so far, tokens one by one."""
        raise NotImplementedError

    def see(self, event: Any) -> None:
        """Note an event, which must be one that can come now."""
        raise NotImplementedError

    @property
    def leaves_now(self) -> bool:
        """It has seen all that it stays for."""
        limit = self.client.leave_after
        return limit is not None and self.num_seen >= limit

    @property
    def stalls_now(self) -> bool:
        """It reads no further before the request has ended; then what was left for it."""
        limit = self.client.stall_after
        return limit is not None and self.num_seen >= limit


@dataclass
class TextReader(Reader):
    """A Generate's, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)

    @property
    def num_seen(self) -> int:
        tokens = sum(map(len, self.tokens.values()))
        return (self.prompt_tokens is not None) + tokens + len(self.finished)

    def see(self, event: StreamEvent) -> None:
        request = self.client.request
        assert isinstance(request, GenerateRequest)
        name = request.request_id
        if isinstance(event, Started):
            if self.prompt_tokens is not None or self.tokens:
                raise Violation(f"{name}: started twice")
            self.prompt_tokens = event.prompt_tokens
            asked = request.output.prompt_logprobs
            if len(event.prompt_logprobs) != (0 if asked is None else event.prompt_tokens):
                raise Violation(f"{name}: {len(event.prompt_logprobs)} tokens of the prompt scored")
            return
        if self.prompt_tokens is None or event.choice in self.finished:
            raise Violation(f"{name}: {journal.line(event)} out of place")
        if isinstance(event, Finished):
            self.finished[event.choice] = event
        else:
            if request.output.logprobs is not None:
                scored = [entry.token_id for entry in event.logprobs]
                if scored != list(event.token_ids):
                    raise Violation(f"{name}: {scored} scored of {event.token_ids}")
            self.tokens.setdefault(event.choice, []).extend(event.token_ids)
            self.text[event.choice] = self.text.get(event.choice, "") + event.text


@dataclass
class EncodeReader(Reader):
    """An Embed's or a Rerank's. Each result is held against the oracle as it comes."""

    results: dict[int, list[float]] = field(default_factory=dict)
    finished: Finished | None = None

    def __post_init__(self) -> None:
        request = self.client.request
        assert not isinstance(request, GenerateRequest)
        self._request = request
        self._inputs: list[tuple[int, ...]] = []
        self._expected: list[list[float]] = []

    @property
    def num_seen(self) -> int:
        return (self.prompt_tokens is not None) + len(self.results) + (self.finished is not None)

    def see(self, event: EncodeEvent) -> None:
        name = self._request.request_id
        if isinstance(event, Started):
            if self.prompt_tokens is not None:
                raise Violation(f"{name}: started twice")
            self._inputs = inputs_of(self._request)
            self._expected = expected_results(self._request)
            self.prompt_tokens = event.prompt_tokens
            if event.prompt_tokens != sum(map(len, self._inputs)):
                raise Violation(f"{name}: started with {event.prompt_tokens} tokens")
            return
        if self.prompt_tokens is None or self.finished is not None:
            raise Violation(f"{name}: {event} out of place")
        if isinstance(event, Finished):
            self.finished = event
            return
        index = event.index
        if index in self.results:
            raise Violation(f"{name}: a second result for input {index}")
        self.results[index] = self._values_of(event)
        if not 0 <= index < len(self._expected) or self.results[index] != self._expected[index]:
            raise Violation(f"{name}: a wrong result for input {index}")

    def _values_of(self, event: EncodeEvent) -> list[float]:
        """The numbers of a result of the kind that was asked for."""
        name = self._request.request_id
        if isinstance(event, Score):
            if isinstance(self._request, EmbedRequest):
                raise Violation(f"{name}: a score for an Embed")
            return [event.score]
        assert not isinstance(event, Started | Finished)
        if not isinstance(self._request, EmbedRequest):
            raise Violation(f"{name}: a vector for a Rerank")
        if event.tokens != len(self._inputs[event.index]):
            raise Violation(f"{name}: {event.tokens} tokens of input {event.index}")
        return list(event.values)

    def check_whole(self) -> None:
        """Everything has come, each result once; of the best alone, best first."""
        name, top_n = self._request.request_id, getattr(self._request, "top_n", None)
        if self.finished is None or self.finished.usage.prompt_tokens != self.prompt_tokens:
            raise Violation(f"{name}: succeeded, and ended by {self.finished}")
        places = range(len(self._expected))
        if top_n is None:
            if set(self.results) != set(places):
                raise Violation(f"{name}: {len(self.results)} of {len(places)} results")
            return
        best = sorted(places, key=lambda index: (-self._expected[index][0], index))[:top_n]
        if list(self.results) != best:
            raise Violation(f"{name}: {list(self.results)} are not the best, {best}")


def reader_of(client: Client) -> TextReader | EncodeReader:
    """A reader of what a client asks for."""
    is_text = isinstance(client.request, GenerateRequest)
    return TextReader(client) if is_text else EncodeReader(client)


async def read(generation: Lifetime[Any], reader: Reader) -> None:
    """Read as a Trio program does, event by event, to the end or as long as the client stays."""
    while not reader.leaves_now:
        if reader.stalls_now:
            await generation.wait_closed()
        try:
            event = await generation.receive()
        except trio.EndOfChannel:
            return
        reader.see(event)
        if reader.client.delay_s:
            await trio.sleep(reader.client.delay_s)
    generation.close_reader()
    reader.has_left = True
    await generation.wait_closed()


class DrawnBug(Exception):
    """Of a straight write."""


async def serve(
    bridge: Bridge, call: BridgeCall, reader: Reader, is_window_closed: Callable[[], bool]
) -> None:
    """A handler of the front's: its writes take as long as its client lets them, and it is
    cancelled when the client goes. ``is_window_closed`` may raise `DrawnBug`."""
    client = reader.client
    busy_until = -math.inf

    def write(event: Any) -> bool:
        """A straight one. Its client neither leaves with it, nor is slow, nor has stalled."""
        nonlocal busy_until
        if client.leave_after is not None or reader.stalls_now or is_window_closed():
            return False
        if trio.current_time() < busy_until or not isinstance(event, call.credited):
            return False
        reader.see(event)
        busy_until = trio.current_time() + client.delay_s
        return True

    call.write_straight(write)
    try:
        while not reader.leaves_now and (events := await call.receive()):
            for event in events:
                if reader.leaves_now:
                    break
                if reader.stalls_now:
                    await call.generation.wait_closed()
                    await _linger(bridge, reader)
                reader.see(event)
                if client.delay_s:
                    await trio.sleep(client.delay_s)
            call.written(sum(isinstance(event, call.credited) for event in events))
        reader.has_left = reader.leaves_now
    except TrioletError as error:
        reader.error = error
        await _linger(bridge, reader)  # the status waits for it
    except DrawnBug:
        reader.has_left = True
    except BaseException:
        reader.has_left = True
        raise
    finally:
        call.leave()


async def _linger(bridge: Bridge, reader: Reader) -> None:
    """Its request has ended, and the client does not read."""
    await trio.sleep(reader.client.linger_s)
    if reader.client.linger_s > ZOMBIE_AGE_S and not bridge.statistics().totals.zombies:
        raise Violation(f"{reader.client.request.request_id} is no zombie")
