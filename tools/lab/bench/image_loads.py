"""What the bench `images` sends: photographs, and clients that send requests without a pause.

Rule: the sizes of images and the numbers of clients are constants here and in
`tools.lab.bench.images`. A client sends its next request when it has the answer to the last. So
images arrive at the rate that the server reaches, which the bench prints.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc

from tools.lab.bench.frame import REPEATS
from tools.lab.bench.wire import NO_PROXY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SMALL, LARGE = (640, 480), (4000, 3000)
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "3"))
WARM_UP_S = 0.5


def photographs(count: int, size: tuple[int, int]) -> list[bytes]:
    """Return JPEGs of noise that is as smooth as a photograph."""
    import numpy as np
    from PIL import Image

    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), np.uint8))
        file = io.BytesIO()
        small.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        made.append(file.getvalue())
    return made


def mixed(count: int) -> list[bytes]:
    """Return ``count`` photographs of each size, in turn."""
    pairs = zip(photographs(count, SMALL), photographs(count, LARGE), strict=True)
    return [one for pair in pairs for one in pair]


def never_the_same(images: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the images over and over, each time with another comment in the JPEG file, so that no
    server finds one in its cache."""
    number = 0
    while True:
        comment = number.to_bytes(8, "big")
        data = images[number % len(images)]
        yield data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + data[2:]
        number += 1


@dataclass
class Load:
    """Clients that share ``requests``; each sends the next one when it has the answer to its last,
    after a random pause of up to ``pause_s``. In seconds, ``times`` are the durations of requests,
    ``gaps`` those between two messages of one answer, and ``ends`` the moments of their ends."""

    method: str
    requests: Iterable[bytes]
    clients: int
    pause_s: float = 0.0
    times: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The answered requests in a second."""
        return len(self.times) / (WINDOW_S - WARM_UP_S)

    @property
    def longest_pause(self) -> float:
        """The longest time without the end of a request. If all requests of a step end together, it
        is the time of the longest step."""
        return max(after - before for before, after in pairwise(self.ends))

    async def run(self, channel: Any) -> None:
        """Send requests for `WINDOW_S`. Requests that begin in the first `WARM_UP_S` do not count;
        if no other has ended by then, go on until one has."""
        start, call = time.perf_counter(), channel.unary_stream(self.method)
        requests, draw = iter(self.requests), random.Random(0)

        async def client() -> None:
            while (begin := time.perf_counter()) - start < WINDOW_S or not self.times:
                last = 0.0
                async for _ in call(next(requests)):
                    now = time.perf_counter()
                    if last > start + WARM_UP_S:
                        self.gaps.append(now - last)
                    last = now
                if begin > start + WARM_UP_S:
                    self.ends.append(time.perf_counter())
                    self.times.append(self.ends[-1] - begin)
                if self.pause_s:
                    await asyncio.sleep(draw.uniform(0, self.pause_s))

        await asyncio.gather(*(client() for _ in range(self.clients)))


async def windows(
    address: str, makers: Sequence[Sequence[Callable[[], Load]]]
) -> list[list[list[Load]]]:
    """Run sets of loads in turn, all loads of a set at the same time: once to warm up, and then
    `REPEATS` times. Return, for each set, the loads of each of these times (windows)."""
    found: list[list[list[Load]]] = [[] for _ in makers]
    async with grpc.aio.insecure_channel(address, options=NO_PROXY) as channel:
        for turn in range(REPEATS + 1):
            for seen, made in zip(found, makers, strict=True):
                loads = [make() for make in made]
                await asyncio.gather(*(load.run(channel) for load in loads))
                if turn:
                    seen.append(loads)
    return found
