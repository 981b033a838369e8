"""Measures what a client that floods a server from one address costs a client of another address,
over gRPC and over HTTP: the time of whole requests.

The flooding client is an attacker of the bench `abuse` (`tools.lab.bench.attackers`), with
`CONNECTIONS` connections from an address of its own. The other client sends short requests to the
same port, the next one as soon as it has its answer. Its times are compared with those beside a
process that only spins, which takes a core as the flood does; windows of both kinds alternate.

A flood of requests that the model answers is not one that a server can tell from honest use; its
rows have no bar. `BENCH_ONLY` is a regular expression that selects rows by name.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

import grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.lab.bench.abuse import NO_PROXY, SETTLE_S, SPIN, fill_batch, free_port, running, serving
from tools.lab.bench.frame import REPEATS, Row, percentile, row_of
from tools.lab.bench.wire_http import StreamClient, post

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURES = ("grpc_service", "tools/lab/bench/attackers.py")

WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "4"))
SOURCE, CONNECTIONS = "127.0.1.1", 8
TOKENS = 8
BAR = 3.0
VALID = "requests for a token"
FLOODS = ("connections opened and closed", VALID)
OF_DOOR = {
    "gRPC": ("unknown methods", "rapid reset (CVE-2023-44487)", *FLOODS),
    "HTTP": ("unknown paths", "garbage", "probes", "bodies of many values", *FLOODS),
}


class Client(Protocol):
    """A client of one door."""

    def ask(self) -> None:
        """Send a request, and read its answer."""


class GrpcClient:
    """A client of gRPC, with one connection."""

    def __init__(self, address: str) -> None:
        self._stub = stubs.InferenceStub(grpc.insecure_channel(address, options=NO_PROXY))
        self._request = pb.GenerateRequest(
            text="Once upon a time", sampling={"max_tokens": TOKENS, "ignore_eos": True}
        )

    def ask(self) -> None:
        """Send a request, and read its answer."""
        for _message in self._stub.Generate(self._request, timeout=30):
            pass


class HttpClient:
    """A client of OpenAI's API, with one connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = StreamClient(address)
        body = b'{"prompt": "Once upon a time", "max_tokens": %d, "ignore_eos": true,'
        self._request = post("/v1/completions", body % TOKENS + b' "stream": true}')

    def ask(self) -> None:
        """Send a request, and read its answer."""
        try:
            self._client.ask(self._request)
        except (OSError, RuntimeError):
            self._client = StreamClient(self._address)
            raise


class Victim(threading.Thread):
    """Sends requests one after the other until ``is_stopping``; ``times`` has when each began and
    ended, in seconds, ``num_failed`` counts those that failed."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self.times: list[tuple[float, float]] = []
        self.num_failed = 0
        self._began = 0.0
        self.is_stopping = False
        self._client = client

    def run(self) -> None:
        """Send the requests."""
        while not self.is_stopping:
            self._began = time.monotonic()
            try:
                self._client.ask()
            except (OSError, RuntimeError, grpc.RpcError):
                self.num_failed += 1
            self.times.append((self._began, time.monotonic()))

    def watch(self) -> list[float]:
        """Return the times of the requests that ran in a window, in ms; of the last one, until the
        window's end."""
        time.sleep(SETTLE_S)
        begin = time.monotonic()
        time.sleep(WINDOW_S)
        end, last = time.monotonic(), self._began
        seen = [one for one in list(self.times) if one[1] >= begin]
        return [1e3 * (ended - began) for began, ended in (*seen, (last, end)) if began <= end]


def rows_of(door: str, flood: str) -> Iterator[Row]:
    """Yield the rows of a flood."""
    attack = f"HTTP: {flood}" if door == "HTTP" else flood
    http_port = free_port()
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    with serving("--openai-port", str(http_port)) as (address, _):
        fill_batch(address)
        host, port = address.split(":")
        port = str(http_port) if door == "HTTP" else port
        client: Client = HttpClient(f"{host}:{port}") if door == "HTTP" else GrpcClient(address)
        victim = Victim(client)
        victim.start()
        argv = [sys.executable, "-m", "tools.lab.bench.attackers", attack, host, port]
        for _ in range(REPEATS):
            with running(sys.executable, "-c", SPIN):
                alone.append(victim.watch())
            with running(*argv, *[SOURCE] * CONNECTIONS) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()
                beside.append(victim.watch())
        victim.is_stopping = True
        victim.join(60)
    failed = float(victim.num_failed)
    yield Row(f"{door}, {flood}: failed requests", failed, "requests", 0.0, n=REPEATS)
    for figure, share, bar in (("p50", 0.5, None), ("p99", 0.99, BAR)):
        before, after = ([percentile(one, share) for one in kind] for kind in (alone, beside))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        note = f"{row_of('', before, 'ms').value:.3g} → {row_of('', after, 'ms').value:.3g} ms"
        limit = None if flood == VALID else bar
        yield row_of(f"{door}, {flood}: {figure}", ratios, "×", bar=limit, note=note)


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    for door, floods in OF_DOOR.items():
        for flood in floods:
            if wanted.search(f"{door}, {flood}"):
                yield from rows_of(door, flood)
