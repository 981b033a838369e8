"""Measures what OpenAI's API costs the server: its CPU time per streamed token, against a bare ASGI
handler on the same HTTP server that writes the same bytes, and the time that it adds to the first
token.

The frame is that of the bench `front`: processes that write an event to every stream once per tick,
and the CPU time of the server's whole process, engine included, per event read. The bare handler
sends one event that our server sent before. The same server also answers as many gRPC streams; the
ratio to these has no bar. Each HTTP stream has a connection of its own, and so a system call for
each token, while gRPC's streams share one.

Without ticks, the engine steps as fast as it can, and several tokens go out in one event.

The first token is that of a runner that computes nothing: from sending a request until its first
token is read, over a kept connection and over a new one, less the time that the engine takes in a
process of its own, from the call to the first token. gRPC's time includes its Python client's.

`BENCH_ONLY` is a regular expression that selects cases by name, such as "16 streams" or "first".
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import grpc
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.lab.bench import front
from tools.lab.bench.frame import Row, repeat, repeat_in_turn, row_of
from tools.lab.bench.front import SIZE_TOLERANCE, TICK_S, WINDOW_S, name_of
from tools.lab.bench.wire import ENDLESS, NO_PROXY, PacedRunner, Peer, peer
from tools.lab.bench.wire_http import TEXT, StreamClient, post

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/openai",
    "grpc_service/rpc",
    "grpc_service/services",
)

STREAMS = (1, 16, 128)
BAR = 1.5
ADDED_BAR_MS = 2.0
COUNT = int(os.environ.get("BENCH_COUNT", "200"))  # first tokens of a run
IDLE_S = 0.002  # between two requests, so that the loop sleeps
RUNNER = {"num_blocks": 4096, "max_model_len": 1024}
TOKENS = 4
PLAIN = {"prompt": "a", "stream": True, "ignore_eos": True}


def asked(max_tokens: int) -> str:
    """Return the body of a request."""
    return json.dumps({**PLAIN, "max_tokens": max_tokens})


FIRST, MARK = post(TEXT, asked(TOKENS).encode()), b'"text":" word'


# ---- CPU time --------------------------------------------------------------------------------


def one_event(address: str) -> str:
    """Return the event of a token, as the server at ``address`` sends it."""
    host, port = address.split(":")
    seen = b""
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(post(TEXT, asked(ENDLESS).encode()))
        while seen.count(b"\n\n") < 3:
            seen += sock.recv(2**16)
    found = re.findall(rb"data: [^\n]+\n\n", seen)[1]
    return str(found.decode())


def measure(server: Peer, streams: int, sizes: list[float]) -> float:
    """Return the server's CPU time per event over one window, in µs. Append the events' mean size
    to ``sizes``."""
    body = asked(ENDLESS)
    with peer("http-readers", address=server.http_address, streams=streams, body=body) as readers:
        time.sleep(0.2)
        events, size = readers.ask()
        cpu = server.cpu_s()
        time.sleep(WINDOW_S)
        cpu = server.cpu_s() - cpu
        later_events, later_size = readers.ask()
    count = later_events - events
    sizes.append((later_size - size) / count)
    return 1e6 * cpu / count


def compare(streams: int) -> list[Row]:
    """Return the rows for a number of streams."""
    tick, name = TICK_S[streams], name_of(streams)
    sizes: list[list[float]] = [[], []]
    with peer("triolet", openai=True, **front.settings(streams, tick)) as ours:
        chunk = one_event(ours.http_address)
        with peer("bare", step_s=tick, chunk=chunk) as bare:
            mine, theirs, grpcs = repeat_in_turn(
                [
                    partial(measure, ours, streams, sizes[0]),
                    partial(measure, bare, streams, sizes[1]),
                    partial(front.measure, ours, streams, []),
                ]
            )
    growth = max(sizes[0]) / max(sizes[1])
    note = "" if growth < SIZE_TOLERANCE else f"events held {growth:.2f} × the bytes"
    return [
        row_of(f"CPU per token, {name}", mine, "µs"),
        row_of(f"bare ASGI handler, {name}", theirs, "µs"),
        row_of(f"against bare, {name}", ratios(mine, theirs), "×", bar=BAR, note=note),
        row_of(f"gRPC, {name}", grpcs, "µs"),
        row_of(f"against gRPC, {name}", ratios(mine, grpcs), "×"),
        unpaced(streams),
    ]


def ratios(ones: list[float], others: list[float]) -> list[float]:
    """Return the ratios of the same turns."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def unpaced(streams: int) -> Row:
    """Return the row without ticks for a number of streams."""
    per_event: list[float] = []
    with peer("triolet", openai=True, **front.settings(streams, 0.0)) as ours:
        asking = {"address": ours.http_address, "streams": streams, "body": asked(ENDLESS)}
        times = repeat(
            partial(front.measure_unpaced, ours, per_event, kind="http-readers", **asking)
        )
    note = f"{statistics.median(per_event):.1f} tokens an event"
    return row_of(f"CPU per token without ticks, {name_of(streams)}", times, "µs", note=note)


# ---- the first token -------------------------------------------------------------------------


def over_http(client: StreamClient) -> float:
    """Return the time to the first token over a kept connection, in seconds."""
    began = time.perf_counter()
    return client.ask(FIRST, MARK) - began


def over_new(address: str) -> float:
    """Return the time to the first token over a new connection, in seconds."""
    began = time.perf_counter()
    client = StreamClient(address)
    first = client.ask(FIRST, MARK) - began
    client.close()
    return first


def in_ms(first: Callable[[], float]) -> float:
    """Return the median of `COUNT` times to a first token, in ms."""

    def one() -> float:
        time.sleep(IDLE_S)
        return first()

    return 1e3 * statistics.median([one() for _ in range(COUNT)])


async def in_process() -> float:
    """Return the median time to the first token in this process, in ms."""
    runner = PacedRunner(**RUNNER)
    config = EngineConfig(models=(ModelConfig("fake"),))
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = GenerateRequest(text="a", sampling=sampling)
    times = []
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:
        await engine.wait_ready()
        for _ in range(COUNT):
            await engine.wait_idle()
            await trio.sleep(IDLE_S)
            began, first = time.perf_counter(), 0.0
            async with engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Tokens) and not first:
                        first = time.perf_counter() - began
            times.append(first)
    return 1e3 * statistics.median(times)


def over_grpc(stub: stubs.InferenceStub) -> float:
    """Return the time to the first token over gRPC, in seconds."""
    request = pb.GenerateRequest(text="a", sampling={"max_tokens": TOKENS, "ignore_eos": True})
    began, first = time.perf_counter(), 0.0
    for message in stub.Generate(request):
        if message.WhichOneof("event") == "delta" and not first:
            first = time.perf_counter() - began
    return first


def first_tokens() -> list[Row]:
    """Return the rows of first tokens."""
    with (
        peer("triolet", openai=True, runner=RUNNER) as server,
        grpc.insecure_channel(server.address, options=NO_PROXY) as channel,
    ):
        client = StreamClient(server.http_address)
        kept, new, inside, grpcs = repeat_in_turn(
            [
                lambda: in_ms(partial(over_http, client)),
                lambda: in_ms(partial(over_new, server.http_address)),
                lambda: trio.run(in_process),
                lambda: in_ms(partial(over_grpc, stubs.InferenceStub(channel))),
            ]
        )
    rows = [
        row_of("first token p50, in process", inside, "ms"),
        row_of("first token p50, gRPC", grpcs, "ms"),
    ]
    for what, times in (("kept", kept), ("new", new)):
        name = f"first token p50, a {what} connection"
        added = [outside - own for outside, own in zip(times, inside, strict=True)]
        rows.append(row_of(name, times, "ms"))
        rows.append(row_of(f"{name}, added", added, "ms", bar=ADDED_BAR_MS))
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows = [row for count in STREAMS if wanted.search(name_of(count)) for row in compare(count)]
    return [*rows, *(first_tokens() if wanted.search("first tokens") else [])]
