"""Measures what the telemetry costs: the server with and without it, in turn, and its calls alone.

The first rows call the telemetry alone, as a replica's loop with 128 rows does; a busy machine
hardly disturbs these figures. The other rows are the figure of the bench `front` (the server's CPU
time per message, everything included) with the telemetry on and off in turn, and the difference of
each pair. With one stream a step gives one message, so that there the difference is the cost of a
step and its message.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from engine.core.common.events import Submit
from engine.core.common.types import RequestId
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.replica.telemetry import ReplicaTelemetry
from tools.lab.bench.frame import Row, repeat, repeat_in_turn, row_of
from tools.lab.bench.front import TICK_S, measure, settings
from tools.lab.bench.wire import peer

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("engine/replica", "grpc_service/rpc", "grpc_service/services", "grpc_service/app")

MESSAGE_BAR_US = 3.0
STEP_BAR_US = 50.0
ROWS = 128
STEPS = 2000


def compare(streams: int, name: str, bar: float) -> list[Row]:
    """Return the rows for ``streams`` streams with the telemetry on and off."""
    own = settings(streams, TICK_S[streams])
    without_it = own | {"engine": own["engine"] | {"telemetry": False}}
    sizes: list[float] = []
    with (
        peer("triolet", **own) as on,
        peer("triolet", **without_it) as off,
    ):
        with_it, without = repeat_in_turn(
            [partial(measure, server, streams, sizes) for server in (on, off)]
        )
    added = [one - other for one, other in zip(with_it, without, strict=True)]
    return [
        row_of(f"CPU per message, {streams} streams, with", with_it, "µs"),
        row_of(f"CPU per message, {streams} streams, without", without, "µs"),
        row_of(f"added per {name}", added, "µs", bar=bar),
    ]


def alone(num_rows: int) -> float:
    """Return the time in µs of the telemetry's calls for a step that gives ``num_rows`` choices
    one token each."""
    telemetry = ReplicaTelemetry(Tokens)
    for number in range(num_rows):
        name = RequestId(str(number))
        request = Request(name, (1,), Sampling(), Stops(max_tokens=1), arrival=0.0)
        telemetry.submitted(Submit(request, credit=None))  # type: ignore[arg-type]  # unused
    events = [Tokens(RequestId(str(number)), 0, (1,), "x") for number in range(num_rows)]
    holds: Callable[[RequestId], bool] = lambda _: True  # noqa: E731
    started = time.perf_counter()
    for step in range(STEPS):
        now = step * 0.02
        telemetry.look_at_cancelled(holds, now)
        telemetry.delivered(events, now)
        telemetry.step_ended(num_rows, now, now + 0.019)
        for phase in telemetry.PHASES:
            telemetry.loop_s[phase] += 1e-5
    return 1e6 * (time.perf_counter() - started) / STEPS


def run() -> list[Row]:
    """Return the bench's rows."""
    step, full = repeat(partial(alone, 1)), repeat(partial(alone, ROWS))
    per_row = [(many - one) / (ROWS - 1) for one, many in zip(step, full, strict=True)]
    return [
        row_of("a step of 1 row, by itself", step, "µs", bar=STEP_BAR_US),
        row_of("a further row, by itself", per_row, "µs", bar=MESSAGE_BAR_US),
        *compare(1, "step of one message", STEP_BAR_US),
        *compare(ROWS, f"message, {ROWS} a step", MESSAGE_BAR_US),
    ]
