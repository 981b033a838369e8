"""Histograms and sums of the times and counts of replicas, filled by their loops.

Rule 1: everything here runs on the Trio thread and takes no lock; a reader takes a frozen copy
there. Rule 2: the loop calls once per step and once per delivery, not per token; that costs a
fraction of a microsecond per token (`python -m tools.lab.bench metrics`). Rule 3: no label comes
from a client: the labels are models, replicas, phases and ends. Rule 4: the values of every step
(its rows, its times, the intervals between tokens) are noted in lists and counted later, many
entries at once, because the histograms are not in the processor's caches between two steps. The
values of a request are counted at once.

`grpc_service.app.metrics` exports them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.core.common.events import Finished, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.core.common.events import OutputEvent, Submit
    from engine.core.common.phases import Phase
    from engine.core.common.types import DraftCounts, RequestId
    from engine.status import EngineStatistics

# Buckets' bounds, in s: tokens come every ms to every second, requests take ms to minutes.
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0),
)
FIRST_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
SHORT_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 10.0),
)
COUNT_BOUNDS = tuple(float(2**power) for power in range(18))

# How many entries a list may have before they are counted (rule 4); a guess: counting more at once
# would delay a step.
UNCOUNTED_MAX = 16


@dataclass(frozen=True, slots=True)
class Distribution:
    """A frozen copy of a histogram. ``counts`` has one entry per bound, which counts the values up
    to that bound and above the one before, and a last entry for the values above all bounds.
    ``total`` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


class Histogram:
    """Counts values by size. ``bounds`` are the upper ends of its buckets, ascending."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``times`` values of this size."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        """Return a frozen copy."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class _Live:
    """A live request: when it arrived, and when each of its choices last got a token."""

    __slots__ = ("arrived_at", "last", "num_open", "others")

    def __init__(self, arrived_at: float, num_choices: int) -> None:
        self.arrived_at = arrived_at
        self.num_open = num_choices
        self.last: float | None = None  # when choice 0 last got a token
        self.others: dict[int, float] = {}  # when every other choice last got a token


@dataclass(frozen=True, slots=True)
class TelemetrySnapshot:
    """One replica's distributions by name, the time from a request's cancel until its memory is
    free by phase, the number of requests by end, and the seconds that its loop has spent in each
    phase of its turns."""

    distributions: dict[str, Distribution]
    cancel_to_free: dict[str, Distribution]
    ends: dict[str, int]
    loop_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica's figures. ``telemetry`` is None if it is switched off. ``process_bytes`` is the
    resident memory of the worker's own process, None without one."""

    model: str
    replica: int
    telemetry: TelemetrySnapshot | None
    process_bytes: int | None = None
    plans_discarded: int = 0
    drafts: tuple[DraftCounts, ...] = ()  # one for each drafter


@dataclass(slots=True)
class AdapterCounts:
    """Counts of an adapter's requests since its name was first loaded."""

    running: int = 0  # requests that hold it now
    requests: int = 0
    tokens: int = 0  # the tokens of requests that have ended


@dataclass(frozen=True, slots=True)
class EngineTelemetry:
    """The whole engine's figures. ``models`` has for each model's name whether it serves.
    ``deadlines_missed`` are counted by phase. ``num_draining`` is how many requests a drain still
    waits for; 0 while the engine does not drain."""

    statistics: EngineStatistics
    replicas: tuple[ReplicaSnapshot, ...]
    models: dict[str, bool]
    deaths: dict[str, int]  # how many workers have died, by model
    degraded: dict[str, int]  # replicas that restart or hang, by model
    deadlines_missed: dict[str, int]
    num_draining: int
    adapters: dict[str, AdapterCounts] = field(default_factory=dict)  # by name


class ReplicaTelemetry:
    """The histograms of one replica, filled by its loop. All times are of Trio's clock.

    ``token_event`` is `ReplicaKind.token_event`. ``loop_s`` are the seconds that the loop has spent
    in each of the `PHASES` of its turns, which the loop itself adds to. The time in steps is not in
    it, but in the histogram ``step``.
    """

    PHASES: Sequence[str] = ("commands", "plan", "prepare", "deliver", "commit")

    def __init__(self, token_event: type[Any] | None) -> None:
        self._token_event = token_event
        self._live: dict[RequestId, _Live] = {}
        self._steps: list[tuple[int, float, float]] = []  # uncounted: rows, start, end
        self._intervals: list[tuple[float, int]] = []  # uncounted: seconds, how often
        self._step_ended_at: float | None = None  # end of the last counted step; None after idling
        self._cancelled: dict[RequestId, tuple[float, Phase]] = {}
        self._cancel_to_free: dict[Phase, Histogram] = {}
        self._ends: dict[str, int] = {}
        self.loop_s = dict.fromkeys(self.PHASES, 0.0)
        self.first_token = Histogram(FIRST_BOUNDS)
        self.inter_token = Histogram(TOKEN_BOUNDS)
        self.request = Histogram(REQUEST_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)
        self.prefill = Histogram(REQUEST_BOUNDS)
        self.decode = Histogram(REQUEST_BOUNDS)
        self.parked = Histogram(REQUEST_BOUNDS)
        self.prompt_tokens = Histogram(COUNT_BOUNDS)
        self.generation_tokens = Histogram(COUNT_BOUNDS)
        self.step = Histogram(TOKEN_BOUNDS)
        self.step_gap = Histogram(SHORT_BOUNDS)
        self.step_rows = Histogram(COUNT_BOUNDS)

    # ---- steps

    def step_ended(self, num_rows: int, started_at: float, now: float) -> None:
        """Note a step. If there was work since the step before, the time from that step's end to
        this one's start is a gap."""
        self._steps.append((num_rows, started_at, now))
        if len(self._steps) >= UNCOUNTED_MAX:
            self._count()

    def idles(self) -> None:
        """Note that there is no work, so that the time until the next step is no gap."""
        self._count()
        self._step_ended_at = None

    def _count(self) -> None:
        """Count the steps and intervals noted since the last call."""
        for num_rows, started_at, ended_at in self._steps:
            if self._step_ended_at is not None:
                self.step_gap.observe(started_at - self._step_ended_at)
            self._step_ended_at = ended_at
            self.step_rows.observe(num_rows)
            self.step.observe(ended_at - started_at)
        self._steps.clear()
        for seconds, times in self._intervals:
            self.inter_token.observe(seconds, times)
        self._intervals.clear()

    # ---- requests

    def submitted(self, event: Submit[Any]) -> None:
        """Note the arrival of a request."""
        request = event.request
        self._live[request.request_id] = _Live(request.arrival, request.num_choices)

    def delivered(self, events: Iterable[OutputEvent], now: float) -> None:
        """Note that events have gone out to their requests. Most tokens of a delivery follow a
        token of the same earlier step, so equal intervals are counted together."""
        live, last_step, num_alike = self._live, None, 0
        intervals, token_event = self._intervals, self._token_event
        event: Any
        for event in events:
            if event.__class__ is token_event:
                times = live.get(event.request_id)
                if times is None:
                    continue
                if event.choice:
                    before, times.others[event.choice] = times.others.get(event.choice), now
                else:
                    before, times.last = times.last, now
                if before == last_step and before is not None:
                    num_alike += 1
                elif before is None:
                    self.first_token.observe(now - times.arrived_at)
                else:
                    if num_alike and last_step is not None:
                        intervals.append((now - last_step, num_alike))
                    last_step, num_alike = before, 1
            elif event.__class__ is Finished:
                self._finished(event, now)
            elif event.__class__ is Refused:
                live.pop(event.request_id, None)
        if num_alike and last_step is not None:
            intervals.append((now - last_step, num_alike))
        if len(intervals) >= UNCOUNTED_MAX:
            self._count()

    def _finished(self, event: Finished, now: float) -> None:
        times = self._live.get(event.request_id)
        if times is None:
            return
        timings, usage = event.timings, event.usage
        self.generation_tokens.observe(usage.completion_tokens)
        if timings.parked_s:
            self.parked.observe(timings.parked_s)
        times.num_open -= 1
        if times.num_open:
            return
        del self._live[event.request_id]
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.queue.observe(timings.queue_s)
        self.prefill.observe(timings.prefill_s)
        self.decode.observe(timings.decode_s)
        self.request.observe(now - times.arrived_at)
        reason = event.reason.value
        self._ends[reason] = self._ends.get(reason, 0) + 1

    # ---- cancels

    def cancelled(self, request_id: RequestId, phase: Phase, now: float) -> None:
        """Note that a request ends early. Its client has been notified; its blocks and its place in
        a step are still to be freed."""
        self._cancelled[request_id] = (now, phase)

    def look_at_cancelled(self, holds: Callable[[RequestId], bool], now: float) -> None:
        """Count the cancelled requests whose resources are free by now. Called between two steps;
        ``holds`` returns whether a request still holds resources."""
        if not self._cancelled:
            return
        for request_id in [cancelled for cancelled in self._cancelled if not holds(cancelled)]:
            since, phase = self._cancelled.pop(request_id)
            histogram = self._cancel_to_free.get(phase)
            if histogram is None:
                histogram = self._cancel_to_free[phase] = Histogram(SHORT_BOUNDS)
            histogram.observe(now - since)

    # ---- reading

    NAMES: Sequence[str] = (
        *("first_token", "inter_token", "request", "queue", "prefill", "decode", "parked"),
        *("prompt_tokens", "generation_tokens", "step", "step_gap", "step_rows"),
    )

    def snapshot(self) -> TelemetrySnapshot:
        """Return a frozen copy of everything."""
        self._count()
        return TelemetrySnapshot(
            {name: getattr(self, name).snapshot() for name in self.NAMES},
            {phase.value: times.snapshot() for phase, times in self._cancel_to_free.items()},
            dict(self._ends),
            dict(self.loop_s),
        )
