"""The bill of one request: what it took, what it cost, and how much of the answer was taken.

Rule 1: a request has one bill, which becomes one `UsageRecord` once three things have ended, in
whatever order: its stream, its choices in the scheduler, and its reader. A cancelled request's
stream ends at once; the step in flight, which still computes it, is charged when it ends. Rule 2: a
token is delivered once its reader has taken it: when it was written to a socket or, in process,
handed to the program. Rule 3: nothing here waits, and nothing here keeps text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import trio

from engine import logs
from engine.core.common.events import Admitted, Finished, Refused
from engine.core.common.meter import Meter
from engine.requests.usage import UsageRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core.common.events import OutputEvent
    from engine.errors import TrioletError
    from engine.requests.stream import RequestStream


class Bill:
    """What one request's record is made of, until that is complete. Belongs to the Trio thread.

    ``meter`` counts the request's seconds of steps. ``on_complete`` is called once, with the
    request's stream. ``awaits_reader``: the reader calls `leave`, or its call does; otherwise it
    has taken everything by the stream's end. ``images`` are those of the request's input.
    """

    def __init__(
        self, on_complete: Callable[[RequestStream[Any]], None], *, awaits_reader: bool
    ) -> None:
        self.meter = Meter()
        self.images = 0
        self._on_complete = on_complete
        self._num_open = 0  # choices whose end the scheduler has not told
        self._is_closed = False
        self._has_left = not awaits_reader
        self._is_complete = False
        self._prompt_tokens = self._cached_tokens = self._reasoning_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._num_late = 0  # tokens that came when the stream took no more
        self._queue_s: float | None = None
        self._made_by_parts = 0
        self._delivered: int | None = None  # of what the stream has made; None: all
        self._sent_bytes = 0
        self._handed: int | None = None  # how much the stream had made when it was closed

    # ---- what ends

    def open(self, num_choices: int) -> None:
        """Take note that a scheduler has the request, and will end so many choices."""
        self._num_open = num_choices

    def open_part(self) -> None:
        """Take note of a request that is a part of this one."""
        self._num_open += 1

    def add_part(self, stream: RequestStream[Any], part: RequestStream[Any]) -> None:
        """Add what the complete bill of ``part`` says to this one, which is of ``stream``."""
        used = part.bill.record(part)
        self.meter.step_s += used.step_s
        self.images += used.images
        self._prompt_tokens += used.prompt_tokens
        self._cached_tokens += used.cached_tokens
        self._made_by_parts += used.results
        self._queue_s = used.queue_s if self._queue_s is None else self._queue_s
        self._num_open -= 1
        self.complete(stream)

    @property
    def is_open(self) -> bool:
        """Whether a scheduler has the request."""
        return self._num_open > 0

    def lose(self) -> None:
        """Take note that the request's scheduler has ended, and will tell nothing more."""
        self._num_open = 0

    def take(self, event: OutputEvent) -> None:
        """Count what an event of the scheduler says of the request's use."""
        if isinstance(event, Finished):
            usage, timings = event.usage, event.timings
            self._num_open -= 1
            self._cached_tokens = max(self._cached_tokens, usage.cached_tokens)
            self._reasoning_tokens += usage.reasoning_tokens
            self._drafted_tokens += usage.drafted_tokens
            self._accepted_tokens += usage.accepted_tokens
            self._queue_s = max(self._queue_s or 0.0, timings.queue_s)
        elif isinstance(event, Admitted):
            self._prompt_tokens = event.prompt_tokens
        elif isinstance(event, Refused):
            self._num_open = 0

    def close(self, stream: RequestStream[Any]) -> None:
        """Take note that the stream was closed."""
        self._is_closed = True
        self._handed = stream.num_made
        self.complete(stream)

    def leave(self, stream: RequestStream[Any], num_unread: int, num_bytes: int) -> None:
        """Take note that the last reader has left, and has not taken ``num_unread`` tokens or
        results that were handed to it. Its call has sent ``num_bytes``."""
        if not self._has_left:
            self._has_left = True
            self.pass_on(stream, num_unread, num_bytes)
            self.complete(stream)

    def pass_on(self, stream: RequestStream[Any], num_unread: int, num_bytes: int) -> None:
        """Take note that a reader has left, as `leave`, and that another one may follow."""
        self._delivered = self._num_handed(stream) - num_unread
        self._sent_bytes += num_bytes

    def _num_handed(self, stream: RequestStream[Any]) -> int:
        """Return how many tokens or results were handed to readers; none after the end."""
        return stream.num_made if self._handed is None else self._handed

    def give_up(self, stream: RequestStream[Any]) -> None:
        """Take note that no reader will come any more."""
        self._has_left = True
        self.complete(stream)

    def complete(self, stream: RequestStream[Any]) -> None:
        """Have the record made if everything has ended. Idempotent."""
        has_ended = self._is_closed and self._has_left and not self._num_open
        if has_ended and not self._is_complete:
            self._is_complete = True
            self._on_complete(stream)

    # ---- the record

    def record(self, stream: RequestStream[Any]) -> UsageRecord:
        """Return what the request has used so far. The model and the adapter are those that it has
        reached."""
        num_made = max(stream.num_made + self._num_late, self._made_by_parts)
        delivered = self._num_handed(stream) if self._delivered is None else self._delivered
        model = "" if stream.replica is None else stream.replica.model
        queue_s = self._queue_s
        if queue_s is None:
            queue_s = (stream.closed_at or trio.current_time()) - stream.started_at
        return UsageRecord(
            request_id=logs.printable(stream.request_id),  # a refused one may be any text
            holder=stream.origin.holder,
            model=model,
            adapter="" if model in ("", stream.model) else stream.model,
            operation=stream.operation,
            end="OK" if stream.error is None else stream.error.reason,
            ended_at=time.time(),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=num_made if stream.makes_tokens else 0,
            results=0 if stream.makes_tokens else num_made,
            undelivered=num_made - delivered,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            reasoning_tokens=self._reasoning_tokens,
            images=self.images,
            queue_s=max(0.0, queue_s - stream.load_s),
            step_s=self.meter.step_s,
            sent_bytes=self._sent_bytes,
        )

    def take_late(self, stream: RequestStream[Any], event: OutputEvent) -> None:
        """Count an event that came when the stream took no more."""
        self._num_late += count(stream, [event])
        self.take(event)


class Rest:
    """Takes the events of a request whose stream takes no more, until its scheduler has told the
    last end (`engine.replica.loop.EventStream`)."""

    def __init__(self, stream: RequestStream[Any], forget: Callable[[], None]) -> None:
        self._stream = stream
        self._forget = forget

    def push(self, event: OutputEvent) -> None:
        """Count an event."""
        self._stream.bill.take_late(self._stream, event)
        self._end_if_told()

    def lose_replica(self, error: TrioletError, *, has_begun: bool) -> None:
        """Take note that nothing more will come."""
        self._stream.bill.lose()
        self._end_if_told()

    def _end_if_told(self) -> None:
        if not self._stream.bill.is_open:
            self._forget()
            self._stream.bill.complete(self._stream)


def count(stream: RequestStream[Any], events: Iterable[Any]) -> int:
    """Return how many tokens, or results of another kind, these events of a stream bring."""
    results: list[Any] = [event for event in events if isinstance(event, stream.result_types)]
    if stream.makes_tokens:
        return sum([len(event.token_ids) for event in results])
    return len(results)
