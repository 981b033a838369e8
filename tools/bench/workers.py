"""Measures several replicas side by side: simulated devices against a common lock, and real CPUs.

Simulated: a device's step sleeps `STEP_S` with the GIL released, like an accelerator's. There is
one client per device in a closed loop, and a request takes `STEPS` steps. The throughput of several
devices is given against that of one (R24, R27, R28, R29). "Waiting" is the share of a request's
time outside of steps, so that its rest is the time inside the model (R25, R31). p99 is that of
whole requests, against the time that one takes alone (R30). The baseline is the same engine with a
lock that every step takes (R76).

Real: replicas of s135 in bfloat16 with one thread each, and `REAL_CLIENTS` clients per replica in a
closed loop, in tokens per second; as threads of one process, and as processes.

`BENCH_WINDOW_S` is the length of a run.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.core.text.types import Tokens
from engine.requests.text_values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tools.bench.checkpoints import checkpoint
from tools.bench.frame import Row, percentile, repeat_in_turn, row_of

if TYPE_CHECKING:
    from engine.api.engine import Engine
    from engine.core.text.plan import StepPlan, StepResult

STEP_S = 0.1
STEPS = 8
DEVICES = (1, 2, 4, 8)
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "3"))
REAL_CLIENTS = 8
REAL_TOKENS = 32
PROMPT = (5, 6, 7)
BAR_SCALING, BAR_WAITING, BAR_P99, BAR_REAL = 7.8, 1.0, 1.2, 1.8


@dataclass
class Seen:
    """The figures of one run. ``times`` are whole requests, in seconds."""

    tokens: int = 0
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    busy_s: float = 0.0  # inside the devices' steps

    @property
    def tokens_per_s(self) -> float:
        """The run's throughput."""
        return self.tokens / self.seconds


class Device(FakeRunner):
    """A simulated device that adds up the time of its steps."""

    busy_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan and add its time."""
        started = time.monotonic()
        try:
            return super().execute(plan)
        finally:
            self.busy_s += time.monotonic() - started


class LockedDevice(Device):
    """A device whose steps take a lock that all devices share."""

    lock = threading.Lock()

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan while holding the lock."""
        with self.lock:
            return super().execute(plan)


async def _closed_loop(engine: Engine, clients: int, tokens: int) -> Seen:
    """Run clients that each send the next request as soon as the last is answered, for
    `WINDOW_S`."""
    seen = Seen()
    request = GenerateRequest(
        token_ids=PROMPT, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True)
    )
    started = time.monotonic()

    async def client() -> None:
        while (asked := time.monotonic()) - started < WINDOW_S:
            async with engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Tokens):
                        seen.tokens += len(event.token_ids)
            seen.times.append(time.monotonic() - asked)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(client)
    seen.seconds = time.monotonic() - started
    return seen


async def _simulated(count: int, kind: type[Device], runs: list[Seen]) -> float:
    """Return the tokens/s of ``count`` simulated devices and append the run to ``runs``."""
    config = EngineConfig(models=(ModelConfig("fake", workers=(WorkerConfig(count=count),)),))
    devices: list[Device] = []

    def make_runner(model: ModelConfig, config: EngineConfig) -> Device:
        devices.append(kind(script=FakeScript(step_s=STEP_S)))
        return devices[-1]

    async with open_engine(config, make_runner=make_runner) as engine:
        await engine.load_model("fake")
        seen = await _closed_loop(engine, count, STEPS)
    seen.busy_s = sum(device.busy_s for device in devices)
    runs.append(seen)
    return seen.tokens_per_s


async def _real(replicas: int, runner: str) -> float:
    """Return the tokens/s of real replicas."""
    workers = (WorkerConfig(count=replicas, threads=1, runner=runner),)
    model = ModelConfig(str(checkpoint("s135")), name="s135", dtype="bfloat16", workers=workers)
    async with open_engine(EngineConfig(models=(model,), kv_cache_memory=1 << 28)) as engine:
        await engine.load_model("s135")
        await _closed_loop(engine, replicas * REAL_CLIENTS, 2)  # touches every page of memory
        seen = await _closed_loop(engine, replicas * REAL_CLIENTS, REAL_TOKENS)
    return seen.tokens_per_s


def run() -> list[Row]:
    """Return the bench's rows."""
    rows = _simulated_rows()
    for runner in ("thread", "process"):
        one, two = repeat_in_turn(
            [partial(trio.run, _real, 1, runner), partial(trio.run, _real, 2, runner)]
        )
        ratios = [b / a for a, b in zip(one, two, strict=True)]
        rows += [
            row_of(f"s135, one replica of a thread ({runner})", one, "tok/s"),
            row_of(f"s135, two replicas of a thread ({runner})", two, "tok/s"),
            row_of(f"  two against one ({runner})", ratios, "×", bar=BAR_REAL, better="higher"),
        ]
    return rows


def _simulated_rows() -> list[Row]:
    runs: dict[int, list[Seen]] = {devices: [] for devices in DEVICES}
    measures = [partial(trio.run, _simulated, n, Device, runs[n]) for n in DEVICES]
    locked_one = partial(trio.run, _simulated, DEVICES[-1], LockedDevice, [])
    *own, locked = repeat_in_turn([*measures, locked_one])
    rows = []
    for devices, rates in zip(DEVICES, own, strict=True):
        ratios = [rate / first for rate, first in zip(rates, own[0], strict=True)]
        bar = BAR_SCALING if devices == DEVICES[-1] else None
        times = [time for seen in runs[devices][1:] for time in seen.times]
        waits = [100 * (1 - seen.busy_s / sum(seen.times)) for seen in runs[devices][1:]]
        service_s = STEPS * STEP_S
        p99s = [percentile(seen.times, 0.99) / service_s for seen in runs[devices][1:]]
        rows += [
            row_of(f"{devices} devices against one", ratios, "×", bar=bar, better="higher"),
            row_of("  waiting", waits, "%", bar=BAR_WAITING if bar else None),
            row_of(
                "  p99 against a request alone", p99s, "×", bar=BAR_P99, note=f"of {len(times)}"
            ),
        ]
    ratios = [rate / first for rate, first in zip(locked, own[0], strict=True)]
    return [*rows, row_of(f"{DEVICES[-1]} devices behind one lock", ratios, "×")]
