"""Clients of a server, in a process of their own: `python -m tools.lab.peers.clients KIND ADDRESS
VOCAB`, in the environment that has the server's protocol.

A line of JSON on standard input asks for a load; the answer has the clients' measurements. In a
closed loop, each client sends the next request as soon as its last is answered, for a number of
requests or of seconds. In an open loop, requests are sent at random instants (Poisson), however
many are running. The clients are spread over the connections, of which there is one by default.
Every prompt is new to the server. Prompts are ids, and the output is counted in ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from tools.lab.peers.asked import prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# With these options, channels of one process do not share a connection, nor use a proxy.
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


class TrioletProtocol:
    """The protocol `triolet.v1`."""

    method = "/triolet.v1.Inference/Generate"

    def __init__(self) -> None:
        from grpc_service.client import messages

        self._proto: Any = messages

    def request(self, name: str, ids: list[int], max_tokens: int) -> bytes:
        """Return the bytes of a request."""
        request = self._proto.GenerateRequest(
            token_ids={"ids": ids},
            sampling={"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True},
            output={"token_ids": True},
        )
        return bytes(request.SerializeToString())

    def count(self, message: bytes) -> int:
        """Count the tokens in a message."""
        return len(self._proto.GenerateResponse.FromString(message).delta.token_ids)


class VllmProtocol:
    """The protocol `vllm.grpc.engine`, which sends ids and no text."""

    method = "/vllm.grpc.engine.VllmEngine/Generate"

    def __init__(self) -> None:
        from smg_grpc_proto import vllm_engine_pb2

        self._proto: Any = vllm_engine_pb2

    def request(self, name: str, ids: list[int], max_tokens: int) -> bytes:
        """Return the bytes of a request."""
        request = self._proto.GenerateRequest(
            request_id=name,
            tokenized={"input_ids": ids},
            sampling_params={"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True},
            stream=True,
        )
        return bytes(request.SerializeToString())

    def count(self, message: bytes) -> int:
        """Count the tokens in a message."""
        return len(self._proto.GenerateResponse.FromString(message).chunk.token_ids)


PROTOCOLS = {"triolet": TrioletProtocol, "vllm": VllmProtocol}


@dataclass
class Seen:
    """The measurements of the clients of one load, in seconds."""

    tokens: int = 0
    requests: int = 0
    first: list[float] = field(default_factory=list)  # from the call until the first token
    gaps: list[float] = field(default_factory=list)  # between a request's tokens
    whole: list[float] = field(default_factory=list)  # from the call until its end


class Load:
    """Sends requests to a server."""

    def __init__(self, protocol: Any, address: str, vocab: int) -> None:
        self._protocol = protocol
        self._address, self._vocab = address, vocab
        self._names = itertools.count()

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Send a load and return its measurements. Cancellation: at once."""
        async with AsyncExitStack() as stack:
            self._calls = itertools.cycle(await self._connect(stack, asked))
            seen = Seen()
            start = time.perf_counter()
            if "rate" in asked:
                await self._open_loop(asked, seen)
            else:
                await self._closed_loop(asked, seen)
            seconds = time.perf_counter() - start
        return {"seconds": seconds, **vars(seen)}

    async def _connect(self, stack: AsyncExitStack, asked: dict[str, Any]) -> list[Any]:
        """Return what `_counts` calls, on connections that ``stack`` closes."""
        calls = []
        for _ in range(asked.get("connections", 1)):
            channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            calls.append(channel.unary_stream(self._protocol.method))
        return calls

    async def _counts(self, call: Any, request: bytes) -> AsyncIterator[tuple[int, bool]]:
        """Yield the number of tokens of each message, and whether they have just come."""
        async for message in call(request):
            yield self._protocol.count(message), True

    async def _closed_loop(self, asked: dict[str, Any], seen: Seen) -> None:
        end = time.perf_counter() + asked.get("seconds", float("inf"))

        async def client() -> None:
            call = next(self._calls)
            for _ in range(asked.get("requests", sys.maxsize)):
                if time.perf_counter() >= end:
                    break
                await self._ask(call, asked, seen)

        await asyncio.gather(*(client() for _ in range(asked["clients"])))

    async def _open_loop(self, asked: dict[str, Any], seen: Seen) -> None:
        draw = random.Random(asked["seed"])
        async with asyncio.TaskGroup() as group:
            for _ in range(asked["requests"]):
                group.create_task(self._ask(next(self._calls), asked, seen))
                await asyncio.sleep(draw.expovariate(asked["rate"]))

    async def _ask(self, call: Any, asked: dict[str, Any], seen: Seen) -> None:
        name = f"{os.getpid()}-{next(self._names)}"
        ids = prompts(name, 1, asked["prompt"], self._vocab)[0]
        request = self._protocol.request(name, ids, asked["output"])
        began = last = time.perf_counter()
        tokens = 0
        async for count, is_new in self._counts(call, request):
            if not count:
                continue
            now = time.perf_counter()
            if not is_new:
                pass
            elif tokens:
                seen.gaps += [(now - last) / count] * count
            else:
                seen.first.append(now - last)
            tokens += count
            last = now
        if tokens != asked["output"]:
            raise RuntimeError(f"a request for {asked['output']} tokens got {tokens}")
        seen.tokens += tokens
        seen.requests += 1
        seen.whole.append(time.perf_counter() - began)


def main() -> None:
    """Run the clients' process."""
    load = Load(PROTOCOLS[sys.argv[1]](), sys.argv[2], int(sys.argv[3]))
    run(load)


def run(load: Load) -> None:
    """Answer a line of input with each load's measurements, until the input ends."""
    with asyncio.Runner() as runner:
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(runner.run(load.run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
