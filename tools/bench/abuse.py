"""Measures what hostile clients cost a stream beside them, and the server's memory.

The victim reads one stream after the other of the demo model. Its gaps and its tokens per second
are compared with those beside a process that only spins, which takes a core as an attacker does.
Each attack runs over one connection and from ten addresses of the loopback network; its first
second does not count. Windows beside the attack and beside the spinning process alternate; from the
second one on, the server remembers the attacker's address.
``BENCH_ONLY`` is a pattern for the attacks' names.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.bench.attackers import ATTACKS
from tools.bench.frame import Row, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURES = ("grpc_service", "tools/bench/attackers.py")

ROOT = Path(__file__).parents[2]
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "2.5"))
REPEATS = 3  # windows beside each of the two, in turn
SETTLE_S = 1.0
TOKENS = 400
ONE = ("127.0.0.1",)
TEN = tuple(f"127.0.1.{number}" for number in range(1, 11))
SPIN = "while True: pass"
P50_BAR, P99_BAR, RATE_BAR, MEMORY_BAR_MB = 1.5, 3.0, 0.7, 50.0  # of issue 19
NO_PROXY = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True)
class Seen:
    """What the victim saw in one window: the gaps between its tokens in ms, its tokens per second,
    the errors that it met, and the memory that the server had at most, in MB."""

    gaps: list[float]
    rate: float
    errors: int
    peak_mb: float


@dataclass(frozen=True)
class Figures:
    """What the victim saw in several windows. ``first_mb`` and ``peak_mb`` are the server's memory
    in the first of them, and in the worst."""

    p50: float
    p99: float
    rate: float
    errors: int
    first_mb: float
    peak_mb: float


def figures_of(seen: list[Seen]) -> Figures:
    """Return the figures of several windows together."""
    gaps = [gap for one in seen for gap in one.gaps]
    return Figures(
        p50=statistics.median(gaps),
        p99=percentile(gaps, 0.99),
        rate=statistics.mean(one.rate for one in seen),
        errors=sum(one.errors for one in seen),
        first_mb=seen[0].peak_mb,
        peak_mb=max(one.peak_mb for one in seen),
    )


class Victim(threading.Thread):
    """Reads streams until ``is_stopping`` is set."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[float] = []
        self.errors = 0
        self.is_stopping = False
        self._address = address

    def run(self) -> None:
        """Read one stream after the other."""
        request = pb.GenerateRequest(
            text="Once upon a time",
            sampling={"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0},
        )
        with grpc.insecure_channel(self._address, options=NO_PROXY) as channel:
            stub = stubs.InferenceStub(channel)
            while not self.is_stopping:
                try:
                    for message in stub.Generate(request, timeout=60):
                        if message.WhichOneof("event") == "delta":
                            self.arrivals.append(time.monotonic())
                except grpc.RpcError:
                    self.errors += 1
                    time.sleep(0.05)


def rss_mb(pid: int) -> float:
    """Return a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def watch(address: str, pid: int) -> Seen:
    """Read streams for `SETTLE_S` and then `WINDOW_S` seconds, and return what was seen then."""
    victim = Victim(address)
    victim.start()
    time.sleep(SETTLE_S)
    errors, begin = victim.errors, time.monotonic()
    peak = 0.0
    while (now := time.monotonic()) < begin + WINDOW_S:
        peak = max(peak, rss_mb(pid))
        time.sleep(0.05)
    victim.is_stopping = True
    victim.join(60)
    seen = [at for at in victim.arrivals if begin <= at <= now]
    gaps = [1e3 * (b - a) for a, b in zip([begin, *seen], [*seen, now], strict=True)]
    return Seen(gaps, len(seen) / (now - begin), victim.errors - errors, peak)


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the block ends."""
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run a server with the demo model; yield its address and process id."""
    argv = [sys.executable, "-m", "grpc_service", "serve", "--port", "0", "--host", "0.0.0.0"]
    argv += ["--insecure", "--model", "demo-stories"]
    with running(*argv) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"Triolet is ready on \S+:(\d+) after", line):
                break
        else:
            raise SystemExit("the server did not start")
        yield f"127.0.0.1:{found[1]}", server.pid


def attack(name: str, sources: tuple[str, ...]) -> tuple[Figures, Figures]:
    """Return what the victim saw beside a process that spins and beside an attack, in turn."""
    beside_spin, beside_attack = [], []
    with serving() as (address, pid):
        host, port = address.split(":")
        argv = [sys.executable, "-m", "tools.bench.attackers", name, host, port, *sources]
        for _ in range(REPEATS):
            with running(sys.executable, "-c", SPIN):
                beside_spin.append(watch(address, pid))
            with running(*argv) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()
                beside_attack.append(watch(address, pid))
    return figures_of(beside_spin), figures_of(beside_attack)


def rows_of(name: str, sources: tuple[str, ...]) -> Iterator[Row]:
    """Yield an attack's rows."""
    control, seen = attack(name, sources)
    where = f"{name}, {len(sources)} address{'es' if len(sources) > 1 else ''}"
    note = f"{control.p50:.2f} → {seen.p50:.2f} ms"
    yield Row(f"{where}: p50", seen.p50 / control.p50, "×", P50_BAR, n=REPEATS, note=note)
    note = f"{control.p99:.1f} → {seen.p99:.1f} ms"
    yield Row(f"{where}: p99", seen.p99 / control.p99, "×", P99_BAR, n=REPEATS, note=note)
    rate = seen.rate / control.rate
    note = f"{control.rate:.0f} → {seen.rate:.0f}"
    yield Row(f"{where}: tokens/s", rate, "×", RATE_BAR, "higher", n=REPEATS, note=note)
    yield Row(f"{where}: memory", seen.peak_mb - control.first_mb, "MB", MEMORY_BAR_MB, n=REPEATS)
    yield Row(f"{where}: victim's failed calls", float(seen.errors), "calls", 0.0, n=REPEATS)


def run() -> list[Row]:
    """Return the bench's rows."""
    pattern = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    for name in ATTACKS:
        for sources in (ONE, TEN):
            if pattern.search(name):
                rows += rows_of(name, sources)
                print(
                    "\n".join(
                        f"{row.name}: {row.value:.2f} {row.unit} {row.note}" for row in rows[-5:]
                    ),
                    flush=True,
                )
    return rows
