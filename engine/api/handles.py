"""Handles for several requests of a Trio program: chats, encoders and cross-encoders.

    async with Chat(engine, system="You are brief.") as chat:
        async for event in chat.ask("Why is the sky blue?"):
            ...

Rule: `stop` and `close` only signal, `aclose` also waits for the end, and none ever depends on a
reader. The common part is `engine.api.handle.Handle`.

Life of a handle: it is made → it keeps each call from the call of its method until it has ended →
the handle is closed: running calls end, and every later call raises ShuttingDown.

`stop` ends all calls made before it, even if they have not begun, and no later calls. It has no
effect while no call runs or waits, and is not remembered. A call is made when the method is called:
``nursery.start_soon(encoder.embed, inputs)`` makes it at once.

A handle may be made on any thread; all its methods belong to the Trio thread.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from engine.api.arguments import require_list, sampling_of
from engine.api.handle import Handle
from engine.core.common.events import Finished
from engine.core.common.types import EndReason
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, RequestCancelled
from engine.requests.encode.values import Embedding, EmbedRequest, RerankRequest, Score
from engine.requests.text.chat_values import Chat as ChatMessages
from engine.requests.text.stream import TextStream
from engine.requests.text.truncation import without_messages
from engine.requests.text.values import AnswerTokens, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import Self

    from engine.api.engine import Engine, Stream
    from engine.errors import TrioletError
    from engine.requests.readers import Reader
    from engine.requests.text.values import SamplingParams, StreamEvent

    Inputs = Sequence[str | bytes]  # texts, and files of images

T = TypeVar("T")


class EmbedFunction(Protocol):
    """Returns one vector per text or image, in their order. Raises TrioletError if one is bad."""

    async def __call__(self, model: str, inputs: Inputs) -> Sequence[Sequence[float]]:
        """Return the vectors. Cancellation: must end the call."""


class RankFunction(Protocol):
    """Returns one score per document, in their order; higher is closer to the query."""

    async def __call__(self, model: str, query: str, documents: Sequence[str]) -> Sequence[float]:
        """Return the scores. Cancellation: must end the call."""


# ---- chat


class Chat(Handle):
    """A conversation with a text model: its system prompt, its messages so far, and at most one
    answer at a time.

    When the conversation leaves too little room for an answer, turns are left out for good: never
    the system prompt, and the first turn last (`engine.requests.text.truncation`).
    `Answer.dropped` and `Started` say which. The computed prefix that the new prompt shares with
    the turn before is reused; ``usage.cached_tokens`` is the number of tokens that this saved.

    The messages grow by question and answer when the answer has been read to its end. If the answer
    is stopped after some of it was read, they grow by the part that was read. An answer that
    failed, was stopped before any of its text was read, or was dropped, leaves no trace: its
    question can be asked again.
    """

    def __init__(
        self,
        engine: Engine,
        model: str = "",
        *,
        system: str = "",
        sampling: SamplingParams | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("chat")
        self._engine = engine
        self._model = model
        self._sampling = sampling_of(sampling)
        self._answer: weakref.ref[Answer] | None = None
        self._messages: list[Mapping[str, Any]] = []
        self.reset(system=system)

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation so far, the system prompt first; each message has role and content."""
        return tuple(dict(message) for message in self._messages)

    def ask(
        self,
        text: str,
        *,
        timeout_s: float | None = None,
        reader: Reader[StreamEvent] | None = None,
    ) -> Answer:
        """Ask for an answer, which begins at once, read or not. Never waits.

        With a ``reader``, the events go there and count as read; the answer is not iterated.

        Raises:
            ShuttingDown: The chat is closed. InvalidRequest: The answer before has neither been
                read to its end nor stopped; it continues.
        """
        self._require_open()
        before = self._current
        if before is not None and before.error is None:
            raise InvalidRequest.of(
                "text", "the answer before still runs: read it to its end, or stop it"
            )
        question = {"role": "user", "content": text}
        request = GenerateRequest(
            model=self._model,
            chat=ChatMessages((*self.messages, question), truncates=True),
            sampling=self._sampling,
            timeout_s=timeout_s,
        )
        relay = None if reader is None else _Relay(reader)
        stream = self._engine.submit(
            request, buffer=self._engine.config.in_process_buffer, reader=relay
        )
        assert isinstance(stream, TextStream)
        self._add(stream)
        answer = Answer(self, text, stream)
        if relay is not None:
            relay.answer = answer
        self._answer = weakref.ref(answer)
        return answer

    def stop(self) -> None:
        """End the running answer; the part that was read stays. Its iteration ends. Never waits."""
        super().stop()
        self._settle(self._current)

    def close(self) -> None:
        """End the running answer; the part that was read stays. Refuse new questions."""
        super().close()
        self._settle(self._current)

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation, and stop a running answer; the next answer starts from the
        system prompt, or from a new one. Never waits."""
        self.stop()
        if system is None:
            kept = [message for message in self._messages if message["role"] == "system"]
        else:
            kept = [{"role": "system", "content": system}] if system else []
        self._messages = kept

    @property
    def _current(self) -> Answer | None:
        """The unfinished answer, unless its reader has dropped it."""
        return None if self._answer is None else self._answer()

    def _settle(self, answer: Answer | None, *, is_whole: bool = False) -> None:
        """Make an answer that has ended part of the conversation, once. A whole answer becomes part
        of it even if it is empty, as the model's real answer."""
        if answer is None or self._current is not answer:
            return
        self._answer = None
        if answer.error is None and (answer.text or is_whole):
            self._messages = [
                *without_messages(self._messages, answer._stream.dropped),
                {"role": "user", "content": answer.question},
                {"role": "assistant", "content": answer.text},
            ]


class Answer:
    """The events of one answer, as those of an `engine.api.engine.Stream`, except that an answer
    that was stopped ends without an error. ``async with`` is optional; leaving its block stops the
    answer.

    ``text`` is the part of the answer that was read. ``reasoning`` is the text that the model
    marked as its reasoning; it does not become part of the conversation. An answer that is dropped
    ends, whichever thread collects it.
    """

    def __init__(self, chat: Chat, question: str, stream: TextStream) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stream = stream
        self.credited, self.num_per_release = stream.credited, stream.num_per_release  # `Source`
        self._chat = chat
        self.question = question
        self.text = ""
        self.reasoning = ""

    @property
    def dropped(self) -> tuple[Mapping[str, Any], ...]:
        """The messages that were left out of the conversation to make room, oldest first; known
        from the first event on."""
        stream = self._stream
        assert stream.request.chat is not None
        return tuple([stream.request.chat.messages[index] for index in stream.dropped])

    @property
    def request_id(self) -> str:
        """The id of the request that makes the answer."""
        return self._stream.request_id

    @property
    def error(self) -> TrioletError | None:
        """Why the answer failed; None also for an answer that runs, or was stopped."""
        error = self._stream.error
        return None if isinstance(error, RequestCancelled) else error

    @property
    def is_over(self) -> bool:
        """Whether the answer has been read to its end, or was stopped."""
        return self._chat._current is not self

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> StreamEvent:
        """Return the next event.

        Cancellation: no event is lost.
        """
        try:
            event = await self._stream.receive()
        except trio.EndOfChannel:
            self._chat._settle(self)
            if self.error is not None:
                raise self.error from None
            raise StopAsyncIteration from None
        if self.is_over:
            raise StopAsyncIteration
        self._note(event)
        return event

    async def read(self) -> str:
        """Read to the end, and return the whole text.

        Raises:
            TrioletError: the answer failed; ``text`` has the part that came before.
        Cancellation: the answer goes on and can be read on.
        """
        async for _event in self:
            pass
        return self.text

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """End the answer if it has not ended; the read part stays. Idempotent; never waits."""
        self._stream.cancel(reason)
        self._chat._settle(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # The garbage collector may call this on any thread, at any time, so it only signals.
        stream = self._stream
        if not stream.is_closed:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(stream.cancel, EndReason.CANCELLED)

    # ---- for a façade, whose reader gets the events (`engine.api.portal.Source`)

    def release(self, num_messages: int) -> None:
        """Give back the credit of ``num_messages`` events."""
        self._stream.release(num_messages)

    def _note(self, event: StreamEvent) -> None:
        """Note an event that was read."""
        if isinstance(event, Tokens):
            self.text += event.text
            if isinstance(event, AnswerTokens):
                self.reasoning += event.reasoning
        elif isinstance(event, Finished):  # a chat has one choice: nothing follows
            self._chat._settle(self, is_whole=True)


class _Relay:
    """Passes an answer's events on to the reader of a façade (`engine.api.aio`), and to the answer.

    ``answer`` is None only while the request is being submitted; if the request is refused, its
    stream ends meanwhile.
    """

    def __init__(self, reader: Reader[StreamEvent]) -> None:
        self._reader = reader
        self.answer: Answer | None = None

    def push(self, event: StreamEvent) -> None:
        """Pass an event on, unless the answer was stopped. It counts as read."""
        answer = self.answer
        if answer is not None and not answer.is_over:
            answer._note(event)
            self._reader.push(event)

    def end(self, error: TrioletError | None) -> None:
        """Pass the end on. If the answer was stopped, its end is not an error."""
        if self.answer is not None:
            self.answer._chat._settle(self.answer)
        self._reader.end(None if isinstance(error, RequestCancelled) else error)


# ---- encoders


async def _embed(engine: Engine, model: str, inputs: Inputs) -> Sequence[Sequence[float]]:
    """The engine's own `EmbedFunction`: one request, whose events are gathered."""
    stream = engine.embed(EmbedRequest(model=model, inputs=tuple(inputs)))
    return [event.values for event in await _gathered(stream, Embedding)]


async def _rank(
    engine: Engine, model: str, query: str, documents: Sequence[str]
) -> Sequence[float]:
    """The `RankFunction` of a ranker that was given none: it makes one Rerank request."""
    request = RerankRequest(model=model, query=query, documents=tuple(documents))
    return [event.score for event in await _gathered(engine.rerank(request), Score)]


async def _gathered(stream: Stream[Any], kind: type[T]) -> list[T]:
    """Return a stream's events of one class, by their index."""
    async with stream:
        events = [event async for event in stream if isinstance(event, kind)]
    return sorted(events, key=attrgetter("index"))


class Encoder(Handle):
    """Turns texts, and the bytes of images, into vectors; any number of calls at a time."""

    def __init__(
        self, engine: Engine, model: str = "", *, function: EmbedFunction | None = None
    ) -> None:
        super().__init__("encoder")
        self._model = model
        self._function = function or partial(_embed, engine)

    def embed(self, inputs: Inputs) -> Coroutine[Any, Any, tuple[tuple[float, ...], ...]]:
        """Return a coroutine for one vector per text or image, in their order.

        Raises:
            TrioletError: as `Engine.embed` and `Handle._call`. TypeError: ``inputs`` is no list.
        Cancellation: ends the call.
        """

        async def job() -> tuple[tuple[float, ...], ...]:
            return tuple([tuple(part) for part in await self._function(self._model, inputs)])

        require_list("inputs", inputs)
        return self._call(job)


class CrossEncoder(Handle):
    """Scores documents against a query; any number of calls at a time."""

    def __init__(
        self, engine: Engine, model: str = "", *, function: RankFunction | None = None
    ) -> None:
        super().__init__("cross-encoder")
        self._model = model
        self._function = function or partial(_rank, engine)

    def rank(self, query: str, documents: Sequence[str]) -> Coroutine[Any, Any, tuple[float, ...]]:
        """Return a coroutine for one score per document, in their order; higher is closer to the
        query.

        Raises:
            TrioletError: as `Engine.rerank` and `Handle._call`. TypeError: ``documents`` is a text.
        Cancellation: ends the call.
        """

        async def job() -> tuple[float, ...]:
            return tuple(await self._function(self._model, query, documents))

        require_list("documents", documents)
        return self._call(job)
