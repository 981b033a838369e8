"""What the front adds: server CPU per message, against a plain grpc.aio handler.

Both servers are processes that write the same message, made and serialised afresh, to every
stream once per tick; the readers are a third process. A tick is a runner's sleep here and a timer
there, long enough that neither falls behind: were one to, its messages would hold several tokens
and be fewer. That each message held one is checked by its size. The figure is the processor time
of the server's whole process (engine, planning and both event loops included) per message read.
"""

from __future__ import annotations

import os
import time

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
    """The three rows of one number of streams."""
    runner = {
        "step_s": TICK_S[streams],
        "num_blocks": 512 + streams * 256,
        "max_model_len": ENDLESS + 200,
    }
    engine = {"max_num_seqs": streams, "max_num_batched_tokens": max(2048, 2 * streams)}
    sizes: tuple[list[float], list[float]] = ([], [])
    with (
        peer("triolet", runner=runner, engine=engine) as ours,
        peer("plain", step_s=TICK_S[streams]) as plain,
    ):
        mine, theirs = repeat_in_turn(
            [
                lambda: measure(ours, streams, sizes[0]),
                lambda: measure(plain, streams, sizes[1]),
            ]
        )
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    growth = max(sizes[0]) / max(sizes[1])
    note = "" if growth < SIZE_TOLERANCE else f"messages held {growth:.2f} × the bytes"
    name = f"{streams} stream{'s' if streams > 1 else ''}"
    return [
        row_of(f"CPU per message, {name}", mine, "µs"),
        row_of(f"plain grpc.aio, {name}", theirs, "µs"),
        row_of(f"against plain, {name}", ratios, "×", bar=BAR, note=note),
    ]


def run() -> list[Row]:
    return [row for streams in TICK_S for row in compare(streams)]
