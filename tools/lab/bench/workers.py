"""Measures several replicas side by side: simulated devices against a common lock, and real CPUs.

Simulated: a device's step takes `STEP_S` with the GIL released, like an accelerator's. There is
one client per device in a closed loop, and a request takes `STEPS` steps. The throughput of several
devices is given against that of one. "Waiting" is the share of a request's time outside of steps.
The times of whole requests have percentiles, and their p99 is compared with the time that a request
takes alone. The baseline is the same engine with a lock that every step takes. Devices whose steps
hold the GIL are the case in which threads gain nothing.

Real: replicas of s135 in bfloat16 with one thread each, and `REAL_CLIENTS` clients per replica in a
closed loop, in tokens per second; as threads of one process, and as processes.

`BENCH_WINDOW_S` is the length of a run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, percentile, repeat_in_turn, row_of
from tools.lab.bench.simulated import Device, HoldingDevice, LockedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.api.engine import Engine

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "engine/pool",
    "engine/worker",
    "engine/kernels",
)

STEP_S = 0.1
STEPS = 8
DEVICES = (1, 2, 4, 8)
MOST = DEVICES[-1]
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "2"))
TOUCH_S = 0.1
REAL_CLIENTS = 8
REAL_TOKENS = 32
PROMPT = (5, 6, 7)
BAR_SCALING, BAR_BASELINE, BAR_WAITING, BAR_P99, BAR_REAL = 7.8, 3.0, 1.0, 1.2, 1.8
PERCENTILES = (50, 90, 99)


@dataclass
class Seen:
    """The figures of one run. ``times`` are the durations of whole requests, in seconds."""

    tokens: int = 0
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    busy_s: float = 0.0  # inside the devices' steps

    @property
    def tokens_per_s(self) -> float:
        """The run's throughput."""
        return self.tokens / self.seconds

    @property
    def waiting(self) -> float:
        """The share of the requests' time outside of steps, in per cent."""
        return 100 * (1 - self.busy_s / sum(self.times))


async def _closed_loop(engine: Engine, clients: int, tokens: int, window_s: float) -> Seen:
    """Run clients that each send the next request as soon as the last is answered, for
    ``window_s``. Cancellation: at once."""
    seen = Seen()
    request = GenerateRequest(
        token_ids=PROMPT, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True)
    )
    started = time.monotonic()

    async def client() -> None:
        while (asked := time.monotonic()) - started < window_s:
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


async def _simulated(count: int, kind: type[Device]) -> Seen:
    """Return the figures of simulated devices. Cancellation: after the steps in flight."""
    config = EngineConfig(models=(ModelConfig("fake", workers=(WorkerConfig(count=count),)),))
    devices: list[Device] = []

    def make_runner(model: ModelConfig, config: EngineConfig) -> Device:
        devices.append(kind(STEP_S))
        return devices[-1]

    async with open_engine(config, make_runner=make_runner) as engine:
        await engine.load_model("fake")
        seen = await _closed_loop(engine, count, STEPS, WINDOW_S)
    seen.busy_s = sum(device.busy_s for device in devices)
    return seen


async def _real(replicas: int, runner: str) -> float:
    """Return the tokens/s of real replicas. Cancellation: after the steps in flight."""
    workers = (WorkerConfig(count=replicas, threads=1, runner=runner),)
    model = ModelConfig(str(checkpoint("s135")), name="s135", dtype="bfloat16", workers=workers)
    clients = replicas * REAL_CLIENTS
    async with open_engine(EngineConfig(models=(model,), kv_cache_memory=1 << 28)) as engine:
        await engine.load_model("s135")
        await _closed_loop(engine, clients, REAL_TOKENS, TOUCH_S)  # touches every page of memory
        seen = await _closed_loop(engine, clients, REAL_TOKENS, WINDOW_S)
    return seen.tokens_per_s


def run() -> list[Row]:
    """Return the bench's rows."""
    rows = _simulated_rows()
    for runner in ("thread", "process"):
        one, two = repeat_in_turn(
            [partial(trio.run, _real, 1, runner), partial(trio.run, _real, 2, runner)]
        )
        name = f"s135 ({runner})"
        rows += [
            row_of(f"{name}: one replica of a thread", one, "tok/s"),
            row_of(f"{name}: two replicas of a thread", two, "tok/s"),
            row_of(
                f"{name}: two against one", _ratios(two, one), "×", bar=BAR_REAL, better="higher"
            ),
        ]
    return rows


def _simulated_rows() -> list[Row]:
    kinds = [
        *((Device, count) for count in DEVICES),
        *((LockedDevice, count) for count in DEVICES),
        (HoldingDevice, MOST),
    ]
    runs = repeat_in_turn([partial(trio.run, _simulated, count, kind) for kind, count in kinds])
    found = dict(zip(kinds, runs, strict=True))
    rates = {load: [seen.tokens_per_s for seen in runs] for load, runs in found.items()}
    alone = rates[Device, 1]
    rows = []
    for count in DEVICES:
        name, locked = _devices(count), f"{_devices(count)} behind one lock"
        own_rates, locked_rates = rates[Device, count], rates[LockedDevice, count]
        scaling = BAR_SCALING if count == MOST else None
        gain = BAR_BASELINE if count == MOST else None
        rows += [
            row_of(
                f"{name} against one",
                _ratios(own_rates, alone),
                "×",
                bar=scaling,
                better="higher",
            ),
            row_of(locked, _ratios(locked_rates, alone), "×"),
            row_of(
                f"{name} against {locked}",
                _ratios(own_rates, locked_rates),
                "×",
                bar=gain,
                better="higher",
            ),
            *_request_rows(
                name,
                found[Device, count],
                waiting=BAR_WAITING if count == MOST else None,
                p99=BAR_P99,
            ),
            *_request_rows(locked, found[LockedDevice, count]),
        ]
    held = _ratios(rates[HoldingDevice, MOST], alone)
    return [*rows, row_of(f"{_devices(MOST)} that hold the GIL, against one", held, "×")]


def _request_rows(
    name: str, runs: Sequence[Seen], *, waiting: float | None = None, p99: float | None = None
) -> list[Row]:
    """Return the rows of whole requests: their waiting with a bar, their p99 against the time of a
    request alone with a bar, and their percentiles."""
    note = f"of {sum(len(seen.times) for seen in runs)}"
    p99s = [percentile(seen.times, 0.99) / (STEPS * STEP_S) for seen in runs]
    return [
        row_of(f"{name}: waiting", [seen.waiting for seen in runs], "%", bar=waiting),
        row_of(f"{name}: p99 against a request alone", p99s, "×", bar=p99, note=note),
        *(
            row_of(
                f"{name}: whole request p{share}",
                [1e3 * percentile(seen.times, share / 100) for seen in runs],
                "ms",
                note=note,
            )
            for share in PERCENTILES
        ),
    ]


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]
