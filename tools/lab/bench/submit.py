"""Measures how soon a request starts on an idle worker, and the time of whole requests.

In process: from `Engine.submit` to `Runner.execute`. Over gRPC: from a client's call to
`Runner.execute` in the server's process, by the clock that both share. Whole requests: from the
call to its last message, for a number of clients in a closed loop and 16 tokens per request from a
runner that computes nothing.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from contextlib import ExitStack

import grpc
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text.values import GenerateRequest, SamplingParams
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.lab.bench.frame import Row, percentile, repeat, row_of
from tools.lab.bench.wire import NO_PROXY, PacedRunner, Peer, peer

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/rpc",
    "grpc_service/services",
)

COUNT = int(os.environ.get("BENCH_COUNT", "200"))
CLIENTS = (1, 5, 10, 20, 50)
TOKENS = 16
IDLE_S = 0.002  # between two requests, so that the loop sleeps
BAR_MS = 1.0
RUNNER = {"num_blocks": 4096, "max_model_len": 1024}


async def _starts_in_process() -> list[float]:
    runner = PacedRunner(**RUNNER)
    config = EngineConfig(models=(ModelConfig("fake"),))
    request = GenerateRequest(text="a", sampling=SamplingParams(max_tokens=1, ignore_eos=True))
    times = []
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:
        await engine.wait_ready()
        for _ in range(COUNT):
            await engine.wait_idle()
            await trio.sleep(IDLE_S)
            submitted = time.monotonic()
            generation = engine.submit(request, buffer=4)
            await generation.wait_closed()
            [(started, _, _)] = runner.take_stamps()
            times.append(1e3 * (started - submitted))
    return times


def _starts_over_grpc(server: Peer) -> list[float]:
    request = pb.GenerateRequest(text="a", sampling={"max_tokens": 1})
    server.ask()
    submitted = []
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        stub = stubs.InferenceStub(channel)
        for _ in range(COUNT):
            time.sleep(IDLE_S)
            submitted.append(time.monotonic())
            for _message in stub.Generate(request):
                pass
    started = [stamp[0] for stamp in server.ask()]
    return [1e3 * (late - early) for early, late in zip(submitted, started, strict=True)]


def _latencies(server: Peer, clients: int) -> list[float]:
    """Return whole requests' times in ms, for a number of clients with a connection each."""
    request = pb.GenerateRequest(text="a", sampling={"max_tokens": TOKENS, "ignore_eos": True})
    times: list[float] = []
    start = threading.Barrier(clients)

    def ask(stub: stubs.InferenceStub) -> None:
        start.wait()
        for _ in range(max(4, COUNT // clients)):
            began = time.monotonic()
            for _message in stub.Generate(request):
                pass
            times.append(1e3 * (time.monotonic() - began))

    with ExitStack() as stack:
        options = [*NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
        channels = [
            stack.enter_context(grpc.insecure_channel(server.address, options=options))
            for _ in range(clients)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        threads = [
            threading.Thread(target=ask, args=(stubs.InferenceStub(channel),))
            for channel in channels
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return times


def run() -> list[Row]:
    """Return the bench's rows."""
    p99s: list[float] = []
    medians: dict[int, list[float]] = {}
    latest: dict[int, list[float]] = {}

    def start_in_process() -> float:
        times = trio.run(_starts_in_process)
        p99s.append(percentile(times, 0.99))
        return statistics.median(times)

    inside = repeat(start_in_process)
    with peer("triolet", runner=RUNNER) as server:
        outside = repeat(lambda: statistics.median(_starts_over_grpc(server)))
        for clients in CLIENTS:
            _latencies(server, clients)
            runs = [_latencies(server, clients) for _ in inside]
            medians[clients] = [statistics.median(times) for times in runs]
            latest[clients] = [percentile(times, 0.99) for times in runs]
    rows = [
        row_of("submit to step start p50, in process", inside, "ms", bar=BAR_MS),
        row_of("submit to step start p99, in process", p99s[1:], "ms"),
        row_of("call to step start p50, over gRPC", outside, "ms"),
    ]
    for clients in CLIENTS:
        name = f"{TOKENS} tokens, n = {clients}"
        rows.append(row_of(f"whole request p50, {name}", medians[clients], "ms"))
        rows.append(row_of(f"whole request p99, {name}", latest[clients], "ms"))
    return rows
