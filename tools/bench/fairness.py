"""Whether generating and embedding starve each other: both saturated by clients that ask again as
soon as they are answered, each alone and then together, on one server.

The text model is the shipped story model, the encoder has MiniLM-L6's shape. What is measured is
the time of a whole request: 32 tokens, or 16 texts of 6 to 16 tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import Any

import grpc

from grpc_service._generated.triolet.v1 import inference_pb2
from tools.bench.embed import EMBED, texts
from tools.bench.frame import REPEATS, Row, percentile, row_of
from tools.bench.served import served
from tools.bench.wire import GENERATE, NO_PROXY
from tools.make_encoder import PRESETS, make_embedder

WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "4"))
WARM_UP_S = 0.5
CLIENTS = 8
BAR = 2.2


def _requests() -> dict[str, bytes]:
    generate = inference_pb2.GenerateRequest(
        text="Once upon a time", sampling={"max_tokens": 32, "ignore_eos": True}
    )
    embed = inference_pb2.EmbedRequest(inputs=[{"text": text} for text in texts()[:16]])
    return {GENERATE: generate.SerializeToString(), EMBED: embed.SerializeToString()}


async def _load(channel: Any, methods: list[str]) -> dict[str, float]:
    """The p50 of each method's requests while all of them are asked for, in seconds."""
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
    alone: dict[str, list[float]] = {GENERATE: [], EMBED: []}
    beside: dict[str, list[float]] = {GENERATE: [], EMBED: []}

    async def measure(address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
            for turn in range(REPEATS + 1):
                for methods in ([GENERATE], [EMBED], [GENERATE, EMBED]):
                    found = await _load(channel, methods)
                    if turn:  # the first is to warm up
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
