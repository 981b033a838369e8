"""One request's life on the Trio thread: its scope, its stream, and its one end.

Rule 1: every early end is one `Lifetime.cancel(reason)`; the first reason wins (R204).
Rule 2: `close` is the end, whatever led to it: no event comes after it. Rule 3: nothing here
waits but a reader. Rule 4: what requests of all kinds share is `Lifetime`; `Generation` is a
Generate's, `engine.encoding.Encoding` an encoder's.

Life: made by `Supervisor.submit` → events arrive by the `on_…` methods (`engine.loop.Sink`) → all
choices ended, or an error, or a cancel → closed: its channel ends and ``error`` says how.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from engine import logs
from engine.apart import Apart
from engine.core.credit import Credit
from engine.core.events import Admitted, Finished, ReaderDrained, Refused, Tokens
from engine.core.types import EndReason, RequestId
from engine.errors import (
    DeadlineExceeded,
    EngineBug,
    InvalidRequest,
    ReaderStalled,
    RequestAborted,
    RequestCancelled,
    ShuttingDown,
    StepFailed,
    TrioletError,
)
from engine.requests import Started, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.answers import AnswerFormat
    from engine.core.encode_types import Encoded
    from engine.core.types import Timings, TokenLogprob
    from engine.quota import Quota
    from engine.replica import Replica
    from engine.requests import GenerateRequest

EventT = TypeVar("EventT")

log = logging.getLogger(__name__)
IS_DEBUGGED = partial(log.isEnabledFor, logging.DEBUG)  # asked per event: it costs 40 ns

DEADLINE_MARGIN_S = 0.020  # D18: measured, at 0.010 no client saw a bare reset
DEADLINE_MARGIN_SHARE = 0.10


def server_deadline(now: float, timeout_s: float | None) -> float:
    """When the server ends a request that has ``timeout_s`` left: a little before the client's
    own timer, so that the status with its phase arrives (D18)."""
    if timeout_s is None:
        return math.inf
    return now + timeout_s - min(DEADLINE_MARGIN_S, DEADLINE_MARGIN_SHARE * max(0.0, timeout_s))


class Lifetime(Generic[EventT]):
    """One request's life on the Trio thread.

    Its reader either waits in `receive`, or sets `on_ready` before the first event and then takes
    all there is by `take_ready`: `on_ready` is called when there is something again, or the end.
    Both are bounded by ``credit`` alike; the second way spares an event the memory channel, which
    costs as much as a third of its planning. `on_end` is called before anybody hears of the end.

    ``error`` is None for a request that succeeded; meaningful once ``is_closed``. ``credited`` are
    the kinds of events that hold a slot of the stream's credit; at most ``num_beside`` others come.
    What waits is counted against ``quota``, where there is one.
    """

    def __init__(
        self,
        request_id: str,
        core_id: RequestId,
        *,
        buffer: int,
        num_beside: int,
        credited: tuple[type, ...],
    ) -> None:
        self.request_id = request_id
        self.core_id = core_id
        self.scope = trio.CancelScope()
        self.error: TrioletError | None = None
        self.is_closed = False
        self.phase = "tokenize"
        self.tokens_done = 0
        self.started_at = trio.current_time()
        self.load_s = 0.0
        self.on_ready: Callable[[], None] | None = None
        self.on_end: Callable[[Any], None] | None = None
        self.replica: Replica | None = None
        self.reason: EndReason | None = None
        self.client_deadline = math.inf  # its own timer's; `scope` has the server's
        self.model = ""
        self.credited = credited
        self.quota: Quota | None = None
        self._queued_tokens = 0  # of the quota's
        self._prompt_tokens = 0
        self._first_result_at: float | None = None
        self._closed_at: float | None = None
        self._cancelled_at = math.inf
        self._timings: Timings | None = None
        self._done = trio.Event()
        self._turn = trio.Event()  # it is closed, or is to move
        self._ready: list[EventT] = []  # for `take_ready`
        self._has_left = False
        self._is_begun = False  # its reader has been told of the start
        self.credit = Credit(buffer)
        self._send, self._receive = trio.open_memory_channel[EventT](buffer + num_beside)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self.request_id} {self.phase} closed={self.is_closed}>"

    # ---- the reader's side

    async def receive(self) -> EventT:
        """The next event, its credit given back.

        Raises:
            trio.EndOfChannel: no more events; ``error`` tells how the request ended.
        Cancellation: safe, no event is lost.
        """
        event = await self._receive.receive()
        if isinstance(event, self.credited):
            self.release(1)
        return event

    def take_ready(self) -> list[EventT]:
        """Every event there is, without waiting and without giving credit back."""
        events, self._ready = self._ready, []
        return events

    def release(self, num_messages: int) -> None:
        """The reader is done with so many credited events: give their credit back."""
        if self.credit.release(num_messages) and self.replica is not None:
            self.replica.loop.post(ReaderDrained(self.core_id))

    def close_reader(self, left_at: float | None = None) -> None:
        """The reader leaves: what is buffered is dropped, the request ends if it has not.

        ``left_at``: when the client ended the call, on Trio's clock. Close to its own deadline that
        was its timer, and the request ends by its deadline (D18).
        """
        is_timer = left_at is not None and left_at >= self.client_deadline - DEADLINE_MARGIN_S
        self.cancel(EndReason.DEADLINE if is_timer else EndReason.CANCELLED)
        self._has_left = True
        self._ready = []
        self._receive.close()

    # ---- ending

    def cancel(self, reason: EndReason) -> None:
        """End the request now, for this reason unless it has one already. Idempotent; before
        the start, during and after the end alike (R3)."""
        if self.reason is None and not self.is_closed:
            self.reason = reason
            self._cancelled_at = trio.current_time()
            self.scope.cancel(reason=reason.value)

    @property
    def cancelled_at(self) -> float:
        """When it was ended early: by `cancel`, or by its deadline. On Trio's clock."""
        return min(self.scope.deadline, trio.current_time(), self._cancelled_at)

    def close(self, error: TrioletError | None) -> None:
        """The one end: no event comes after it, and waiting readers hear of it."""
        if self.is_closed:
            return
        self.is_closed = True
        # its frames know this: garbage that only a look for cycles would find
        self.error = error if error is None else error.with_traceback(None)
        self._closed_at = trio.current_time()
        self._unqueue()
        if self.on_end is not None:
            self.on_end(self)
        self._send.close()
        self._done.set()
        self._turn.set()
        if self.on_ready is not None:
            self.on_ready()

    async def wait_closed(self) -> None:
        """Wait for `close`."""
        await self._done.wait()

    async def wait_turn(self) -> None:
        """Wait for `close`, or until its replica has died and it is to move."""
        await self._turn.wait()

    # ---- what it has of its quota, and what is said of it

    def queue(self, num_tokens: int) -> None:
        """Its prompt waits, until its first result or its end.

        Raises:
            Overloaded: its quota allows no more (`Quota.queue`).
        """
        if self.quota is not None:
            self.quota.queue(num_tokens)
            self._queued_tokens = num_tokens

    def _unqueue(self) -> None:
        if self._queued_tokens and self.quota is not None:
            self.quota.unqueue(self._queued_tokens)
            self._queued_tokens = 0

    def _note_first_result(self) -> None:
        self._first_result_at = trio.current_time()
        self._unqueue()

    def account(self, elapsed_s: float) -> dict[str, str | int | float]:
        """Where it was, how many tokens it took and gave, and its phases in seconds: those of its
        choice that finished last or, of one that ended early, how long it waited for its first
        result and how long it went on. For any thread, once its reader has heard of its end or
        has left, ``elapsed_s`` after it came; in the latter case it may be about to close."""
        said: dict[str, str | int | float] = {"model": self.model, "phase": self.phase}
        said |= {"prompt_tokens": self._prompt_tokens, "tokens_done": self.tokens_done}
        if self.error is not None:
            said["reason"] = self.error.reason
        elif not self.is_closed:
            said["reason"] = RequestCancelled.reason
        if self._timings is not None:
            return said | asdict(self._timings)
        end = self._closed_at or self.started_at + elapsed_s
        first = end if self._first_result_at is None else min(self._first_result_at, end)
        return said | {
            "load_s": self.load_s,
            "wait_s": max(0.0, first - self.started_at - self.load_s),
            "decode_s": end - first,
        }

    def _debug(self, text: str, *values: object) -> None:
        """A line for the log about this request, on whatever task it happens (R157)."""
        log.debug(text, *values, extra={"request_id": logs.printable(self.request_id)})

    def _note_finish(self, event: Finished) -> Timings:
        """A choice has ended by itself; its timings with the load's."""
        self._debug("stop reason of choice %d: %s", event.choice, event.reason.value)
        queue_s = max(0.0, event.timings.queue_s - self.load_s)
        self._timings = replace(event.timings, queue_s=queue_s, load_s=self.load_s)
        return self._timings

    # ---- the loop's side, as far as it is alike for all kinds (`engine.loop.Sink`)

    def _push(self, event: EventT) -> None:
        if self.is_closed or self._has_left:
            return
        if IS_DEBUGGED():
            self._debug("pushed: %s", type(event).__name__.lower())
        if self.on_ready is None:
            self._send.send_nowait(event)
            return
        self._ready.append(event)
        if len(self._ready) == 1:
            self.on_ready()

    def on_tokens(self, event: Tokens) -> None:
        raise EngineBug(f"{self} was given tokens")

    def on_encoded(self, event: Encoded) -> None:
        raise EngineBug(f"{self} was given an encoded input")

    def on_refused(self, event: Refused) -> None:
        self.close(event.error)

    def on_lost(self, error: TrioletError, *, has_begun: bool) -> None:
        """Its replica has died. One that was in line only gets in line elsewhere, at its place by
        its arrival; its reader has heard of nothing that is not so there."""
        self.credit.cancel(self.credit.reserved)  # what was planned for it was not computed
        if has_begun or self.tokens_done or self._first_result_at is not None or self.is_closed:
            self.close(error)
            return
        self._unqueue()
        self.replica = None
        self._turn.set()

    def take_moving(self) -> bool:
        """Whether it is to run again, elsewhere; once."""
        is_moving = self._turn.is_set() and not self.is_closed
        if is_moving:
            self._turn = trio.Event()
        return is_moving

    def _end_early(self, event: Finished) -> None:
        """The core ended it, and not by success."""
        self._debug("stop reason of choice %d: %s", event.choice, event.reason.value)
        self.phase = event.phase or self.phase
        self.reason = self.reason or event.reason
        if event.violation is not None:  # of the request's own
            self.close(InvalidRequest([event.violation]))
        else:
            self.close(self._early_end(event.reason, event.detail))

    def _progress(self) -> str:
        """How far it came, for its error's sentence."""
        return f"after {self.tokens_done} tokens"

    def _early_end(self, reason: EndReason, detail: str = "") -> TrioletError:
        """The error a client gets for an end that is neither STOP nor LENGTH."""
        done = self._progress()
        match reason:
            case EndReason.DEADLINE:
                return DeadlineExceeded(
                    f"the deadline passed in phase {self.phase}, {done}",
                    phase=self.phase,
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

    def early_end(self) -> TrioletError:
        """The error for a scope that was cancelled: by `cancel`, or by its deadline."""
        return self._early_end(self.reason or EndReason.DEADLINE)


class Generation(Lifetime[StreamEvent]):
    """A Generate request's life: Started, Tokens, and one Finished for each choice."""

    def __init__(
        self, request: GenerateRequest, request_id: str, core_id: RequestId, buffer: int
    ) -> None:
        self.request = request
        self.echo_text: str | None = None
        self._num_choices = max(1, request.n or 1)  # it may be about to be refused for it
        self._num_finished = 0
        self._is_renamed = core_id != request_id
        self.dropped: tuple[int, ...] = ()  # which of a chat's messages were left out
        self._apart: tuple[Apart, ...] = ()  # for each choice, where its answer is told apart
        # Started, each choice's end and the rest before it come beside the credited messages
        super().__init__(
            request_id,
            core_id,
            buffer=buffer,
            num_beside=2 * self._num_choices + 1,
            credited=(Tokens,),
        )

    # ---- the loop's side

    def echo(self, text: str) -> None:
        """Send the prompt's text before each choice. Its messages take their slots now: once the
        request is submitted, the first step may have them all."""
        if self.echo_text is not None:
            return  # it moves, and has its slots
        if self.credit.try_reserve(self._num_choices):  # else the core refuses the request
            self.credit.fill(self._num_choices)
            self.echo_text = text

    def tell_apart(self, form: AnswerFormat) -> None:
        """Tell reasoning and tool calls from the text of each choice, from its first token on. The
        rest of one, at its end, has a slot of its own: it comes with no step."""
        if self._apart:
            return  # it moves, and has its slots
        names = range(self._num_choices)
        self._apart = tuple(Apart(form, f"{self.core_id}/{choice}") for choice in names)
        self.credit.widen(self._num_choices)

    def on_admitted(self, event: Admitted) -> None:
        self.phase = "queued"
        self._prompt_tokens = event.prompt_tokens
        if self.request.output.prompt_logprobs is None and not self._is_begun:
            self._begin(())

    def _begin(self, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        """The stream's first events: at admission, or with the first token where the prompt's
        log-probabilities are asked for."""
        self._is_begun = True
        chat = self.request.chat
        dropped = tuple([chat.messages[index] for index in self.dropped]) if chat else ()
        self._push(
            Started(self.request_id, self.model, self._prompt_tokens, prompt_logprobs, dropped)
        )
        if self.echo_text is not None:
            for choice in range(self._num_choices):
                self._push(Tokens(RequestId(self.request_id), choice, (), self.echo_text))

    def on_tokens(self, event: Tokens) -> None:
        self.phase = "decode"
        self.tokens_done += len(event.token_ids)
        if self._first_result_at is None:
            self._note_first_result()
        if not self._is_begun:
            self._begin(event.prompt_logprobs)
            event = event._replace(prompt_logprobs=())
        if self._is_renamed:
            event = tuple.__new__(Tokens, (self.request_id, *event[1:]))
        if self._apart:
            event = self._apart[event.choice].take(event)
        self._push(event)

    def on_finished(self, event: Finished) -> None:
        if event.reason.is_success:
            timings = self._note_finish(event)
            own_id = RequestId(self.request_id)
            if self._apart:
                rest = self._apart[event.choice].end(own_id, event.choice)
                if rest is not None:
                    self._push(rest)
            self._push(replace(event, request_id=own_id, timings=timings))
            self._num_finished += 1
            if self._num_finished == self._num_choices:
                self.close(None)
        else:
            self._end_early(event)
