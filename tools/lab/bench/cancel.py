"""Measures how soon a cancel takes effect in every phase of a request, over gRPC, with fake steps
of 20 ms.

A client that cancels gets a status at once from its own library. So the time is measured for an
abort by the server: from before `Control.Abort` is sent until the request's client has the status
ABORTED. A parked client has stopped reading, and grpc's client gives the status only after the
messages before it. So it reads on when the abort is sent, and its time includes the reading of
the messages that had filled its flow-control window.

Blocks are measured for a cancel by the client: the steps that began after the cancel was sent and
still had a row of the request (the step in flight at that time is not counted), and the time until
`GetStats` shows that every block is free. A queued request holds no blocks; its time is that
until it has left the queue.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.wire import (
    SMALL_WINDOW,
    Generation,
    connect,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)
from tools.lab.bench.frame import REPEATS, Row, percentile, row_of
from tools.lab.bench.wire import ENDLESS, Peer, peer

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/rpc",
    "grpc_service/services",
)

COUNT = int(os.environ.get("BENCH_COUNT", "40"))
STEP_S = 0.020
PHASES = ("queued", "prefill", "decode", "parked")
LONG = 4000
BUDGET = 16  # tokens per step; a prompt of 500 tokens takes 32 steps
BAR_STATUS_MS = 10.0
BAR_STEPS = 1.0
RUNNER = {"step_s": STEP_S, "num_blocks": 4096, "max_model_len": ENDLESS + 200}
ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": BUDGET, "prefix_cache": False}
# A message that fills a small window at once, so that the next one parks the request.
PARKING = ({"text": "x" * 20_000}, {"stream_buffer": 2})


class Phase:
    """Brings requests into one phase, on a server of their own."""

    def __init__(self, name: str, server: Peer) -> None:
        self.name = name
        self.server = server
        self._draw = random.Random(name)

    @contextlib.contextmanager
    def request(self, channel: grpc.Channel) -> Iterator[Generation]:
        """Open a request, bring it into the phase, wait up to two steps at random, and yield it."""
        length = 500 if self.name == "prefill" else 1
        own = SMALL_WINDOW if self.name == "parked" else ()
        with (
            connect(self.server.address, *own) as connection,
            Generation(
                connection, prompt_ids=[3] * length, max_tokens=LONG, request_id=_id()
            ) as call,
        ):
            call.read()  # Started
            if self.name == "decode":
                call.read_deltas(2)
            elif self.name == "parked":
                wait_until(lambda: stats(channel).parked == 1, 20, "parked")
            time.sleep(self._draw.random() * 2 * STEP_S)
            yield call

    def check(self, channel: grpc.Channel) -> None:
        """Assert that the request is in the phase."""
        totals = stats(channel)
        is_there = {
            "queued": totals.waiting == 1,
            "prefill": totals.running == 1,
            "decode": totals.running == 1,
            "parked": totals.parked == 1,
        }
        assert is_there[self.name], f"not {self.name}: {totals}"


def _id() -> str:
    return f"cancel-{random.getrandbits(64):x}"


def measure_status(phase: Phase, channel: grpc.Channel) -> list[float]:
    """Return the times in ms from `Abort` to the client's status."""
    control = stubs.ControlStub(channel)
    times = []
    for _ in range(COUNT):
        with phase.request(channel) as call:
            phase.check(channel)
            name = call.heard.started.request_id
            ended: list[float] = []

            def read(call: Generation = call, ended: list[float] = ended) -> None:
                while call.read() is not None:
                    pass
                ended.append(time.monotonic())

            reader = threading.Thread(target=read)
            if phase.name != "parked":
                reader.start()
                time.sleep(STEP_S / 2)  # until the reader waits for a message
            began = time.monotonic()
            control.Abort(pb.AbortRequest(request_ids=[name]), timeout=10)
            if phase.name == "parked":
                reader.start()
            reader.join()
            assert call.heard.error.code() is grpc.StatusCode.ABORTED, call.heard.error
            times.append(1e3 * (ended[0] - began))
    return times


def measure_free(phase: Phase, channel: grpc.Channel) -> tuple[list[float], list[float]]:
    """Return, for each cancel by a client, the ms until the request's blocks are free (or until a
    queued request has left the queue), and how many steps began meanwhile."""
    times, steps = [], []
    is_queued = phase.name == "queued"
    for _ in range(COUNT):
        with phase.request(channel) as call:
            phase.check(channel)
            phase.server.ask()
            began = time.monotonic()
            call.call.cancel()
            while True:
                totals = stats(channel)
                if totals.waiting == 0 if is_queued else totals.free_blocks == totals.total_blocks:
                    break
            times.append(1e3 * (time.monotonic() - began))
            steps.append(float(sum(start > began for start, _, _ in phase.server.ask())))
    return times, steps


@contextlib.contextmanager
def seats_taken(channel: grpc.Channel) -> Iterator[None]:
    """Run two requests, which take the engine's two seats, so that a third one is queued."""
    with contextlib.ExitStack() as stack:
        for number in (1, 2):
            fields: dict[str, Any] = {"prompt_ids": [number], "max_tokens": ENDLESS}
            call = stack.enter_context(Generation(channel, **fields))
            call.read_deltas(1)
            threading.Thread(target=call.finish, daemon=True).start()
        yield


def measure_phase(name: str) -> list[Row]:
    """Return the rows of one phase."""
    text, engine = PARKING if name == "parked" else ({}, {})
    status: list[float] = []
    times: list[float] = []
    steps: list[float] = []
    with (
        peer("triolet", runner=RUNNER | text, engine=ENGINE | engine) as server,
        connect(server.address) as channel,
    ):
        wait_serving(channel)
        phase = Phase(name, server)
        with seats_taken(channel) if name == "queued" else contextlib.nullcontext():
            for _ in range(REPEATS):
                status.append(percentile(measure_status(phase, channel), 0.99))
                some_times, some_steps = measure_free(phase, channel)
                times.append(percentile(some_times, 0.99))
                steps.append(max(some_steps))
        wait_idle(channel)
    note = f"of {COUNT} a run"
    reads_on = " and reads on" if name == "parked" else ""
    rows = [
        row_of(f"abort{reads_on} → status p99, {name}", status, "ms", bar=BAR_STATUS_MS, note=note)
    ]
    if name == "queued":
        rows.append(row_of(f"client cancels → out of the queue p99, {name}", times, "ms"))
    else:
        rows.append(row_of(f"client cancels → steps begun, {name}", steps, "steps", bar=BAR_STEPS))
        rows.append(row_of(f"client cancels → blocks free p99, {name}", times, "ms"))
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    return [row for name in PHASES for row in measure_phase(name)]
