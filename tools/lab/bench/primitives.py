"""Measures the costs that decisions rest on: making a value, waking a task, a hop into a thread,
framing a message.

Each row is the time of one in µs: a value of seven fields as a frozen dataclass and as a named
tuple (D8); a task that another one wakes by `trio.MemorySendChannel.send_nowait` (D1); a job in a
thread and back, by `trio.to_thread.run_sync` and by `engine.replica.threads`, which signals its end
by an eventfd or by Trio's token (D3); a message of 60 bytes as a DATA frame by h2 and by
`grpc_service.rpc.http2` (D1).
"""

from __future__ import annotations

import math
import os
import time
from contextlib import closing, contextmanager
from dataclasses import make_dataclass
from typing import TYPE_CHECKING

import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

from engine.core.text.plan import RowResult
from engine.replica.threads import WorkerThreads
from grpc_service.rpc.accounts import Account
from grpc_service.rpc.http2 import Http2Connection
from grpc_service.rpc.limits import Limits
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grpc_service.rpc.streams import Stream

MEASURES = ("engine/replica/threads.py", "grpc_service/rpc")

VALUES, WAKES, HOPS, FRAMES = 20_000, 2_000, 1_000, 2_000
MESSAGE = bytes(60)
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/B"),
    (":authority", "here"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


Frozen = make_dataclass("Frozen", RowResult._fields, frozen=True, slots=True)


def values(kind: Callable[..., object]) -> float:
    """Return the time of making a value."""
    start = time.perf_counter()
    for _ in range(VALUES):
        kind(1, 2, 3, 4, 5, 6, 7)
    return 1e6 * (time.perf_counter() - start) / VALUES


def wakes() -> float:
    """Return the time of waking a task by a memory channel."""

    async def main() -> float:
        sender, receiver = trio.open_memory_channel[int](math.inf)

        async def take() -> None:
            async for _ in receiver:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            start = time.perf_counter()
            for number in range(WAKES):
                sender.send_nowait(number)
                await trio.lowlevel.checkpoint()
            seconds = time.perf_counter() - start
            sender.close()
        return 1e6 * seconds / WAKES

    return trio.run(main)


def hops_of_trio() -> float:
    """Return the time of a hop by `trio.to_thread.run_sync`."""

    async def main() -> float:
        start = time.perf_counter()
        for _ in range(HOPS):
            await trio.to_thread.run_sync(_nothing)
        return 1e6 * (time.perf_counter() - start) / HOPS

    return trio.run(main)


def hops() -> float:
    """Return the time of a hop by `engine.replica.threads`."""

    async def main() -> float:
        with closing(WorkerThreads()) as threads:
            start = time.perf_counter()
            for _ in range(HOPS):
                await threads.start(_nothing, reports_begin=False).wait()
            return 1e6 * (time.perf_counter() - start) / HOPS

    return trio.run(main)


def hops_by_token() -> float:
    """Return the time of a hop by `engine.replica.threads` without an eventfd."""
    with _without_eventfd():
        return hops()


@contextmanager
def _without_eventfd() -> Iterator[None]:
    """Hide `os.eventfd`, as on a system that has none."""
    own = os.eventfd
    del os.eventfd
    try:
        yield
    finally:
        os.eventfd = own  # type: ignore[misc]


def _nothing() -> None:
    pass


def _client() -> H2Connection:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.increment_flow_control_window(1 << 24)
    client.send_headers(1, HEADERS)
    client.increment_flow_control_window(1 << 24, 1)
    return client


def frames_of_h2() -> float:
    """Return the time of framing a message by h2."""
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    events = server.receive_data(_client().data_to_send())
    assert any(isinstance(event, RequestReceived) for event in events)
    server.send_headers(1, [(":status", "200")])
    start = time.perf_counter()
    for _ in range(FRAMES):
        server.send_data(1, MESSAGE)
        server.data_to_send()
    return 1e6 * (time.perf_counter() - start) / FRAMES


class Deaf:
    """A `grpc_service.rpc.streams.StreamListener` that ignores everything."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_reset(self, *, is_lost: bool = False) -> None: ...

    def on_sent(self) -> None: ...


def frames() -> float:
    """Return the time of framing a message by `grpc_service.rpc.http2`."""
    begun: list[Stream] = []

    def begin(stream: Stream) -> Deaf:
        begun.append(stream)
        return Deaf()

    limits = Limits(streams_per_connection=1)
    server = Http2Connection(begin, limits, Account(limits, time.monotonic))
    server.receive(_client().data_to_send())
    [stream] = begun
    stream.send_headers([(":status", "200")])
    server.output.take()
    start = time.perf_counter()
    for _ in range(FRAMES):
        assert stream.try_send_message(MESSAGE)
        server.output.take()
    return 1e6 * (time.perf_counter() - start) / FRAMES


def run() -> list[Row]:
    """Return the bench's rows."""
    measures: dict[str, Callable[[], float]] = {
        "a frozen dataclass of seven fields": lambda: values(Frozen),
        "a named tuple of seven fields": lambda: values(RowResult),
        "a task woken by a memory channel": wakes,
        "a hop by trio.to_thread.run_sync": hops_of_trio,
        "a hop by engine.replica.threads, its end told by Trio's token": hops_by_token,
        "a hop by engine.replica.threads, its end told by an eventfd": hops,
        "a DATA frame by h2": frames_of_h2,
        "a DATA frame by grpc_service.rpc.http2": frames,
    }
    samples = repeat_in_turn(list(measures.values()))
    return [row_of(name, found, "µs") for name, found in zip(measures, samples, strict=True)]
