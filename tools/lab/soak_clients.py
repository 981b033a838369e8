"""A process of clients for `tools.lab.soak`: everything that a client can do to a server, at
random.

`python -m tools.lab.soak_clients JSON` makes requests until its input ends, or a number of them,
and prints a line of JSON: how many of each kind, and everything that was wrong. JSON: the fields of
`Clients`.

Rule 1: the seed decides what each client does; when it does so depends on the machine. Rule 2: an
output that is complete is compared with the fake model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.wire import NO_PROXY, SMALL_WINDOW, generate_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPTS = 40  # so few that prefixes are shared and expected outputs can be cached
CANCEL_WITHIN_S = 0.05
LONG = 400
STALLED_TOKENS = 300  # more than a small flow-control window and a small stream buffer hold
KINDS = {
    "whole": 30,
    "cancel": 30,
    "choices": 10,
    "deadline": 10,
    "abort": 8,
    "bad": 8,
    "stall": 3,
    "vanish": 1,
}
CODES = {
    "deadline": {grpc.StatusCode.DEADLINE_EXCEEDED},
    "abort": {grpc.StatusCode.ABORTED},
    "bad": {grpc.StatusCode.INVALID_ARGUMENT},
}


@cache
def expected(prompt: tuple[int, ...], count: int, choice: int = 0) -> list[int]:
    """Return the fake model's answer to a prompt."""
    tokens: list[int] = expected_tokens(prompt, count=count, choice=choice)
    return tokens


@dataclass
class Clients:
    """Runs ``tasks`` clients at once, which draw from ``kinds`` (weights by name). They share a
    connection, except kinds that need their own. They stop after ``count`` requests."""

    address: str
    seed: int
    tasks: int = 16
    count: int | None = None
    kinds: dict[str, int] = field(default_factory=lambda: dict(KINDS))
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, stopped: asyncio.Event) -> None:
        """Make requests until ``stopped`` is set or the count is reached."""
        async with self._connect() as channel:
            await asyncio.gather(
                *[self._repeat(channel, number, stopped) for number in range(self.tasks)]
            )

    @contextlib.asynccontextmanager
    async def _connect(self, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
        own = ("grpc.use_local_subchannel_pool", 1)
        async with grpc.aio.insecure_channel(
            self.address, options=[*NO_PROXY, own, *options]
        ) as channel:
            yield channel

    async def _repeat(self, channel: grpc.aio.Channel, number: int, stopped: asyncio.Event) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        serial = 0
        while not stopped.is_set() and (self.count is None or self.done.total() < self.count):
            [kind] = draw.choices(list(self.kinds), list(self.kinds.values()))
            self.done[kind] += 1
            serial += 1
            try:
                await getattr(self, f"_{kind}")(channel, draw, f"{self.seed}-{number}-{serial}")
            except grpc.aio.AioRpcError as error:
                if error.code() not in CODES.get(kind, ()):
                    self.wrong.append(f"{kind} {serial} of {number}: {error.code()}")
            except AssertionError as error:
                self.wrong.append(f"{kind} {serial} of {number}: {error}")

    def _prompt(self, draw: random.Random) -> tuple[int, ...]:
        number = draw.randrange(PROMPTS)
        return tuple(1 + (number * 7 + index) % 890 for index in range(1 + number * 5))

    def _call(self, channel: grpc.aio.Channel, *, timeout: float = 120, **fields: Any) -> Any:
        fields.setdefault("output", {"token_ids": True})
        stub = stubs.InferenceStub(channel)
        return stub.Generate(generate_request(**fields), timeout=timeout)

    async def _whole(
        self, channel: grpc.aio.Channel, draw: random.Random, name: str, n: int = 1
    ) -> None:
        prompt, count = self._prompt(draw), draw.choice((1, 10, 40))
        await self._check(
            self._call(channel, prompt_ids=prompt, max_tokens=count, n=n), prompt, count, n
        )

    async def _check(self, call: Any, prompt: tuple[int, ...], count: int, n: int = 1) -> None:
        """Read a call to its end and compare its tokens with the model's."""
        heard: dict[int, list[int]] = {choice: [] for choice in range(n)}
        while message := await call.read():
            if message.HasField("delta"):
                heard[message.delta.choice] += message.delta.token_ids
        for choice, ids in heard.items():
            assert ids == expected(prompt, count, choice), (
                f"other tokens for {prompt[:3]}, {choice}"
            )

    async def _choices(self, channel: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        await self._whole(channel, draw, name, n=draw.choice((2, 3, 5)))

    async def _cancel(self, channel: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        """Read, and cancel at a random instant, perhaps before the server has received the
        request."""
        call = self._call(
            channel, prompt_ids=self._prompt(draw), max_tokens=LONG, n=draw.choice((1, 1, 3))
        )

        async def read() -> None:
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                async for _message in call:
                    pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(draw.random() * CANCEL_WITHIN_S)
        call.cancel()
        await reader

    async def _deadline(self, channel: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        timeout = draw.choice((0.001, 0.02, 0.1))
        call = self._call(
            channel, prompt_ids=self._prompt(draw), max_tokens=LONG * 2, timeout=timeout
        )
        async for _message in call:
            pass

    async def _abort(self, channel: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        call = self._call(
            channel, prompt_ids=self._prompt(draw), max_tokens=LONG * 2, request_id=name
        )
        await asyncio.sleep(draw.random() * CANCEL_WITHIN_S)
        control = stubs.ControlStub(channel)
        await control.Abort(pb.AbortRequest(request_ids=[name]))
        async for _message in call:
            pass

    async def _bad(self, channel: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        bad = draw.choice(
            (
                {"prompt_ids": [], "max_tokens": 1},
                {"prompt_ids": [10_000], "max_tokens": 1},
                {"temperature": -1.0},
                {"prompt_ids": [1] * 5000, "max_tokens": 5},
            )
        )
        async for _message in self._call(channel, **bad):
            pass
        raise AssertionError(f"{list(bad)} was accepted")

    async def _stall(self, _: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        """Stop reading; then read to the end, cancel, or close the connection."""
        prompt, what = self._prompt(draw), draw.choice(("read", "cancel", "close"))
        async with self._connect(*SMALL_WINDOW) as own:
            call = self._call(own, prompt_ids=prompt, max_tokens=STALLED_TOKENS)
            await call.read()
            await asyncio.sleep(0.2 + draw.random())
            if what == "read":
                await self._check(call, prompt, STALLED_TOKENS)
            elif what == "cancel":
                call.cancel()

    async def _vanish(self, _: grpc.aio.Channel, draw: random.Random, name: str) -> None:
        """Close the connection while its calls run."""
        async with self._connect() as own:
            calls = [
                self._call(own, prompt_ids=self._prompt(draw), max_tokens=LONG) for _ in range(3)
            ]
            for call in calls:
                await call.read()
            await own.close(grace=None)


async def _main() -> None:
    clients = Clients(**json.loads(sys.argv[1]))
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await clients.run(stopped)
    print(json.dumps({"done": clients.done, "wrong": clients.wrong[:20]}), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
