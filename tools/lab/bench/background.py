"""Measures what background work takes from chats beside it, and how much of the idle time it uses.

Chats come and go: each of a few clients has an answer generated, and thinks for a while. They are
measured alone, which also tells the server's idle share, and beside a background batch that is many
times larger; the batch is measured alone, too. All parts run in turn, several times.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import asynccontextmanager
from statistics import quantiles
from typing import TYPE_CHECKING

import grpc

from grpc_service.client import messages as pb
from grpc_service.client.stubs import ControlStub, InferenceStub
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, row_of
from tools.lab.bench.served import served
from tools.lab.bench.wire import NO_PROXY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

MEASURES = ("engine/core", "engine/replica", "engine/requests", "engine/worker", "engine/kernels")

MODEL = "s135"
CHATTERS, THINK_S = 3, 2.0
CHAT = {"num_prompt": 64, "max_tokens": 32}
IN_FLIGHT = 32  # requests of the batch
ROUNDS, WINDOW_S, SETTLE_S = 5, 20.0, 2.0
WORK = {"num_prompt": 64, "max_tokens": 96}
BAR_CHATS, BAR_BATCH = 1.15, 0.9


class Clients:
    """The clients of one server, what their chats waited for, and the batch's tokens so far."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference, self._control = InferenceStub(channel), ControlStub(channel)
        self._numbers = itertools.count(1)
        self.firsts: list[float] = []
        self.gaps: list[float] = []
        self.tokens = 0

    async def _ask(self, *, num_prompt: int, max_tokens: int, background: bool) -> None:
        ids = [1 + next(self._numbers) % 30_000, *range(100, 99 + num_prompt)]
        request = pb.GenerateRequest(
            token_ids={"ids": ids},
            sampling={"max_tokens": max_tokens, "ignore_eos": True},
            output={"token_ids": True},
            background=background,
        )
        at = started = time.perf_counter()
        async for event in self._inference.Generate(request):
            if not event.HasField("delta"):
                continue
            before, at = at, time.perf_counter()
            if background:
                self.tokens += len(event.delta.token_ids)
            else:
                (self.firsts if before is started else self.gaps).append(at - before)

    @asynccontextmanager
    async def working(self, *, chats: bool, batch: bool) -> AsyncIterator[None]:
        """Let chats come and go, and the batch go on, while the block runs."""

        async def chat(wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            while True:
                await self._ask(**CHAT, background=False)
                await asyncio.sleep(THINK_S)

        async def compute() -> None:
            while True:
                await self._ask(**WORK, background=True)

        tasks = [
            asyncio.create_task(chat(THINK_S * one / CHATTERS)) for one in range(CHATTERS * chats)
        ]
        tasks += [asyncio.create_task(compute()) for _ in range(IN_FLIGHT * batch)]
        await asyncio.sleep(SETTLE_S)
        self.firsts, self.gaps, self.tokens = [], [], 0
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.5)

    async def busy_s(self) -> float:
        """Return the seconds that the server's steps have taken for requests that have ended."""
        used = await self._control.GetUsage(pb.GetUsageRequest())
        return sum(one.usage.step.ToNanoseconds() for one in used.sums) / 1e9


def _p99(found: Sequence[float]) -> float:
    return quantiles(found, n=100, method="inclusive")[-1]


async def _measure(address: str) -> list[Row]:
    ratios: dict[str, list[float]] = {"first": [], "gap": [], "batch": [], "idle": [], "alone": []}
    async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
        clients = Clients(channel)
        for part in range(ROUNDS + 1):  # the first one warms up
            before = await clients.busy_s()
            began = time.perf_counter()
            async with clients.working(chats=True, batch=False):
                await asyncio.sleep(WINDOW_S)
                first, gap = _p99(clients.firsts), _p99(clients.gaps)
            idle = 1 - (await clients.busy_s() - before) / (time.perf_counter() - began)
            async with clients.working(chats=False, batch=True):
                await asyncio.sleep(WINDOW_S / 2)
                alone = clients.tokens / (WINDOW_S / 2)
            async with clients.working(chats=True, batch=True):
                await asyncio.sleep(WINDOW_S)
                if part:
                    ratios["first"].append(_p99(clients.firsts) / first)
                    ratios["gap"].append(_p99(clients.gaps) / gap)
                    ratios["batch"].append(clients.tokens / WINDOW_S / (alone * idle))
                    ratios["idle"].append(100 * idle)
                    ratios["alone"].append(alone)
    beside = "beside a background batch"
    return [
        row_of(f"chats {beside}, first token p99", ratios["first"], "× alone", bar=BAR_CHATS),
        row_of(f"chats {beside}, between tokens p99", ratios["gap"], "× alone", bar=BAR_CHATS),
        row_of(
            "the batch beside chats",
            ratios["batch"],
            "× alone in the idle share",
            bar=BAR_BATCH,
            better="higher",
        ),
        row_of("the idle share under chats alone", ratios["idle"], "%", better="higher"),
        row_of("the batch alone", ratios["alone"], "tokens/s", better="higher"),
    ]


def run() -> list[Row]:
    """Return the bench's rows."""
    with served([(str(checkpoint(MODEL)), MODEL)]) as address:
        return asyncio.run(_measure(address))
