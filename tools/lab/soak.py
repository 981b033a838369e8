"""Loads a server of fake models with every kind of client behaviour, for any length of time.

    python -m tools.lab.soak --minutes 10       every kind of client, good and bad
    python -m tools.lab.soak --cancels 10000    that many cancels, at random instants

Processes of clients (`tools.lab.soak_clients`) load a server in a process of its own; with
--minutes, some of them are killed now and then. Another client repeats the same request and
compares every byte of the output. Every few seconds a line says what the server holds. At the end,
everything must be as it was at rest before: blocks, live requests, Trio's tasks, threads and
descriptors; memory may have grown by less than 1 MiB per 1,000 requests in the second half. The
exit code is 1 if this does not hold, or if any output was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.server import Server, fake
from tests.support.wire import (
    Generation,
    connect,
    ended,
    is_idle,
    stats,
    wait_serving,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
GROWTH_MAX_MIB = 1.0  # per 1,000 requests
MIB = 2**20
REST_LIMIT_S = 40.0  # Trio's idle threads end after 10 s, grpc's pollers after about 20
END_LIMIT_S = 120.0
SETTLE_S = 0.3  # grpc closes connections after a while
KILL_EVERY_S = 4.0
CONTROL = {"prompt_ids": [77, 5, 77], "max_tokens": 400, "seed": 11}
SERVER = {
    "script": {"step_s": 0.001},
    "runner": {"num_blocks": 512, "max_model_len": 2048},
    "engine": {"max_num_seqs": 32, "max_num_batched_tokens": 256, "stream_buffer": 32},
}
MEASURES = ("files", "threads", "trio_tasks", "live", "blocks_in_use")


@dataclass(frozen=True)
class Sample:
    """What the server holds at one moment."""

    at_s: float
    requests: int
    memory: int
    files: int
    threads: int
    trio_tasks: int
    live: int
    blocks_in_use: int

    def line(self) -> str:
        """Return the sample as a line of text."""
        return (
            f"{self.at_s:7.1f} s  {self.requests:7d} requests  {self.memory / MIB:7.1f} MiB  "
            f"{self.files:4d} files  {self.threads:3d} threads  {self.trio_tasks:4d} "
            f"tasks  {self.live:4d} live  {self.blocks_in_use:5d} blocks"
        )


@dataclass
class Report:
    """The result of a soak.

    ``left_over``: figures that did not return to their baseline. ``wrong``: outputs and statuses.
    """

    samples: list[Sample]
    left_over: list[str]
    wrong: list[str]
    done: dict[str, int]
    num_controls: int

    @property
    def second_half(self) -> list[Sample]:
        """The samples of the second half of the requests."""
        first, last = self.samples[0].requests, self.samples[-1].requests
        return [one for one in self.samples if one.requests >= (first + last) / 2]

    @property
    def grown_mib(self) -> float:
        """How much more memory the last sample has than the first, in MiB."""
        return (self.samples[-1].memory - self.samples[0].memory) / MIB

    @property
    def growth_mib(self) -> float:
        """The growth of memory per 1,000 requests over the second half, in MiB."""
        return slope(self.second_half, "memory") / MIB

    @property
    def failures(self) -> list[str]:
        """Every reason why the soak failed."""
        grown = [f"grew by {self.growth_mib:.2f} MiB per 1,000 requests"]
        return [
            *self.left_over,
            *self.wrong,
            *(grown if self.growth_mib >= GROWTH_MAX_MIB else ()),
        ]


def take_sample(server: Server, start: float) -> Sample:
    """Return a sample, from the server's statistics and from the kernel."""
    totals = stats(server.channel, timeout=60)
    living = server.ask("tasks")
    return Sample(
        at_s=time.monotonic() - start,
        requests=sum(ended(server.channel).values()),
        memory=server.memory_bytes(),
        files=server.num_files(),
        live=totals.running + totals.waiting + totals.parked + totals.ending,
        blocks_in_use=totals.total_blocks - totals.free_blocks,
        **living,
    )


def slope(samples: list[Sample], name: str) -> float:
    """Return a figure's growth per 1,000 requests, by linear regression."""
    requests = [sample.requests / 1000 for sample in samples]
    if len(set(requests)) < 2:
        return 0.0
    figures = [float(getattr(sample, name)) for sample in samples]
    return statistics.linear_regression(requests, figures).slope


class Control:
    """A client that repeats a request whose output must stay the same, byte for byte."""

    def __init__(self, address: str) -> None:
        self.num_done = 0
        self.wrong: list[str] = []
        self._address = address
        self._reference = self._ask()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _ask(self) -> bytes:
        """Return the output as bytes, without the numbers of messages and of cached tokens, which
        depend on other clients."""
        with connect(self._address) as channel, Generation(channel, **CONTROL) as call:
            heard = call.finish()
        if heard.error is not None:
            return repr(heard.error).encode()
        usage = heard.finished().usage
        counts = (usage.prompt_tokens, usage.completion_tokens)
        return json.dumps([heard.text(), heard.ids(), counts]).encode()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            output = self._ask()
            self.num_done += 1
            if output != self._reference:
                self.wrong.append(f"the control client got {output[:300]!r}")

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join()


@dataclass
class Crowd:
    """Processes of clients. The ``victims`` are killed at random moments and replaced."""

    address: str
    settings: dict[str, Any]
    num_processes: int
    num_victims: int
    draw: random.Random
    done: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    victims: list[subprocess.Popen[str]] = field(default_factory=list)
    kill_at: float = 0.0

    def start(self) -> None:
        """Start all processes."""
        self.running = [self._one() for _ in range(self.num_processes)]
        self.victims = [self._one() for _ in range(self.num_victims)]

    def _one(self) -> subprocess.Popen[str]:
        settings = {"address": self.address, "seed": self.draw.randrange(2**31), **self.settings}
        return subprocess.Popen(
            [sys.executable, "-m", "tools.lab.soak_clients", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_some(self) -> None:
        """Now and then kill a victim and start another process."""
        now = time.monotonic()
        if now < self.kill_at:
            return
        if self.kill_at and self.victims:
            _kill(self.victims.pop(0))
            self.victims.append(self._one())
        self.kill_at = now + KILL_EVERY_S * (0.5 + self.draw.random())

    @property
    def is_running(self) -> bool:
        """Whether any process that is not a victim runs."""
        return any(one.poll() is None for one in self.running)

    def stop(self) -> None:
        """Let every client end its request, and collect what was wrong."""
        for one in self.victims:
            _kill(one)
        for one in self.running:
            out, _ = one.communicate(timeout=END_LIMIT_S)
            if one.returncode or not out:
                self.wrong.append(f"a process of clients ended with {one.returncode}")
                continue
            result = json.loads(out)
            self.wrong += result["wrong"]
            for kind, count in result["done"].items():
                self.done[kind] = self.done.get(kind, 0) + count

    def __enter__(self) -> Crowd:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in [*self.running, *self.victims]:
            _kill(one)


def _kill(one: subprocess.Popen[str]) -> None:
    one.kill()
    one.wait()
    for pipe in (one.stdin, one.stdout):
        if pipe is not None:
            pipe.close()


def wait_for_rest(server: Server, start: float, baseline: Sample | None) -> Sample:
    """Take samples until the server holds no more than at the baseline, at most `REST_LIMIT_S`, and
    return the last one. Without a baseline, wait until an idle server holds the same twice."""
    found = [take_sample(server, start)]

    def look() -> bool:
        found.append(take_sample(server, start))
        if baseline is None:
            time.sleep(SETTLE_S)
            return is_idle(stats(server.channel)) and not left_over(found[-1], found[-2])
        return not left_over(baseline, found[-1])

    with suppress(AssertionError):
        wait_until(look, REST_LIMIT_S)
    return found[-1]


def left_over(baseline: Sample, last: Sample) -> list[str]:
    """Return a line for each figure that is larger than at the baseline."""
    return [
        f"{name}: {getattr(last, name)} at the end, {getattr(baseline, name)} before"
        for name in MEASURES
        if getattr(last, name) > getattr(baseline, name)
    ]


@contextmanager
def soaked(seed: int) -> Iterator[Server]:
    """Run a server that has served requests, so that all that it makes once has been made."""
    with fake(**SERVER) as server:
        wait_serving(server.channel)
        settings = {"count": 150, "tasks": 24}
        with Crowd(server.address, settings, 1, 0, random.Random(seed)) as crowd:
            wait_until(lambda: not crowd.is_running, END_LIMIT_S, "a warm server")
        yield server


def soak(
    *,
    seconds: float | None = None,
    cancels: int | None = None,
    seed: int = 0,
    processes: int = 2,
    every_s: float = 5.0,
    shows: bool = False,
) -> Report:
    """Load a server for a number of seconds or with a number of cancels, and return the report."""
    draw = random.Random(seed)
    settings: dict[str, Any] = {"tasks": 16}
    if cancels is not None:
        settings |= {"count": -(-cancels // processes), "kinds": {"cancel": 1}}
    start = time.monotonic()
    samples: list[Sample] = []

    def sample() -> None:
        samples.append(take_sample(server, start))
        if shows:
            print(samples[-1].line(), flush=True)

    with soaked(seed) as server:
        baseline = wait_for_rest(server, start, None)
        if shows:
            print(f"seed {seed}; at rest before:\n{baseline.line()}", flush=True)
        with ExitStack() as stack:
            control = stack.enter_context(Control(server.address))
            victims = 0 if cancels is not None else 1
            crowd = stack.enter_context(Crowd(server.address, settings, processes, victims, draw))
            end = time.monotonic() + (seconds or float("inf"))
            next_sample = 0.0
            while time.monotonic() < end and crowd.is_running:
                crowd.kill_some()
                if time.monotonic() >= next_sample:
                    sample()
                    next_sample = time.monotonic() + every_s
                time.sleep(0.05)
            crowd.stop()
        last = wait_for_rest(server, start, baseline)
        if shows:
            print(f"at rest after:\n{last.line()}", flush=True)
    return Report(
        samples,
        left_over(baseline, last),
        crowd.wrong + control.wrong,
        crowd.done,
        control.num_done,
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.soak", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--minutes", type=float)
    group.add_argument("--cancels", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    args = parser.parse_args()
    report = soak(
        seconds=None if args.minutes is None else 60 * args.minutes,
        cancels=args.cancels,
        seed=args.seed,
        processes=args.processes,
        every_s=1.0 if args.cancels else 5.0,
        shows=True,
    )
    print("requests:", ", ".join(f"{count} {kind}" for kind, count in sorted(report.done.items())))
    print(f"control outputs compared: {report.num_controls}")
    print("growth per 1,000 requests over the second half:")
    print(f"  memory: {report.growth_mib:+.3f} MiB")
    for name in MEASURES:
        print(f"  {name}: {slope(report.second_half, name):+.3g}")
    for failure in report.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
