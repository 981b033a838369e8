"""Measures what hostile clients, of gRPC and of HTTP, cost a stream beside them, and memory.

The victim is a client that reads one stream after the other of the demo model. Its gaps between
tokens and its tokens per second are compared with those beside a process that only spins, which
takes a core as an attacker does. Each attack runs over one connection and from ten addresses of the
loopback network; its first second does not count. Before an attack, a full batch of long requests
touches the memory that the model reserved, so that the server's growth is the attack's. Windows
beside the attack and beside the spinning process alternate; from the attack's second window on, the
server remembers the attacker's address.
Besides, single large messages are measured: for each repeated field and each map of each request,
one with as many of the smallest values as a message holds, one with as many as the server decodes
in its loop, and one with as many as are allowed. The row of a message has the victim's longest gap
until `AFTER_S` after its answer. ``BENCH_ONLY`` is a pattern for names of attacks and of fields.
"""

from __future__ import annotations

import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grpc_service.access.decoding import SMALL_BYTES
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.services.methods import CONTROL, INFERENCE, MODELS
from tests.support.worst_messages import (
    Path as FieldPath,
)
from tests.support.worst_messages import (
    allowed_values,
    paths_of,
    request_with,
    worst_request,
)
from tools.lab.bench.attackers import ATTACKS, hoarding
from tools.lab.bench.frame import Row, percentile, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEASURES = ("grpc_service", "tools/lab/bench/attackers.py")

ROOT = Path(__file__).parents[3]
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "2.5"))
REPEATS = 3  # windows of each kind
SETTLE_S = 1.0
TOKENS = 400
FILL_REQUESTS, FILL_WORDS = 32, 1900  # a word is a token; the demo model's context is 2,048 tokens
SERVICES = (INFERENCE, MODELS, CONTROL)
ONE = ("127.0.0.1",)
TEN = tuple(f"127.0.1.{number}" for number in range(1, 11))
FOUR = tuple(f"127.0.0.{number}" for number in range(2, 6))
# This attack fills `--max-connections`, which is low here (`FLAGS`) to save the attacker's file
# descriptors. The victim connects before the attack.
FILLING = "connections held"
# The server's limits are for an address. So these attackers do not use 127.0.0.1, from which the
# victim and the health probes connect.
APART = (
    *("connections opened and closed", "long texts", "long prompts that are cut"),
    *("HTTP: connections opened and closed", "HTTP: streams begun and left"),
    *("HTTP: streams not read",),
)
# Its streams cost the victim their share of the steps until they are parked, as those of a client
# that reads would. What is measured begins then.
PARKING = "HTTP: streams not read"
SOURCES = {FILLING: (FOUR,), **dict.fromkeys(APART, (TEN[:1], TEN))}
FLAGS = {FILLING: ["--max-connections", "257", "--max-connections-per-address", "64"]}
HOARDED, HOARDED_EACH = "hoarded windows", 100  # streams of each of ten addresses
SPIN = "while True: pass"
P50_BAR, P99_BAR, RATE_BAR, MEMORY_BAR_MB = 1.5, 3.0, 0.7, 50.0
GAP_BAR_MS, HEALTH_BAR_S = 150.0, 0.5
PROBE_PAUSE_S, PROBE_LIMIT_S = 0.2, 5.0
NO_PROXY = [("grpc.enable_http_proxy", 0)]
# The largest field: the largest message less some bytes for the rest of the request.
MESSAGE_BYTES = 4 * 2**20 - 64
# Bar of the longest gap beside one message, in ms: 20, and Python's switch interval.
MESSAGE_GAP_BAR = 20.0 + 1e3 * sys.getswitchinterval()
AFTER_S = 0.3  # after the message's answer, gaps count for so long


@dataclass(frozen=True)
class Seen:
    """What the victim saw in one window: the gaps between its tokens in ms, its tokens per second,
    the errors that it met, the server's peak memory in MB, and the time of the slowest health probe
    in seconds, connecting included. A probe that fails counts as `PROBE_LIMIT_S`."""

    gaps: list[float]
    rate: float
    errors: int
    peak_mb: float
    health_s: float

    @property
    def p50(self) -> float:
        """The median gap."""
        return statistics.median(self.gaps)

    @property
    def p99(self) -> float:
        """The 99th percentile of the gaps, in ms."""
        return percentile(self.gaps, 0.99)


class Victim(threading.Thread):
    """A client that reads one stream after the other until ``is_stopping`` is set."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[float] = []
        self.errors = 0
        self.is_stopping = False
        self._address = address

    def run(self) -> None:
        """Read the streams, and record when each delta arrives."""
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


class Prober(threading.Thread):
    """Asks for the server's health, each time on a new connection, until ``is_stopping``."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.slowest_s = 0.0
        self.is_stopping = False
        self._address = address

    def run(self) -> None:
        """Probe, pause, and probe again."""
        options = [*NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
        while not self.is_stopping:
            began = time.monotonic()
            took_s = PROBE_LIMIT_S
            with (
                suppress(grpc.RpcError),
                grpc.insecure_channel(self._address, options=options) as channel,
            ):
                stub = health_pb2_grpc.HealthStub(channel)
                stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_LIMIT_S)
                took_s = time.monotonic() - began
            self.slowest_s = max(self.slowest_s, took_s)
            time.sleep(PROBE_PAUSE_S)


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process and its children: a server decodes images in one."""
    pids = [str(pid)]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += task.read_text().split()
    pages = 0
    for one in pids:
        with suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def watch(victim: Victim, address: str, pid: int) -> Seen:
    """Read streams for `SETTLE_S` and then `WINDOW_S` seconds, and return what was seen then."""
    prober = Prober(address)
    prober.start()
    time.sleep(SETTLE_S)
    prober.slowest_s = 0.0
    errors, begin = victim.errors, time.monotonic()
    peak = 0.0
    while (now := time.monotonic()) < begin + WINDOW_S:
        peak = max(peak, rss_mb(pid))
        time.sleep(0.05)
    prober.is_stopping = True
    prober.join(2 * PROBE_LIMIT_S)
    seen = [at for at in victim.arrivals if begin <= at <= now]
    gaps = [1e3 * (b - a) for a, b in zip([begin, *seen], [*seen, now], strict=True)]
    return Seen(gaps, len(seen) / (now - begin), victim.errors - errors, peak, prober.slowest_s)


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
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Run a server with the demo model; yield its address and process id."""
    argv = [sys.executable, "-m", "grpc_service", "serve", "--port", "0", "--host", "0.0.0.0"]
    argv += ["--insecure", "--model", "demo-stories", *flags]
    with running(*argv) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"Triolet is ready on \S+:(\d+) after", line):
                break
        else:
            raise SystemExit("the server did not start")
        yield f"127.0.0.1:{found[1]}", server.pid


def fill_batch(address: str) -> None:
    """Run `FILL_REQUESTS` requests at once, so that they fill the model's KV pool."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        stub = stubs.InferenceStub(channel)
        calls = [
            stub.Generate(
                pb.GenerateRequest(
                    text=f"{number} " + "red " * FILL_WORDS,
                    sampling={"max_tokens": 8, "ignore_eos": True},
                )
            )
            for number in range(FILL_REQUESTS)
        ]
        for call in calls:
            for _message in call:
                pass


def free_port() -> int:
    """Return a port that nothing has on any address, and that the system gives to no client:
    attackers open many connections."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("", port))
            return port


def attack(name: str, sources: tuple[str, ...]) -> tuple[list[Seen], list[Seen]]:
    """Return what the victim saw beside a process that spins and beside an attack, in turn."""
    beside_spin, beside_attack = [], []
    is_http, http_port = ATTACKS[name].is_http, free_port()
    door = ["--openai-port", str(http_port)] if is_http else []
    with serving(*FLAGS.get(name, []), *door) as (address, pid):
        fill_batch(address)
        victim = Victim(address)
        victim.start()
        host, port = address.split(":")
        port = str(http_port) if is_http else port
        argv = [sys.executable, "-m", "tools.lab.bench.attackers", name, host, port, *sources]
        for _ in range(REPEATS):
            with running(sys.executable, "-c", SPIN):
                beside_spin.append(watch(victim, address, pid))
            with running(*argv) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()
                if name == PARKING:
                    wait_for(lambda: totals(address).running <= 1)  # the victim's
                beside_attack.append(watch(victim, address, pid))
        victim.is_stopping = True
        victim.join(60)
    return beside_spin, beside_attack


def rows_of(name: str, sources: tuple[str, ...]) -> Iterator[Row]:
    """Yield an attack's rows."""
    beside_spin, beside_attack = attack(name, sources)
    where = f"{name}, {len(sources)} address{'es' if len(sources) > 1 else ''}"

    def against(figure: str, of: Callable[[Seen], float], bar: float, better: str) -> Row:
        spin, seen = ([of(one) for one in windows] for windows in (beside_spin, beside_attack))
        ratios = [mine / reference for mine, reference in zip(seen, spin, strict=True)]
        note = f"{statistics.median(spin):.3g} → {statistics.median(seen):.3g}"
        return row_of(f"{where}: {figure}", ratios, "×", bar=bar, better=better, note=note)

    yield against("p50", lambda one: one.p50, P50_BAR, "lower")
    yield against("p99", lambda one: one.p99, P99_BAR, "lower")
    yield against("tokens/s", lambda one: one.rate, RATE_BAR, "higher")
    grown = max(one.peak_mb for one in beside_attack) - beside_spin[0].peak_mb
    yield Row(f"{where}: memory at most", grown, "MB", MEMORY_BAR_MB, n=REPEATS)
    longest = max(max(one.gaps) for one in beside_attack)
    yield Row(f"{where}: longest gap", longest, "ms", GAP_BAR_MS, n=REPEATS)
    health = max(one.health_s for one in beside_attack)
    yield Row(f"{where}: slowest health probe", health, "s", HEALTH_BAR_S, n=REPEATS)
    failed = float(sum(one.errors for one in beside_attack))
    yield Row(f"{where}: victim's failed calls", failed, "calls", 0.0, n=REPEATS)


def messages_of(path: FieldPath) -> Iterator[tuple[str, bytes]]:
    """Yield the largest messages for a field: a word for the row's name, and the bytes."""
    yield "most", worst_request(path, MESSAGE_BYTES)
    yield "the loop's most", worst_request(path, SMALL_BYTES)
    if len(data := request_with(path, allowed_values(path)[1])) <= MESSAGE_BYTES:
        yield "allowed", data


def message_rows(chosen: re.Pattern[str]) -> Iterator[Row]:
    """Yield a row for each worst message: the victim's longest gap in ms."""
    paths = [one for service in SERVICES for one in paths_of(service) if chosen.search(str(one))]
    if not paths:
        return
    with serving() as (address, _), grpc.insecure_channel(address, options=NO_PROXY) as channel:
        fill_batch(address)
        victim = Victim(address)
        victim.start()
        time.sleep(SETTLE_S)
        for path in paths:
            call = channel.unary_stream(path.full_method)
            for word, data in messages_of(path):
                samples = [gap_beside(victim, call, data) for _ in range(REPEATS)]
                gaps, [code, *_] = zip(*samples, strict=True)
                name = f"{path}, {word} values ({len(data) >> 10} KiB)"
                yield row_of(f"{name}: gap", gaps, "ms", bar=MESSAGE_GAP_BAR, note=code)
        victim.is_stopping = True
        victim.join(60)


def gap_beside(victim: Victim, call: Callable[..., Any], data: bytes) -> tuple[float, str]:
    """Return the victim's longest gap beside one message, in ms, and the answer's code."""
    begin, code = time.monotonic(), "OK"
    try:
        for _message in call(data, timeout=30):
            break
    except grpc.RpcError as error:
        code = error.code().name
    time.sleep(AFTER_S)
    now = time.monotonic()
    seen = [at for at in list(victim.arrivals) if begin <= at <= now]
    return 1e3 * max(b - a for a, b in zip([begin, *seen], [*seen, now], strict=True)), code


def totals(address: str) -> pb.Totals:
    """Return the totals of the server's `Control.GetStats`."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        return stubs.ControlStub(channel).GetStats(pb.GetStatsRequest(), timeout=20).totals


def asked(address: str) -> int:
    """Return how many sequences run, wait or are parked at the server."""
    now = totals(address)
    return now.running + now.waiting + now.parked


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until ``is_true()`` is true, at most half a minute."""
    deadline = time.monotonic() + 30
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.1)


def hoarded_rows() -> Iterator[Row]:
    """Yield the rows of a thousand streams that wait for clients which lost their connections."""
    rates, held, waiting = [], [], 0
    for _ in range(REPEATS):
        with serving() as (address, pid):
            fill_batch(address)
            victim = Victim(address)
            victim.start()
            alone = watch(victim, address, pid)
            host, port = address.split(":")
            with hoarding((host, int(port)), TEN, HOARDED_EACH):
                wait_for(lambda: asked(address) >= 10 * HOARDED_EACH)
            wait_for(lambda: totals(address).detached >= 10 * HOARDED_EACH)
            time.sleep(2.0 - SETTLE_S)
            rates.append(watch(victim, address, pid).rate / alone.rate)
            now = totals(address)
            held.append(1 - now.free_blocks / now.total_blocks)
            waiting = now.detached
            victim.is_stopping = True
            victim.join(60)
    note = f"beside {waiting} streams, against alone"
    yield row_of(f"{HOARDED}: tokens/s", rates, "×", bar=0.9, better="higher", note=note)
    yield row_of(f"{HOARDED}: blocks held", held, "of all", bar=0.1, better="lower")


def run() -> list[Row]:
    """Return the bench's rows."""
    pattern = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    of_messages = message_rows(pattern)
    for row in of_messages:
        rows.append(row)
        print(f"{row.name}: {row.value:.1f} {row.unit} {row.note} {row.verdict}", flush=True)
    for name in ATTACKS:
        for sources in SOURCES.get(name, (ONE, TEN)):
            if pattern.search(name):
                rows += rows_of(name, sources)
                print(
                    "\n".join(
                        f"{row.name}: {row.value:.2f} {row.unit} {row.note}" for row in rows[-7:]
                    ),
                    flush=True,
                )
    if pattern.search(HOARDED):
        rows += hoarded_rows()
    return rows
