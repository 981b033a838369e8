"""Measures the server's CPU time per message, against a plain grpc.aio handler.

The servers are processes that write the same message, made and serialised anew, to every stream
once per tick. The readers are another process.

A tick is the fake runner's sleep in our server and a timer in the plain one. It is long enough that
neither server falls behind; otherwise its messages would hold several tokens and be fewer. The size
of the messages shows that each held one. The figure is the CPU time of the server's whole process
(engine, planning and event loop included) per message read.

The rows with TLS say so; the two servers have the same certificate.

The last row has no ticks: the engine steps as fast as it can, the writers fall behind, and several
tokens go out in one message. Its figure is per token.

`BENCH_ONLY` is a regular expression that selects cases by name, such as "16 streams" or "1 stream,
TLS". A case without TLS has the row without ticks, too.

Between ticks the processor's caches get cold: after the 2 ms of a tick, a message of a single
stream costs twice as much as without ticks. This cost changes within minutes on a shared machine:
six runs on Zen 3 had medians from 1.20 to 1.51 times the plain handler's for one stream. Because of
it, the engine notes a step's contributions to estimates and histograms in lists, its plans are
named tuples, and its loop reads the clock as seldom as it can.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import grpc
import trustme

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tools.lab.bench.frame import Row, repeat, repeat_in_turn, row_of
from tools.lab.bench.wire import ENDLESS, NO_PROXY, Peer, peer

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/rpc",
    "grpc_service/services",
)

TICK_S = {1: 0.002, 16: 0.004, 128: 0.015, 512: 0.060}
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "3"))
UNPACED_WINDOW_S = 0.5  # so short that no stream reaches its last token
BAR = 1.3
SIZE_TOLERANCE = 1.02


def measure(server: Peer, streams: int, sizes: list[float], ca: str = "") -> float:
    """Return the server's CPU time per message over one window, in µs. Append the messages' mean
    size to ``sizes``. ``ca`` is the file of the authority's certificate; "": no TLS."""
    asked = {"address": server.address, "streams": streams, "max_tokens": ENDLESS, "ca": ca}
    with peer("readers", **asked) as readers:
        time.sleep(0.2)
        messages, size = readers.ask()
        cpu = server.cpu_s()
        time.sleep(WINDOW_S)
        cpu = server.cpu_s() - cpu
        later_messages, later_size = readers.ask()
    count = later_messages - messages
    sizes.append((later_size - size) / count)
    return 1e6 * cpu / count


def measure_unpaced(
    server: Peer, per_message: list[float], kind: str = "readers", **asked: Any
) -> float:
    """Return the server's CPU time per token over one window without ticks, in µs. Append the
    mean number of tokens per message to ``per_message``. The readers are a peer of the ``kind``,
    which is ``asked`` for streams."""
    with (
        peer(kind, **asked) as readers,
        grpc.insecure_channel(server.address, options=NO_PROXY) as channel,
    ):
        stub = stubs.ControlStub(channel)

        def count() -> tuple[int, int]:
            totals = stub.GetStats(pb.GetStatsRequest()).totals
            return int(totals.completion_tokens_total), readers.ask()[0]

        tokens, messages = count()
        cpu = server.cpu_s()
        time.sleep(UNPACED_WINDOW_S)
        cpu = server.cpu_s() - cpu
        later_tokens, later_messages = count()
    per_message.append((later_tokens - tokens) / (later_messages - messages))
    return 1e6 * cpu / (later_tokens - tokens)


def settings(streams: int, tick: float) -> dict[str, Any]:
    """Return the settings of our server."""
    return {
        "runner": {
            "step_s": tick,
            "num_blocks": 512 + streams * 256,
            "max_model_len": ENDLESS + 200,
        },
        "engine": {"max_num_seqs": streams, "max_num_batched_tokens": max(2048, 2 * streams)},
    }


def unpaced(streams: int) -> Row:
    """Return the row without ticks for a number of streams."""
    per_message: list[float] = []
    with peer("triolet", **settings(streams, 0.0)) as ours:
        asked = {"address": ours.address, "streams": streams, "max_tokens": ENDLESS}
        times = repeat(partial(measure_unpaced, ours, per_message, **asked))
    note = f"{statistics.median(per_message):.1f} tokens a message"
    return row_of(f"CPU per token without ticks, {name_of(streams)}", times, "µs", note=note)


def name_of(streams: int, tls: dict[str, str] | None = None) -> str:
    """Return the number of streams in words, and whether they use TLS."""
    return f"{streams} stream{'s' if streams > 1 else ''}{', TLS' if tls else ''}"


@contextmanager
def certificates() -> Iterator[dict[str, str]]:
    """Yield the names of files: a server's certificate and key, and its authority's certificate."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    with TemporaryDirectory() as folder:
        names = {name: f"{folder}/{name}.pem" for name in ("cert", "key", "ca")}
        issued.cert_chain_pems[0].write_to_path(names["cert"])
        issued.private_key_pem.write_to_path(names["key"])
        authority.cert_pem.write_to_path(names["ca"])
        yield names


def compare(streams: int, tls: dict[str, str] | None = None) -> list[Row]:
    """Return the rows for a number of streams; with ``tls``, those of servers with TLS."""
    tick = TICK_S[streams]
    sizes: list[list[float]] = [[], []]
    more = {"tls": tls} if tls else {}
    ca = tls["ca"] if tls else ""
    with (
        peer("triolet", **settings(streams, tick), **more) as ours,
        peer("plain", step_s=tick, **more) as plain,
    ):
        mine, theirs = repeat_in_turn(
            [
                partial(measure, server, streams, seen, ca)
                for server, seen in zip((ours, plain), sizes, strict=True)
            ]
        )
    growth = max(sizes[0]) / max(sizes[1])
    note = "" if growth < SIZE_TOLERANCE else f"messages held {growth:.2f} × the bytes"
    name = name_of(streams, tls)
    return [
        row_of(f"CPU per message, {name}", mine, "µs"),
        row_of(f"plain grpc.aio, {name}", theirs, "µs"),
        row_of(f"against plain, {name}", _ratios(mine, theirs), "×", bar=BAR, note=note),
        *([] if tls else [unpaced(streams)]),
    ]


def _ratios(ones: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    with certificates() as tls:
        cases = [(streams, way) for streams in TICK_S for way in (None, tls)]
        return [row for case in cases if wanted.search(name_of(*case)) for row in compare(*case)]
