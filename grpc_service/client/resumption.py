"""Decides how a Generate stream that broke goes on, and makes the requests; the client calls.

Rule: what a program sees of several streams is what it would have seen of one: one Started, every
Delta once, one Finished for each choice.

Source: the comment of `Continuation` in common.proto.
"""

from __future__ import annotations

import random
from collections import defaultdict
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from grpc_service.client import messages
from grpc_service.client.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from grpc_service.client.requests import request_of, wrong_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.client.errors import CallError
    from grpc_service.client.requests import Given

    OnBreak = Callable[[CallError, float], None]

RESUME_S = 60.0  # the default. Guess: a server's restart with a model of a few GB
FIRST_DELAY_S = 0.25  # before the first continuation. Guess: a proxy has another server by then
DELAY_MAX_S = 5.0  # between continuations: as a server that restarts advises


class NextCall(NamedTuple):
    """The next call of a broken stream: send ``request`` after ``delay_s``, with ``timeout``."""

    request: messages.GenerateRequest | messages.AttachRequest
    delay_s: float
    timeout: float | None


def method_of(request: Any) -> str:
    """Return the method to which a stream's request, the first or a later one, is sent."""
    return "attach" if isinstance(request, messages.AttachRequest) else "generate"


class Resumption:
    """Keeps the tokens of a Generate stream so far, and makes the requests that continue it.

    ``request`` is what to send first. ``timeout`` is the program's, for all streams together.
    ``resume_s`` is how long a stream may bring nothing new until its error is raised; 0 raises the
    first error. ``now`` is a clock; ``on_break`` is called with each error, and with the seconds
    until the next try.
    """

    def __init__(
        self,
        request: messages.GenerateRequest,
        *,
        timeout: float | None,
        resume_s: float,
        now: Callable[[], float],
        on_break: OnBreak | None = None,
    ) -> None:
        self.request = messages.GenerateRequest()
        self.request.CopyFrom(request)
        self._shows_ids = request.output.token_ids
        self._is_on = resume_s > 0
        if self._is_on:
            self.request.output.token_ids = True
        self._now = now
        self._resume_s = resume_s
        self._on_break = on_break
        self._deadline = None if timeout is None else now() + timeout
        self._seed: int | None = None
        self._attach_token = ""  # "" if the server keeps no stream to attach to
        self._is_attaching = False
        self._request_id = request.request_id
        self._choices: defaultdict[int, messages.ContinuedChoice]
        self._choices = defaultdict(messages.ContinuedChoice)
        for index, given in enumerate(request.continuation.choices):
            self._choices[index].CopyFrom(given)
        # By choice, the parts of a message whose last part has not come: the parts will come again
        # if the stream breaks now.
        self._begun: dict[int, messages.GenerateResponse] = {}
        self._has_grown = False  # a Delta or Finished has come, in any stream
        self._is_resumed = False  # this stream is not the first
        self._broken_at: float | None = None  # when the stream broke; None after a new event
        self._num_tries = 0

    @property
    def is_whole(self) -> bool:
        """Whether the end of every choice has come."""
        num_finished = sum([choice.finished for choice in self._choices.values()])
        return num_finished == max(1, self.request.n)

    def take(self, event: messages.GenerateResponse) -> messages.GenerateResponse | None:
        """Take note of an event, and return it as the program sees it; None if it has nothing for
        the program.

        Raises:
            Unimplemented: the server began a new stream instead of continuing this one.
        """
        if not self._is_on:
            return event
        if event.HasField("progress"):  # that of a second stream would begin anew
            return None if self._is_resumed else event
        if event.HasField("started"):
            return self._take_started(event)
        self._has_grown, self._broken_at, self._num_tries = True, None, 0
        if event.HasField("finished"):
            self._choices[event.finished.choice].finished = True
            return event
        return self._take_delta(event)

    def _take_delta(self, event: messages.GenerateResponse) -> messages.GenerateResponse | None:
        delta = event.delta
        if (begun := self._begun.pop(delta.choice, None)) is not None:
            begun.delta.text += delta.text
            begun.delta.reasoning += delta.reasoning
            for name in ("token_ids", "logprobs", "tool_calls"):
                getattr(begun.delta, name).extend(getattr(delta, name))
            event, delta = begun, begun.delta
        if not delta.token_ids:  # a part of a large message, whose last part has its tokens
            self._begun[delta.choice] = event
            return None
        self._choices[delta.choice].token_ids.extend(delta.token_ids)
        if self._shows_ids:
            return event
        del delta.token_ids[:]
        has_more = delta.text or delta.logprobs or delta.reasoning or delta.tool_calls
        return event if has_more else None

    def _take_started(self, event: messages.GenerateResponse) -> messages.GenerateResponse | None:
        started = event.started
        if not self._is_resumed:
            self._seed = started.seed if started.HasField("seed") else None
            self._attach_token, self._request_id = started.attach_token, started.request_id
            return event
        if started.seed != self._seed or not started.HasField("seed"):
            what = "the stream broke, and the server that answers now cannot go on with it"
            raise Unimplemented(grpc.StatusCode.UNIMPLEMENTED, what)
        self._attach_token, self._request_id = started.attach_token, started.request_id
        return None

    def next_call(self, error: CallError) -> NextCall | None:
        """Return the call that continues the stream after an error; None if the error is final."""
        # A server without Started.seed has no continuations: it would begin anew.
        if not self._is_on or self._seed is None or not self.is_resumable(error):
            return None
        if not self._has_grown and self.request.output.HasField("prompt_logprobs"):
            return None  # a part of Started, with some of the log probabilities, may have come
        now = self._now()
        if self._is_attaching and not isinstance(error, Unavailable):
            self._attach_token = ""  # the resume window has ended, or the server was restarted
        self._broken_at = now if self._broken_at is None else self._broken_at
        backoff = min(DELAY_MAX_S, FIRST_DELAY_S * 2**self._num_tries)
        delay_s = max(backoff, error.retry_after_s or 0.0) * random.uniform(1.0, 1.5)
        if isinstance(error, NotFound | InvalidArgument):
            delay_s = 0.0
        if now + delay_s > self._broken_at + self._resume_s:
            return None
        left = None if self._deadline is None else self._deadline - now - delay_s
        if left is not None and left <= 0:
            return None
        self._num_tries += 1
        self._is_resumed = True
        self._begun.clear()
        if self._on_break is not None:
            self._on_break(error, delay_s)
        self._is_attaching = bool(self._attach_token)
        request = self._attaching() if self._is_attaching else self._continuing()
        return NextCall(request, delay_s, left)

    def is_resumable(self, error: CallError) -> bool:
        """Return whether the stream may go on after this error. ALREADY_EXISTS counts, because the
        server may not have noticed that the first stream, which has the same request_id, is lost;
        and refusals that may be retried count, because all clients of a restarted server come at
        once."""
        if isinstance(error, Unavailable):
            return True
        if self._is_attaching and isinstance(error, NotFound | InvalidArgument):
            return True  # a continuation needs nothing that the server keeps
        return self._is_resumed and (isinstance(error, AlreadyExists) or error.is_retryable)

    def _attaching(self) -> messages.AttachRequest:
        request = messages.AttachRequest(
            request_id=self._request_id, attach_token=self._attach_token
        )
        for index in range(max(1, self.request.n)):
            own = self._choices[index]
            request.received.add(tokens=len(own.token_ids), finished=own.finished)
        return request

    def _continuing(self) -> messages.GenerateRequest:
        request = messages.GenerateRequest()
        request.CopyFrom(self.request)
        request.continuation.Clear()
        request.continuation.seed = self._seed or 0
        choices = [self._choices[index] for index in range(max(1, self.request.n))]
        request.continuation.choices.extend(choices)
        return request


def resumption_of(
    request: Given[messages.GenerateRequest] | str,
    timeout: float | None,
    resume_s: float,
    on_break: OnBreak | None,
) -> Resumption:
    """Return the `Resumption` for the arguments of a client's ``generate``.

    Raises:
        TypeError, ValueError: an argument has a wrong value; the error names it.
    """
    if on_break is not None and not callable(on_break):
        raise wrong_type("on_break", "a function", on_break)
    return Resumption(
        request_of("generate", messages.GenerateRequest, request),
        timeout=timeout,
        resume_s=resume_s,
        now=monotonic,
        on_break=on_break,
    )
