"""What the front adds: server CPU per message, against a plain grpc.aio handler.

The servers are processes that write the same message, made and serialised afresh, to every stream
once per tick; the readers are another process. Beside them stands the design's own price: the plain
handler fed as ours is, by a Trio thread and a worker's thread (D1, D3), with no engine in them.

A tick is a runner's sleep here and a timer there, long enough that neither falls behind: were one
to, its messages would hold several tokens and be fewer. That each message held one is checked by
its size. The figure is the processor time of the server's whole process (engine, planning and both
event loops included) per message read.
"""

from __future__ import annotations

import os
import time
from functools import partial

from tools.bench.frame import Row, repeat_in_turn, row_of
from tools.bench.wire import ENDLESS, Peer, peer

TICK_S = {1: 0.002, 16: 0.004, 128: 0.015, 512: 0.060}
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "3"))
BAR = 1.3
SIZE_TOLERANCE = 1.02


def measure(server: Peer, streams: int, sizes: list[float]) -> float:
    """µs of the server's CPU per message over one window; the mean size goes to ``sizes``."""
    with peer("readers", address=server.address, streams=streams, max_tokens=ENDLESS) as readers:
        time.sleep(0.2)
        messages, size = readers.ask()
        cpu = server.cpu_s()
        time.sleep(WINDOW_S)
        cpu = server.cpu_s() - cpu
        later_messages, later_size = readers.ask()
    count = later_messages - messages
    sizes.append((later_size - size) / count)
    return 1e6 * cpu / count


def compare(streams: int) -> list[Row]:
    """The rows of one number of streams."""
    tick = TICK_S[streams]
    runner = {"step_s": tick, "num_blocks": 512 + streams * 256, "max_model_len": ENDLESS + 200}
    engine = {"max_num_seqs": streams, "max_num_batched_tokens": max(2048, 2 * streams)}
    sizes: list[list[float]] = [[], [], []]
    with (
        peer("triolet", runner=runner, engine=engine) as ours,
        peer("worlds", step_s=tick) as worlds,
        peer("plain", step_s=tick) as plain,
    ):
        mine, bare, theirs = repeat_in_turn(
            [
                partial(measure, server, streams, seen)
                for server, seen in zip((ours, worlds, plain), sizes, strict=True)
            ]
        )
    growth = max(sizes[0]) / max(sizes[2])
    note = "" if growth < SIZE_TOLERANCE else f"messages held {growth:.2f} × the bytes"
    name = f"{streams} stream{'s' if streams > 1 else ''}"
    return [
        row_of(f"CPU per message, {name}", mine, "µs"),
        row_of(f"two worlds and no engine, {name}", bare, "µs"),
        row_of(f"plain grpc.aio, {name}", theirs, "µs"),
        row_of(f"against plain, {name}", _ratios(mine, theirs), "×", bar=BAR, note=note),
        row_of(f"two worlds against plain, {name}", _ratios(bare, theirs), "×"),
    ]


def _ratios(ones: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def run() -> list[Row]:
    return [row for streams in TICK_S for row in compare(streams)]
