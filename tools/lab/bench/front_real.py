"""Measures what the server costs a real model: s135's tokens/s with 256 gRPC streams, against the
same batch read in the engine's own process.

Both engines are processes with the same configuration, each with 256 requests that never end. A
third process reads the gRPC streams. Tokens are counted by the engine's statistics, and the clock
starts and stops when the count changes, at a step's end. Every run begins with new requests, so
that both are measured at the same contexts.

`python -m tools.lab.bench.front_real DIR` is the process without gRPC. It answers every line on
standard input with the tokens/s of one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import grpc
import trio

import engine
from engine.gc_tuning import freeze_after_load
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.served import served
from tools.lab.bench.wire import NO_PROXY, ROOT, peer

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "engine/kernels",
    "grpc_service/rpc",
    "grpc_service/services",
)

STREAMS = 256
ENDLESS = 8000
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "8"))
POLL_S = 0.01
BAR = 0.92


async def rate(count: Callable[[], int]) -> float:
    """Return the tokens/s of a window, by a count that grows at every step's end.

    Cancellation: at once.
    """

    async def next_edge() -> tuple[float, int]:
        before = count()
        while (now := count()) == before:  # noqa: ASYNC110  (another process's count, too)
            await trio.sleep(POLL_S)
        return time.perf_counter(), now

    start, first = await next_edge()
    await trio.sleep(WINDOW_S)
    end, last = await next_edge()
    return (last - first) / (end - start)


# ---- through gRPC ----------------------------------------------------------------------------


def through_grpc(address: str) -> float:
    """Return the tokens/s while a process reads all streams."""
    with (
        peer("readers", address=address, streams=STREAMS, max_tokens=ENDLESS),
        grpc.insecure_channel(address, options=NO_PROXY) as channel,
    ):
        stub = stubs.ControlStub(channel)

        def count() -> int:
            answer = stub.GetStats(pb.GetStatsRequest())
            return int(answer.totals.completion_tokens_total)

        return trio.run(rate, count)


# ---- without gRPC ----------------------------------------------------------------------------


async def answer_lines(model: str) -> None:
    """Run the process without gRPC: answer every line of input with one run's tokens/s."""
    config = engine.EngineConfig(models=(engine.ModelConfig(model),), max_num_seqs=STREAMS)
    async with engine.open_engine(config) as opened:
        await opened.wait_ready()
        freeze_after_load()
        print("ready", flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(await in_process(opened)), flush=True)


async def in_process(opened: engine.Engine) -> float:
    """Return the tokens/s while tasks of this process read all streams."""
    request = engine.GenerateRequest(
        text="a", sampling=engine.SamplingParams(max_tokens=ENDLESS, ignore_eos=True)
    )
    num_running = 0
    all_running = trio.Event()

    async def read() -> None:
        nonlocal num_running
        tokens = 0
        async with opened.generate(request) as stream:
            async for event in stream:
                tokens += isinstance(event, engine.Tokens)
                if tokens == 2:
                    num_running += 1
                    if num_running == STREAMS:
                        all_running.set()

    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(read)
        await all_running.wait()
        found = await rate(lambda: opened.statistics().totals.completion_tokens_total)
        nursery.cancel_scope.cancel(reason="measured")
    return found


class InProcess:
    """Starts the process without gRPC and asks it for measurements."""

    def __init__(self, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.lab.bench.front_real", model],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def measure(self) -> float:
        """Return the tokens/s of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._read()))

    def close(self) -> None:
        """End the process by the end of its input."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait()}")
        return line


def run() -> list[Row]:
    """Return the bench's rows."""
    model = str(checkpoint("s135"))
    bare = InProcess(model)
    with (
        closing(bare),
        served([(model, "s135")], "--max-num-seqs", str(STREAMS)) as address,
    ):
        ours, alone = repeat_in_turn([lambda: through_grpc(address), bare.measure])
    ratios = [mine / most for mine, most in zip(ours, alone, strict=True)]
    return [
        row_of(f"s135, {STREAMS} gRPC streams", ours, "tokens/s", better="higher"),
        row_of(f"s135, {STREAMS} readers in process", alone, "tokens/s", better="higher"),
        row_of("through gRPC against in process", ratios, "×", bar=BAR, better="higher"),
    ]


if __name__ == "__main__":
    trio.run(answer_lines, sys.argv[1])
