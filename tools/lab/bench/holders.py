"""Measures what one holder's chat keeps of a server on which another holder has 64 streams of long
prompts, or 64 or 400 of short ones, and whether holders' tokens follow their weights.

A chat is a short prompt and its answer, one after another. It is measured alone, beside the streams
as a request of the same holder, which is what a server without holders does, and as another's. For
the weights, two holders have as many streams of the same shape, and the tokens that they receive in
the same time are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from grpc_service.client import messages as pb
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, row_of
from tools.lab.bench.served import served
from tools.lab.bench.wire import GENERATE, NO_PROXY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MEASURES = ("engine/core", "engine/replica", "engine/requests", "engine/worker", "engine/kernels")

MODEL = "s135"
STREAMS, MANY = 64, 400  # of the one holder
EACH = 24  # streams of each of the two holders with weights
LONG = {"num_prompt": 512, "max_tokens": 96}
SHORT = {"num_prompt": 32, "max_tokens": 96}
CHAT = {"num_prompt": 64, "max_tokens": 48}
CHATS, CHATS_OF_SAME = 7, 3  # a chat beside streams of its own holder takes half a minute
SETTLE_S = 6.0
WINDOW_S = 30.0
WEIGHT, BAR_WEIGHTS = 3, 5.0  # of the heavy holder; percent
KEYS = {"many": "", "chat": "", "heavy": f"weight={WEIGHT}", "light": ""}
BAR_TOKENS, BAR_FIRST = 0.4, 2.0


class Clients:
    """The clients of one server, and the tokens that each holder's have received."""

    def __init__(self, channel: Any) -> None:
        self._call = channel.unary_stream(
            GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self._numbers = itertools.count(1)
        self.tokens = dict.fromkeys(KEYS, 0)

    async def ask(self, holder: str, *, num_prompt: int, max_tokens: int) -> tuple[float, float]:
        """Have one answer generated, and return the seconds to its first token and the tokens a
        second from then on. No prompt is the beginning of another."""
        number = next(self._numbers)
        ids = [1 + number % 30_000, *range(100, 99 + num_prompt)]
        if holder in ("heavy", "light"):  # else a holder's streams would all end at once
            max_tokens += number % 7 * max_tokens // 7
        request = pb.GenerateRequest(
            token_ids={"ids": ids},
            sampling={"max_tokens": max_tokens, "ignore_eos": True},
            output={"token_ids": True},
        )
        started, first, count = time.perf_counter(), 0.0, 0
        metadata = (("authorization", f"Bearer {key_of(holder)}"),)
        async for event in self._call(request, metadata=metadata):
            if event.HasField("delta"):
                first = first or time.perf_counter()
                count += len(event.delta.token_ids)
                self.tokens[holder] += len(event.delta.token_ids)
        return first - started, (count - 1) / (time.perf_counter() - first)

    async def chat(self, holder: str, count: int = CHATS) -> tuple[list[float], list[float]]:
        """Return the seconds to the first token of some chats, and their tokens a second."""
        found = [await self.ask(holder, **CHAT) for _ in range(count)]
        return [first for first, _ in found], [rate for _, rate in found]

    @asynccontextmanager
    async def streaming(self, *loads: tuple[str, int, dict[str, int]]) -> AsyncIterator[None]:
        """Have holders' streams follow each other while the block runs, each holder so many at
        once."""

        async def repeat(holder: str, shape: dict[str, int]) -> None:
            while True:
                await self.ask(holder, **shape)

        tasks = [
            asyncio.create_task(repeat(holder, shape))
            for holder, count, shape in loads
            for _ in range(count)
        ]
        await asyncio.sleep(SETTLE_S)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.5)


def key_of(holder: str) -> str:
    """Return a holder's key."""
    return f"the-key-of-the-holder-{holder}"


async def _measure(address: str) -> list[Row]:
    async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
        clients = Clients(channel)
        await clients.chat("chat")  # warms up
        first, rate = await clients.chat("chat")
        rows = [
            row_of("a chat alone, first token", [1e3 * one for one in first], "ms"),
            row_of("a chat alone", rate, "tokens/s", better="higher"),
        ]
        for name, load, streams in (
            ("long prompts", LONG, STREAMS),
            ("short prompts", SHORT, STREAMS),
            ("short prompts", SHORT, MANY),
        ):
            owners = [("another's", "chat", CHATS)]
            if streams == STREAMS:
                owners.insert(0, ("the same holder's", "many", CHATS_OF_SAME))
            async with clients.streaming(("many", streams, load)):
                for owner, holder, count in owners:
                    own_first, own_rate = await clients.chat(holder, count)
                    told = f"{owner} chat beside {streams} streams of {name}"
                    is_fair = holder == "chat"
                    ratios = [one / statistics.median(rate) for one in own_rate]
                    waits = [one / statistics.median(first) for one in own_first]
                    rows += [
                        row_of(
                            f"{told}, tokens/s",
                            ratios,
                            "× alone",
                            bar=BAR_TOKENS if is_fair else None,
                            better="higher",
                        ),
                        row_of(
                            f"{told}, first token",
                            waits,
                            "× alone",
                            bar=BAR_FIRST if is_fair else None,
                        ),
                    ]
                before, began = clients.tokens["many"], time.perf_counter()
                await asyncio.sleep(WINDOW_S / 3)
                rates = [(clients.tokens["many"] - before) / (time.perf_counter() - began)]
                rows.append(
                    row_of(f"{streams} streams of {name} alone", rates, "tokens/s", better="higher")
                )
        async with clients.streaming(("heavy", EACH, SHORT), ("light", EACH, SHORT)):
            before = dict(clients.tokens)
            await asyncio.sleep(WINDOW_S)
            heavy, light = (clients.tokens[name] - before[name] for name in ("heavy", "light"))
        ratio = heavy / light
        off = [100 * abs(ratio / WEIGHT - 1)]
        rows += [
            row_of(f"weights {WEIGHT}:1, the tokens' ratio", [ratio], "×", better="higher"),
            row_of(f"weights {WEIGHT}:1, off by", off, "%", bar=BAR_WEIGHTS),
        ]
        return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(
            "".join(f"{name} {key_of(name)} role=user {own}\n" for name, own in KEYS.items())
        )
        with served([(str(checkpoint(MODEL)), MODEL)], "--api-key-file", str(keys)) as address:
            return asyncio.run(_measure(address))
