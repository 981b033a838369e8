"""Measures whether generating and embedding starve each other on one server.

Clients that send their next request as soon as they have an answer saturate each of the two, first
alone and then together. The text model is the shipped story model; the encoder has MiniLM-L6's
shape. The figure is the time of a whole request: 32 tokens, or 16 texts of 6 to 16 tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import Any

import grpc

from grpc_service.client import messages as pb
from tests.checkpoints.encode import PRESETS, make_embedder
from tools.lab.bench.embed import EMBED, texts
from tools.lab.bench.frame import REPEATS, Row, percentile, row_of
from tools.lab.bench.served import served
from tools.lab.bench.wire import GENERATE, NO_PROXY

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "engine/kernels",
    "grpc_service/rpc",
    "grpc_service/services",
)

WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "4"))
WARM_UP_S = 0.5
CLIENTS = 8
BAR = 2.2


def _requests() -> dict[str, bytes]:
    generate = pb.GenerateRequest(
        text="Once upon a time", sampling={"max_tokens": 32, "ignore_eos": True}
    )
    embed = pb.EmbedRequest(inputs=[{"text": text} for text in texts()[:16]])
    return {GENERATE: generate.SerializeToString(), EMBED: embed.SerializeToString()}


async def _load(channel: Any, methods: list[str]) -> dict[str, float]:
    """Call all of ``methods`` at once and return each one's median time in seconds."""
    requests, times = _requests(), {method: list[float]() for method in methods}
    start = time.perf_counter()

    async def ask(method: str) -> None:
        call = channel.unary_stream(method)
        while (now := time.perf_counter()) - start < WINDOW_S:
            async for _ in call(requests[method]):
                pass
            if now - start > WARM_UP_S:
                times[method].append(time.perf_counter() - now)

    await asyncio.gather(*(ask(method) for method in methods for _ in range(CLIENTS)))
    return {method: percentile(taken, 0.5) for method, taken in times.items()}


def run() -> list[Row]:
    """Return the bench's rows."""
    alone: dict[str, list[float]] = {GENERATE: [], EMBED: []}
    beside: dict[str, list[float]] = {GENERATE: [], EMBED: []}

    async def measure(address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
            for turn in range(REPEATS + 1):
                for methods in ([GENERATE], [EMBED], [GENERATE, EMBED]):
                    found = await _load(channel, methods)
                    if turn:  # the first turn only warms up
                        kept = alone if len(methods) == 1 else beside
                        for method, seconds in found.items():
                            kept[method].append(seconds)

    with tempfile.TemporaryDirectory() as directory:
        make_embedder(directory, PRESETS["minilm"], normalize=True)
        with served([("demo-stories", "stories"), (directory, "minilm")]) as address:
            asyncio.run(measure(address))
    rows = []
    for name, method in (("generate", GENERATE), ("embed", EMBED)):
        ratios = [b / a for b, a in zip(beside[method], alone[method], strict=True)]
        rows += [
            row_of(f"{name} alone, p50", [1e3 * one for one in alone[method]], "ms"),
            row_of(f"{name} beside the other, p50", [1e3 * one for one in beside[method]], "ms"),
            row_of(f"{name} against alone", ratios, "×", bar=BAR),
        ]
    return rows
