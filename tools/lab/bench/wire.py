"""Servers and readers for the benches over gRPC, each a process of its own.

`python -m tools.lab.bench.wire KIND JSON` is such a process: ``triolet`` serves a `PacedRunner`,
``plain`` is a grpc.aio handler that writes the same messages without an engine, and ``readers``
reads every message of a number of streams. It prints one line of JSON when it is ready, and answers
every line on standard input with another. It ends when the input ends. The kinds ``bare`` and
``http-readers`` are those of `tools.lab.bench.wire_http`.

Rule 1: a server's CPU time is read from outside, so that all kinds are measured alike. Rule 2:
readers use the bytes of a message only to count them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import trio
import uvloop

from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import EndReason, SequenceId
from engine.core.text.plan import Row as PlanRow
from engine.core.text.plan import RowResult, StepPlan, StepResult
from engine.worker.fakes.text import FakeRunner
from grpc_service._generated.triolet.v1 import inference_pb2_grpc  # the servicer of grpc.aio
from grpc_service.app.application import serve
from grpc_service.app.server_config import ServerConfig
from grpc_service.client import messages as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
GENERATE = "/triolet.v1.Inference/Generate"
WORD = " word"
NO_PROXY = [("grpc.enable_http_proxy", 0)]
START_LIMIT_S = 60.0
END_LIMIT_S = 15.0
ENDLESS = 8000  # tokens of a request that is cancelled before it has them
STAMPS_MAX = 100_000  # steps: more than an hour of 40 ms steps


Stamp = tuple[float, float, int]  # a step's start, end and number of rows


class PacedRunner(FakeRunner):
    """A runner whose steps sleep ``step_s`` and give every row the same token.

    The runner does not count the tokens of a request for `ENDLESS` or more, which must be
    cancelled. ``stamps`` keeps each step's start, end and number of rows, by `time.monotonic`,
    whose clock all processes of a machine share.
    """

    def __init__(
        self, *, step_s: float = 0.0, text: str = WORD, num_blocks: int, max_model_len: int
    ) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=max_model_len)
        self.stamps: deque[Stamp] = deque(maxlen=STAMPS_MAX)
        self._step_s = step_s
        self._text = text
        self._left: dict[SequenceId, int] = {}  # tokens to go
        self._endless: dict[SequenceId, RowResult] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Sleep, and give every row its token."""
        started = time.monotonic()
        if self._step_s:
            time.sleep(self._step_s)
        for released in plan.released:
            self._left.pop(released, None)
            self._endless.pop(released, None)
        for admitted in plan.admitted:
            sequence, limit = admitted.sequence, admitted.stops.max_tokens
            if limit >= ENDLESS and len(admitted.prompt) == 1:
                self._endless[sequence] = RowResult(sequence, (7,), self._text)
            else:
                self._left[sequence] = limit
        made, sample = self._endless, self._sample_paced
        rows = tuple([made.get(row.sequence) or sample(row) for row in plan.rows])
        result = StepResult(plan.plan_id, rows)
        self.stamps.append((started, time.monotonic(), len(rows)))
        return result

    def _sample_paced(self, row: PlanRow) -> RowResult:
        sequence = row.sequence
        if not row.logits.samples:
            return RowResult(sequence)
        self._left[sequence] -= 1
        finish = None if self._left[sequence] else EndReason.LENGTH
        return RowResult(sequence, (7,), self._text, finish=finish)

    def take_stamps(self) -> list[Stamp]:
        """Return the steps since the last call."""
        return [self.stamps.popleft() for _ in range(len(self.stamps))]


# ---- the benches' side -----------------------------------------------------------------------


class Peer:
    """A process of this file. ``hello`` is its first line."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.lab.bench.wire", kind, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._killer = threading.Timer(START_LIMIT_S, self._process.kill)
        self._killer.start()
        self.hello: dict[str, Any] = self._read()
        self._killer.cancel()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a bench's process ended with {self._process.wait()}")
        return json.loads(line)

    @property
    def address(self) -> str:
        """The server's address."""
        return f"127.0.0.1:{self.hello['port']}"

    @property
    def http_address(self) -> str:
        """The address of the server's port for HTTP."""
        return f"127.0.0.1:{self.hello['openai_port']}"

    def ask(self) -> Any:
        """Return the process's answer: what it has counted or recorded."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def cpu_s(self) -> float:
        """Return the CPU time of all the process's threads, ended ones included, to the
        nanosecond. Source: clock_getcpuclockid(3); the id of a process's clock is made from its
        pid."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def close(self) -> None:
        """End the process by the end of its input, or kill it after `END_LIMIT_S`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def peer(kind: str, **settings: Any) -> Iterator[Peer]:
    """Run a process of this file while the block runs."""
    one = Peer(kind, **settings)
    try:
        yield one
    finally:
        one.close()


# ---- the processes' side ---------------------------------------------------------------------


def say(what: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


def answer_lines(answer: Callable[[], object], end: Callable[[], None]) -> None:
    """Answer every line of the input from a thread, and call ``end`` at the input's end."""

    def run() -> None:
        for _ in sys.stdin:
            say(answer())
        end()

    threading.Thread(target=run, daemon=True, name="stdin").start()


def end_by_signal() -> None:
    """Have this process end as by its operator."""
    os.kill(os.getpid(), signal.SIGTERM)


async def _serve_triolet(
    runner: dict[str, Any], engine: dict[str, Any], tls: dict[str, str], openai: bool
) -> None:
    paced = PacedRunner(**runner)
    flags = {"tls_cert": tls["cert"], "tls_key": tls["key"]} if tls else {}
    config = EngineConfig(models=(ModelConfig("fake"),), **{"drain_timeout_s": 0.2} | engine)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(serve, make_runner=lambda model, config: paced),
            config,
            ServerConfig(port=0, openai_port=0 if openai else None, **flags),
        )
        answer_lines(paced.take_stamps, end_by_signal)
        say({"port": server.port, "openai_port": server.openai_port})


class PlainInference(inference_pb2_grpc.InferenceServicer):
    """Writes a new message to every stream at every tick."""

    def __init__(self) -> None:
        self._tick = asyncio.Event()

    def tick(self) -> None:
        """Have every stream write a message."""
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Write a message at every tick, for ever."""
        while True:
            await self._tick.wait()
            message = pb.GenerateResponse()
            message.delta.text = WORD
            await context.write(message)


def _server_credentials(tls: dict[str, str]) -> grpc.ServerCredentials:
    key, cert = (Path(tls[name]).read_bytes() for name in ("key", "cert"))
    return grpc.ssl_server_credentials([(key, cert)])


def _channel_credentials(ca: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(Path(ca).read_bytes())


async def _serve_plain(step_s: float, tls: dict[str, str]) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference = PlainInference()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    if tls:
        port = server.add_secure_port("127.0.0.1:0", _server_credentials(tls))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    answer_lines(lambda: None, end_by_signal)
    say({"port": port})
    while True:
        await asyncio.sleep(step_s)
        inference.tick()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, with which grpc.aio and sockets are fastest."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _read_streams(address: str, streams: int, max_tokens: int, ca: str = "") -> None:
    """Open every stream and count messages and bytes.

    The process is ready when each stream has had two messages.
    Cancellation: closes the streams.
    """
    counts = [0, 0]  # messages, bytes
    is_running = asyncio.Event()
    num_running = 0
    request = pb.GenerateRequest(
        text="a", sampling={"max_tokens": max_tokens, "ignore_eos": True}
    ).SerializeToString()

    async def read(channel: grpc.aio.Channel) -> None:
        nonlocal num_running
        call = channel.unary_stream(GENERATE)(request)
        await call.read()
        await call.read()
        num_running += 1
        if num_running == streams:
            is_running.set()
        while message := await call.read():
            counts[0] += 1
            counts[1] += len(message)
        print("a stream ended before its bench did", file=sys.stderr)

    if ca:
        opened = grpc.aio.secure_channel(address, _channel_credentials(ca), options=NO_PROXY)
    else:
        opened = grpc.aio.insecure_channel(address, options=NO_PROXY)
    async with opened as channel:
        tasks = [asyncio.create_task(read(channel)) for _ in range(streams)]
        running = asyncio.create_task(is_running.wait())
        await asyncio.wait([running, *tasks], return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        answer_lines(lambda: counts, lambda: loop.call_soon_threadsafe(done.set))
        say({})
        await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def main() -> None:
    """Run a process of the kind in argv[1] with the settings in argv[2]."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    if kind == "triolet":
        parts = (settings.get(name, {}) for name in ("runner", "engine", "tls"))
        trio.run(_serve_triolet, *parts, settings.get("openai", False))
        return
    if kind in ("bare", "http-readers"):
        from tools.lab.bench import wire_http  # its server is an extra

        wire_http.run(kind, settings)
        return
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    loop = new_event_loop()
    if kind == "plain":
        loop.run_until_complete(_serve_plain(settings["step_s"], settings.get("tls", {})))
    else:
        loop.run_until_complete(_read_streams(**settings))


if __name__ == "__main__":
    main()
