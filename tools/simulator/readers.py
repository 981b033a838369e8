"""How a simulated client reads, in process or over the wire, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.core import journal
from engine.core.events import Finished, Tokens
from engine.errors import TrioletError
from engine.requests import Started
from tools.simulator.watch import Violation

if TYPE_CHECKING:
    from engine.generation import Generation
    from engine.requests import StreamEvent
    from grpc_service.bridge import BridgeCall
    from tools.simulator.clients import Client
    from tools.simulator.wire import Wire


@dataclass
class Reader:
    """What one client has seen. ``error``: what its handler heard, over the wire."""

    client: Client
    prompt_tokens: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    has_left: bool = False
    error: TrioletError | None = None

    @property
    def num_seen(self) -> int:
        """Events so far."""
        tokens = sum(map(len, self.tokens.values()))
        return (self.prompt_tokens is not None) + tokens + len(self.finished)

    def see(self, event: StreamEvent) -> None:
        """Note an event, which must be one that can come now."""
        name = self.client.request.request_id
        if isinstance(event, Started):
            if self.prompt_tokens is not None or self.tokens:
                raise Violation(f"{name}: started twice")
            self.prompt_tokens = event.prompt_tokens
            asked = self.client.request.output.prompt_logprobs
            if len(event.prompt_logprobs) != (0 if asked is None else event.prompt_tokens):
                raise Violation(f"{name}: {len(event.prompt_logprobs)} tokens of the prompt scored")
            return
        if self.prompt_tokens is None or event.choice in self.finished:
            raise Violation(f"{name}: {journal.line(event)} out of place")
        if isinstance(event, Finished):
            self.finished[event.choice] = event
        else:
            if self.client.request.output.logprobs is not None:
                scored = [entry.token_id for entry in event.logprobs]
                if scored != list(event.token_ids):
                    raise Violation(f"{name}: {scored} scored of {event.token_ids}")
            self.tokens.setdefault(event.choice, []).extend(event.token_ids)
            self.text[event.choice] = self.text.get(event.choice, "") + event.text

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


async def read(generation: Generation, reader: Reader) -> None:
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


async def serve(wire: Wire, call: BridgeCall, reader: Reader) -> None:
    """A handler of the front's, on asyncio's loop: its writes take as long as its client lets
    them, and it is cancelled when the client goes."""
    client = reader.client
    try:
        while not reader.leaves_now and (events := await call.receive()):
            for event in events:
                if reader.leaves_now:
                    break
                if reader.stalls_now and call.generation is not None:
                    await wire.wait(call.generation.wait_closed)
                    await wire.wait(partial(trio.sleep, client.linger_s))
                reader.see(event)
                if client.delay_s:
                    await wire.wait(partial(trio.sleep, client.delay_s))
            call.written(sum(isinstance(event, Tokens) for event in events))
        reader.has_left = reader.leaves_now
    except TrioletError as error:
        reader.error = error
        if client.linger_s:  # the status waits for it
            await wire.wait(partial(trio.sleep, client.linger_s))
    except BaseException:
        reader.has_left = True
        raise
    finally:
        call.leave()
