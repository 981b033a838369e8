"""Measures what a model that draws costs the text streams beside it, on one server.

Text streams run alone and then beside two clients that draw without a pause. The text model is the
shipped story model; the pipeline is one of random weights, whose steps are of an image of 256 × 256
pixels. The figure is the time between two tokens of one stream.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from grpc_service.client import messages as pb
from tests.checkpoints.image_generation import make
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
STREAMS = 4
DRAWERS = 2
BAR = 2.2
DRAW = "/triolet.v1.Inference/GenerateImage"
TEXT = pb.GenerateRequest(
    text="Once upon a time", sampling={"max_tokens": 256, "ignore_eos": True}
).SerializeToString()
DRAWING = pb.GenerateImageRequest(
    prompt="a red circle", model="artist", steps=20, width=256, height=256
).SerializeToString()


async def _gaps(channel: Any, until: float) -> list[float]:
    """Read streams one after another until ``until``, and return the seconds between tokens."""
    found: list[float] = []
    while time.perf_counter() < until:
        last = 0.0
        async for _ in channel.unary_stream(GENERATE)(TEXT):
            now = time.perf_counter()
            if last:
                found.append(now - last)
            last = now
    return found


async def _draw(channel: Any, until: float) -> float:
    """Draw one image after another, and return how many seconds each took on average."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() < until or not count:
        async for _ in channel.unary_stream(DRAW)(DRAWING):
            pass
        count += 1
    return (time.perf_counter() - start) / count


async def _turn(channel: Any, num_streams: int, num_drawers: int) -> tuple[float, float]:
    """Return the p99 between tokens and the time of a drawing, in seconds: 0 if none was made."""
    until = time.perf_counter() + WINDOW_S
    drawing = [asyncio.create_task(_draw(channel, until)) for _ in range(num_drawers)]
    gaps = await asyncio.gather(*(_gaps(channel, until) for _ in range(num_streams)))
    seconds = await asyncio.gather(*drawing)
    between = [gap for each in gaps for gap in each]
    p99 = percentile(between, 0.99) if between else 0.0
    return p99, max(seconds, default=0.0)


def run() -> list[Row]:
    """Return the bench's rows."""
    alone: list[float] = []
    beside: list[float] = []
    drawing: list[float] = []
    drawing_beside: list[float] = []

    async def measure(address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
            for turn in range(REPEATS + 1):
                found = [
                    await _turn(channel, STREAMS, 0),
                    await _turn(channel, 0, DRAWERS),
                    await _turn(channel, STREAMS, DRAWERS),
                ]
                if turn:  # the first turn only warms up
                    alone.append(found[0][0])
                    drawing.append(found[1][1])
                    beside.append(found[2][0])
                    drawing_beside.append(found[2][1])

    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory) / "artist", "sd", size=32)
        models = [("demo-stories", "stories"), (str(Path(directory) / "artist"), "artist")]
        with served(models) as address:
            asyncio.run(measure(address))
    ratios = [b / a for b, a in zip(beside, alone, strict=True)]
    slower = [b / a for b, a in zip(drawing_beside, drawing, strict=True)]
    return [
        row_of("between tokens alone, p99", [1e3 * one for one in alone], "ms"),
        row_of("between tokens beside drawings, p99", [1e3 * one for one in beside], "ms"),
        row_of("between tokens against alone", ratios, "×", bar=BAR),
        row_of("a drawing against alone", slower, "×"),
    ]
