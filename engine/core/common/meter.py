"""What requests have cost: the seconds of steps, divided among the requests that they computed.

Rule 1: the parts of a step's seconds add up to the step's seconds. Rule 2: a step whose rows cost
alike is noted by its list of rows alone, and divided when the list changes or somebody has to read
a meter (`EqualSteps.settle`): of a thousand steps of the same decodes, each costs two comparisons
and an addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Meter:
    """What one request has cost so far. ``step_s`` are its parts of steps, in seconds. The
    scheduler writes it, and the request's bill reads it."""

    __slots__ = ("step_s",)

    def __init__(self) -> None:
        self.step_s = 0.0


def divide(seconds: float, meters: Iterable[Meter], costs: Sequence[float]) -> None:
    """Divide a step's ``seconds`` among the ``meters`` of its rows, by what each row costs."""
    total = sum(costs)
    for meter, cost in zip(meters, costs, strict=True):
        meter.step_s += seconds * cost / total


class EqualSteps:
    """The steps whose rows cost alike and whose seconds are not divided yet. A row has its request
    as ``live``, which has the `Meter`."""

    __slots__ = ("_num_rows", "_rows", "_seconds")

    def __init__(self) -> None:
        self._rows: Sequence[Any] = ()
        self._num_rows = 0
        self._seconds = 0.0

    def add(self, rows: Sequence[Any], seconds: float) -> None:
        """Note a step of ``rows``, a list that nobody changes afterwards."""
        if rows != self._rows:
            self.settle()
            self._rows, self._num_rows = rows, len(rows)
        self._seconds += seconds

    def settle(self) -> None:
        """Divide what was noted, so that every meter is right."""
        if self._rows:
            each = self._seconds / self._num_rows
            for row in self._rows:
                row.live.meter.step_s += each
            self._rows, self._num_rows, self._seconds = (), 0, 0.0
