"""What requests of all kinds share on the Trio thread: a cancel scope, a stream of events, one end.

Rule 1: every early end is one `RequestStream.cancel(reason)`; the first reason wins.
Rule 2: `RequestStream.close` is the end, whatever led to it: no event comes after it.
Rule 3: nothing here waits, except a reader and the request's task.
Rule 4: only a stream's own class assigns to its attributes.

Life: `Supervisor.submit` makes the stream → the request is prepared, and `RequestStream.run`
submits it to a replica → the replica's loop pushes the core's events into it → all choices have
ended, or an error, or a cancel → the stream is closed and ``error`` says how.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from engine import logs
from engine.core.common.credit import Credit
from engine.core.common.events import Admitted, Finished, ReaderDrained, Refused, Submit
from engine.core.common.phases import Phase
from engine.core.common.types import EndReason
from engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ReaderStalled,
    RequestAborted,
    RequestCancelled,
    ShuttingDown,
    StepFailed,
    TrioletError,
)
from engine.requests.bill import Bill, Rest, count
from engine.requests.quota import NOWHERE, Origin, QueuedTokens
from engine.requests.readers import IN_PEACE, NO_READER, ChannelReader, Latest, Leaving

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.common.events import OutputEvent
    from engine.core.common.types import RequestId, Timings
    from engine.replica.replica import Replica, TokensAhead
    from engine.requests.prepared import Prepared
    from engine.requests.readers import Reader

EventT = TypeVar("EventT")

log = logging.getLogger(__name__)

DEADLINE_MARGIN_S = 0.020  # D18: with 0.010 s, some clients got a reset instead of a status
DEADLINE_MARGIN_SHARE = 0.10  # the margin is at most this share of the timeout
# A reader on another thread frees message slots when it has taken 1 / RELEASE_SHARE of the buffer:
# waking the Trio thread for every token would cost more than the token.
RELEASE_SHARE = 4


def server_deadline(now: float, timeout_s: float | None) -> float:
    """Return when the server ends a request that has ``timeout_s`` seconds left.

    This is a little before the client's own timer, so that the status with the request's phase
    still reaches the client (D18).
    """
    if timeout_s is None:
        return math.inf
    return now + timeout_s - min(DEADLINE_MARGIN_S, DEADLINE_MARGIN_SHARE * max(0.0, timeout_s))


def num_asked(request: Any) -> int:
    """Return how many choices or images a request asks for; 1 for other kinds."""
    asked: int | None = getattr(request, "n", None)
    return asked or getattr(request, "num_images", None) or 1


@dataclass(frozen=True, slots=True)
class StreamOptions(Generic[EventT]):
    """The options with which a stream of any kind is made.

    ``core_id`` is the core's name for the request, ``buffer`` the number of messages that may wait
    for the reader. Events go to ``reader``; None opens a memory channel, which
    `RequestStream.receive` reads. ``origin`` is where the request comes from. The request arrived
    at ``arrived_at``, on Trio's clock (None: now), and its client's timer ends it ``timeout_s``
    seconds later; without a timer, the server ends it after ``longest_s`` seconds. ``on_end`` is
    called before the reader is notified of the end, and ``on_bill`` once the bill is complete.
    ``awaits_reader`` is as for `Bill`. ``on_loss`` is called when the reader's client has lost its
    connection; it returns whether the stream waits for that client.
    ``on_leave`` is called when the last reader has left. ``is_part``: the request is a part of
    another one, which alone is listed and counted.
    """

    request_id: str
    core_id: RequestId
    buffer: int
    reader: Reader[EventT] | None = None
    origin: Origin = NOWHERE
    arrived_at: float | None = None
    timeout_s: float | None = None
    longest_s: float | None = None
    on_end: Callable[[RequestStream[Any]], None] = lambda stream: None
    on_bill: Callable[[RequestStream[Any]], None] = lambda stream: None
    awaits_reader: bool = False
    on_loss: Callable[[Any], bool] = lambda stream: False
    on_leave: Callable[[Any], None] = lambda stream: None
    is_part: bool = False


class RequestStream(Generic[EventT]):
    """One request's life on the Trio thread, whatever its kind.

    ``credit`` counts the stream's message slots. ``credited`` are the classes of events that hold a
    slot; at most ``num_beside`` other events come. A reader on another thread frees slots when it
    has taken ``num_per_release`` credited events, or after a while.

    ``request`` is the client's request; a kind may drop fields that it needs no more. ``error`` is
    None for a request that succeeded; it is meaningful once ``is_closed`` is set. ``closed_at`` is
    when the stream was closed, on Trio's clock. ``queued`` counts the waiting prompt against the
    quota, if there is one. ``holder`` is that quota, and ``party`` is `Origin.party`; ``origin`` is
    where the request comes from.
    ``attach_token`` is what a client must show to take the stream up again; empty for a stream that
    no client can take up. ``seed`` is the seed of the request's draws; 0 if its kind draws nothing.
    ``wants_progress``: the client asked for events before its first token (`show`).
    ``bill`` is the request's, which asks for ``num_asked`` choices or images; one that is a part of
    another (``is_part``) asks for none of its own. ``num_made`` tokens,
    or other results, were made for the reader; ``result_types`` are the classes of the events that
    bring them. ``makes_tokens``: the results are tokens.
    ``operation`` is OpenTelemetry's name for what the request asks for. ``how_far`` is the format
    in which its error says how far the request came.
    """

    operation = ""
    attach_token = ""
    seed = 0
    wants_progress = False
    makes_tokens = False
    result_types: tuple[type, ...] = ()
    how_far = "after {0.tokens_done} tokens"

    def __init__(
        self,
        request: Any,
        options: StreamOptions[EventT],
        *,
        num_beside: int,
        credited: tuple[type, ...],
    ) -> None:
        self.request = request
        self.request_id = options.request_id
        self.core_id = options.core_id
        self.scope = trio.CancelScope()
        self.error: TrioletError | None = None
        self.is_closed = False
        self.phase = Phase.TOKENIZE
        self.tokens_done = self.num_made = 0
        self.started_at = trio.current_time()
        self.load_s = 0.0
        self.replica: Replica[Any, Any] | None = None
        self.prepared: Prepared[Any] | None = None  # set by the first `run`
        self.ahead: TokensAhead | None = None  # set when the request is submitted to a replica
        self.reason: EndReason | None = None
        self.client_deadline = math.inf  # when the client's own timer ends the call
        self.model = ""
        self.credited = credited
        self.credit = Credit(options.buffer)
        self.num_per_release = max(1, options.buffer // RELEASE_SHARE)
        self.origin = options.origin
        self.holder = options.origin.quota
        self.party = options.origin.party
        self.queued = QueuedTokens(options.origin.quota)
        self.is_part = options.is_part
        self.num_asked = 0 if self.is_part else num_asked(request)
        self.bill = Bill(options.on_bill, awaits_reader=options.awaits_reader)
        self._channel: ChannelReader[EventT] | None = None
        reader = options.reader
        if reader is None:
            reader = self._channel = ChannelReader(options.buffer + num_beside)
        # Each kind pushes its events here; it becomes `NO_READER` when the reader has left or
        # knows of the end.
        self._reader: Reader[EventT] = reader
        start = self.started_at if options.arrived_at is None else options.arrived_at
        longest_s = options.longest_s if options.timeout_s is None else options.timeout_s
        self.scope.deadline = server_deadline(start, longest_s)
        if options.timeout_s is not None:
            self.client_deadline = start + options.timeout_s
        self._on_end = options.on_end
        self._prompt_tokens = 0
        self._first_result_at: float | None = None
        self.closed_at: float | None = None
        self._cancelled_at = math.inf
        self._timings: Timings | None = None
        self._done = trio.Event()
        self._turn = trio.Event()  # set when the stream is closed, or has to change its replica
        self._is_begun = False  # Started was pushed to the reader
        self._latest: Latest | None = None  # for `show`

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.request_id} {self.phase.value} closed={self.is_closed}>"

    # ---- the request's task

    def enter(self, phase: Phase, model: str = "") -> None:
        """Set the phase of a request that is in no queue yet. With ``model``, a replica of that
        model is leased from now on."""
        self.phase = phase
        if model:
            self.load_s = trio.current_time() - self.started_at
            self.model = model

    async def run(self, prepared: Prepared[Any], replica: Replica[Any, Any]) -> None:
        """Run the prepared request at a replica, from its queue to the stream's end, or until the
        request has to run at another replica (`take_moving`).

        Raises:
            Overloaded: the replica's queue, or the quota, takes no more. Other errors as
                `EngineLoop.submit`, and as ``prepared.hold``.
        Cancellation: ends the request at the replica.
        """
        request, self.replica = prepared.request, replica
        if self.prepared is None:
            self._take(prepared)
        self.prepared = prepared
        if prepared.hold is not None:
            self.phase = Phase.COMPILE
        async with nullcontext() if prepared.hold is None else prepared.hold(replica):
            self.phase = Phase.QUEUED
            self.queued.add(request.num_tokens)
            replica.loop.submit(Submit(request, self.credit, self.bill.meter), self)
            self.bill.open(request.num_choices)
            try:
                with replica.busy_with(request.num_tokens_ahead) as self.ahead:
                    await self.wait_turn()
            finally:
                self.phase = replica.loop.phase_of(self.core_id) or self.phase
                forget = partial(replica.loop.forget, self.core_id)
                forget(Rest(self, forget) if self.bill.is_open else None)
                if self.error is not None or not self.is_closed:
                    reason = self.reason or EndReason.DEADLINE
                    since = min(self.scope.deadline, trio.current_time(), self._cancelled_at)
                    replica.loop.cancel(self.core_id, reason, self.phase, since)

    def _take(self, prepared: Any) -> None:
        """Keep the parts of ``prepared`` that the stream's events need."""

    async def wait_turn(self) -> None:
        """Wait for `close`, or until the replica has died and the request must run at another one.

        Cancellation: ends only the waiting.
        """
        await self._turn.wait()

    # ---- the reader's side

    async def receive(self) -> EventT:
        """Return the next event and free its message slot. For streams without a reader.

        Raises:
            trio.EndOfChannel: there are no more events; ``error`` says how the request ended.
        Cancellation: no event is lost.
        """
        assert self._channel is not None, "the events of this stream go to its reader"
        event = await self._channel.receive()
        if isinstance(event, self.credited):
            self.release(1)
        elif isinstance(event, Latest):
            event = event.take()
        return event

    def release(self, num_messages: int) -> None:
        """Free the message slots of ``num_messages`` events that the reader has taken."""
        if self.credit.release(num_messages):
            self.report_drained()

    def note_taken(self) -> None:
        """Take note that the reader has taken a message, which may be a part of an event."""

    def report_drained(self) -> None:
        """Let the core know that a stream which was starved has free slots again."""
        if self.replica is not None:
            self.replica.loop.post(ReaderDrained(self.core_id))

    def leave(self, reader: Reader[EventT], left_at: float, gone: Leaving = IN_PEACE) -> None:
        """Act on the leave of ``reader`` at ``left_at``, on Trio's clock."""
        if not self.is_closed:
            self.close_reader(left_at)
        self.bill.leave(self, gone.num_unread, gone.num_bytes)

    def close_reader(self, left_at: float | None = None) -> None:
        """End the request, if it has not ended, because its reader leaves; drop the events that
        wait for the reader.

        ``left_at`` is when the client ended the call, on Trio's clock. If that is close to the
        client's own deadline, the client's timer ended the call, and the request ends with DEADLINE
        (D18).
        """
        is_timer = left_at is not None and left_at >= self.client_deadline - DEADLINE_MARGIN_S
        self.cancel(EndReason.DEADLINE if is_timer else EndReason.CANCELLED)
        self._reader = NO_READER
        if self._channel is not None:
            self.bill.leave(self, count(self, self._channel.close()), 0)

    # ---- ending

    def cancel(self, reason: EndReason) -> None:
        """End the request now, for this reason, unless an earlier cancel has given one. Idempotent;
        allowed before the start, while the request runs, and after its end."""
        if self.reason is None and not self.is_closed:
            self.reason = reason
            self._cancelled_at = trio.current_time()
            self.scope.cancel(reason=reason.value)

    def close(self, error: TrioletError | None) -> None:
        """End the stream: no event follows. Idempotent; the first call decides ``error``."""
        if self.is_closed:
            return
        self.is_closed = True
        # The frames of a traceback hold this stream: a cycle that only the collector would free.
        self.error = error if error is None else error.with_traceback(None)
        self.closed_at = trio.current_time()
        self.queued.remove()
        self._on_end(self)
        self._done.set()
        self._turn.set()
        reader, self._reader = self._reader, NO_READER
        reader.end(self.error)
        self.bill.close(self)

    async def wait_closed(self) -> None:
        """Wait for `close`. Cancellation: ends only the waiting."""
        await self._done.wait()

    # ---- accounting

    def account(self, elapsed_s: float) -> dict[str, str | int | float]:
        """Return the fields for the log and the tracing: phase, tokens, seconds by phase.

        The seconds are those of the choice that finished last or, for a request that ended early,
        how long it waited for its first result and how long it went on. ``elapsed_s`` is the time
        since the request arrived. Any thread may call this once the stream's `Reader` has been
        notified of the end or has left.
        """
        fields: dict[str, str | int | float] = {"operation": self.operation}
        fields |= {"model": self.model, "phase": self.phase.value}
        fields |= {"prompt_tokens": self._prompt_tokens, "tokens_done": self.tokens_done}
        if self.error is not None:
            fields["reason"] = self.error.reason
        elif not self.is_closed:
            fields["reason"] = RequestCancelled.reason
        if self._timings is not None:
            return fields | asdict(self._timings)
        end = self.closed_at or self.started_at + elapsed_s
        first = end if self._first_result_at is None else min(self._first_result_at, end)
        return fields | {
            "load_s": self.load_s,
            "wait_s": max(0.0, first - self.started_at - self.load_s),
            "decode_s": end - first,
        }

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core about this request. Each kind adds its own results."""
        self.bill.take(event)
        if isinstance(event, Finished):
            extra = {"request_id": logs.printable(self.request_id)}  # whichever task logs it
            reason = event.reason.value
            log.debug("stop reason of choice %d: %s", event.choice, reason, extra=extra)
            if event.reason.is_success:
                # The core counts the wait for the model as time in the queue.
                queue_s = max(0.0, event.timings.queue_s - self.load_s)
                self._timings = replace(event.timings, queue_s=queue_s, load_s=self.load_s)
                self._finish(replace(event, timings=self._timings))
            else:
                self._end_early(event)
        elif isinstance(event, Admitted):
            self.phase = Phase.QUEUED
            self._prompt_tokens = event.prompt_tokens
            self._admit(event)
        elif isinstance(event, Refused):
            self.close(event.error)

    def _admit(self, event: Admitted) -> None:
        """Act on the admission to the queue, which comes again after a change of replica."""

    def _finish(self, event: Finished) -> None:
        """Act on a choice that ended by itself."""
        self.close(None)

    def show(self, progress: Any, reader: Reader[Any] | None = None) -> None:
        """Hand an event about the wait to the stream's reader, or to ``reader``. It replaces one
        that this reader has not taken, and holds no message slot."""
        reader = reader or self._reader
        if self._latest is None or self._latest.reader is not reader:
            self._latest = Latest(reader)
        self._latest.put(progress)

    def _note_result(self, phase: Phase, tokens_done: int) -> None:
        """Take note of a result, after which ``tokens_done`` tokens are done."""
        self.phase, self.tokens_done = phase, tokens_done
        if self._first_result_at is None:
            self._first_result_at = trio.current_time()
            self.queued.remove()

    def lose_replica(self, error: TrioletError, *, has_begun: bool) -> None:
        """Act on the death of the replica: join the queue of another one, or end with ``error``.

        Only a request that has not begun moves; it keeps the place of its arrival in the new queue.
        The events that its reader has are true of any replica.
        """
        self.bill.lose()
        self.credit.cancel(self.credit.reserved)  # the rows planned for it were not computed
        if has_begun or self.tokens_done or self._first_result_at is not None or self.is_closed:
            self.close(error)
            return
        self.queued.remove()
        self.replica = None
        self._turn.set()

    def take_moving(self) -> bool:
        """Return whether the request has to run again at another replica; True only once."""
        is_moving = self._turn.is_set() and not self.is_closed
        if is_moving:
            self._turn = trio.Event()
        return is_moving

    def _end_early(self, event: Finished) -> None:
        """End the stream because the core ended the request without success."""
        self.phase = event.phase or self.phase
        self.reason = self.reason or event.reason
        if event.violation is not None:  # a field of the request is to blame
            self.close(InvalidRequest([event.violation]))
        else:
            self.close(self.early_end(event.reason, event.detail))

    def early_end(self, reason: EndReason | None = None, detail: str = "") -> TrioletError:
        """Return the error for an end that is neither STOP nor LENGTH.

        Without ``reason``, it is the reason given to `cancel` or, if there is none, the deadline.
        """
        done = self.how_far.format(self)
        match reason or self.reason or EndReason.DEADLINE:
            case EndReason.DEADLINE:
                return DeadlineExceeded(
                    f"the deadline passed in phase {self.phase.value}, {done}",
                    phase=self.phase.value,
                    tokens_done=self.tokens_done,
                )
            case EndReason.ABORTED:
                return RequestAborted(f"the request was aborted by the operator {done}")
            case EndReason.STALLED:
                return ReaderStalled(f"the client stopped reading; the request ended {done}")
            case EndReason.SHUTDOWN:
                return ShuttingDown(f"the request was cut {done}", retry_after_s=5.0)
            case EndReason.FAILED:
                return StepFailed(f"the model failed on this request {done}", log_detail=detail)
        return RequestCancelled(f"the client cancelled the request {done}")
