"""Handles: what a Trio program holds for longer than one request.

    async with Chat(engine, system="You are brief.") as chat:
        async for event in chat.ask("Why is the sky blue?"):
            ...

Rule 1: one `Guard` per handle knows what of it still runs, and whether it is closed; no handle has
a flag or an event of its own for either (R1, R4). Rule 2: `stop` and `close` only signal, from
whatever state; `aclose` also joins, and nothing ever waits for a reader (R10, R18, R19).
Rule 3: a call that fails is its caller's alone; the handle goes on (R22).

Life of a handle: made → calls, each known to the guard from the moment it is asked until it has
ended → closed: what runs is told to end, and every later call raises ShuttingDown.
What `stop` means: it ends what was asked before it, even if that has not begun, and nothing that
is asked after it. With nothing asked it does nothing, and is not remembered (R3). "Asked" is the
call of the method: what `nursery.start_soon(encoder.embed, texts)` was given is asked at once.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from engine.core.events import Finished, Tokens
from engine.core.types import EndReason
from engine.encode_requests import Embedding, EmbedRequest, RerankRequest, Score
from engine.errors import (
    InvalidRequest,
    RequestCancelled,
    ShuttingDown,
    StepFailed,
    TrioletError,
)
from engine.requests import AnswerTokens, GenerateRequest, SamplingParams
from engine.requests import Chat as ChatMessages
from engine.shift import without

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from engine.api import Engine
    from engine.generation import Generation
    from engine.requests import StreamEvent

T = TypeVar("T")

log = logging.getLogger(__name__)


class EmbedFunction(Protocol):
    """Embeds texts: one vector per text, in their order. Raises a TrioletError for a bad one."""

    async def __call__(self, model: str, texts: Sequence[str]) -> Sequence[Sequence[float]]: ...


class RankFunction(Protocol):
    """Scores documents against a query: one number each, in their order, higher is closer."""

    async def __call__(
        self, model: str, query: str, documents: Sequence[str]
    ) -> Sequence[float]: ...


# ---- the guard


class _Running(Protocol):
    """What a guard can end: a `Generation`, or a `_Call`."""

    def cancel(self, reason: EndReason) -> None: ...
    async def wait_closed(self) -> None: ...


class _Call:
    """One awaited call: the scope it runs in, and its end. ``ended`` is None until it begins."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended: trio.Event | None = None

    def cancel(self, reason: EndReason) -> None:
        self.scope.cancel(reason=reason.value)

    async def wait_closed(self) -> None:
        """Wait for its end. One that has been cancelled before it began, never will begin."""
        if self.ended is not None:
            await self.ended.wait()


class Guard:
    """Knows what of one handle runs, and whether the handle is closed.

    It keeps nothing alive: a generation belongs to the supervisor's record, a call to its caller's
    frame, and both are forgotten here when they are gone (R1, R23). All methods belong to the Trio
    thread. ``name`` is what errors call the handle.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_closed = False
        # ordered, so that a simulated run cancels in the same order every time
        self._running: weakref.WeakKeyDictionary[_Running, None] = weakref.WeakKeyDictionary()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def require_open(self) -> None:
        """Raise ShuttingDown if the handle is closed."""
        if self._is_closed:
            raise ShuttingDown(f"the {self._name} is closed")

    def add(self, running: _Running) -> None:
        """Know of something that runs, from now until it is gone.

        Raises:
            ShuttingDown: the handle is closed; nothing was added.
        """
        self.require_open()
        self._running[running] = None

    def call(self, job: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """``job()`` as one call of the handle, asked for now; awaiting what this returns runs it.

        Raises:
            ShuttingDown: the handle is closed, at once. The rest is raised when it is awaited:
            RequestCancelled: `stop` or `close` came first; ``job`` may not have been called.
            StepFailed: it raised something that is no TrioletError; that one was logged and is
                the cause. The handle is as open as before, after any of its own errors too.
        Cancellation: the job's.
        """
        call = _Call()
        self.add(call)
        return self._run(call, job)

    async def _run(self, call: _Call, job: Callable[[], Awaitable[T]]) -> T:
        if not call.scope.cancel_called:
            call.ended = trio.Event()
            try:
                with call.scope:
                    return await job()
            except TrioletError:
                raise
            except Exception as error:
                log.exception("a call of the %s failed", self._name)
                raise StepFailed(
                    f"the model failed on this call of the {self._name}", log_detail=repr(error)
                ) from error
            finally:
                call.ended.set()
                self._running.pop(call, None)  # an error's traceback may hold it for long
        raise RequestCancelled(f"the call was stopped by its {self._name}")

    def stop(self) -> None:
        """End everything that was asked for before now. Idempotent; never waits."""
        for running in list(self._running):
            running.cancel(EndReason.CANCELLED)

    def close(self) -> None:
        """Refuse new calls, and `stop`. Idempotent; never waits."""
        self._is_closed = True
        self.stop()

    async def wait_ended(self) -> None:
        """Wait until everything that runs has ended. After `close` that is as long as a call
        needs to hear of it, whoever reads or not.

        Cancellation: only the waiting ends.
        """
        for running in list(self._running):
            await running.wait_closed()


class Handle:
    """What all handles share. As a context manager it is closed and joined at the block's end."""

    def __init__(self, name: str) -> None:
        self._guard = Guard(name)

    @property
    def is_closed(self) -> bool:
        return self._guard.is_closed

    def stop(self) -> None:
        """End what was asked for before now (`Guard.stop`); the handle stays open."""
        self._guard.stop()

    def close(self) -> None:
        """End what runs and refuse what comes (`Guard.close`)."""
        self._guard.close()

    async def aclose(self) -> None:
        """`close`, and wait until everything has ended.

        Cancellation: only the waiting ends; what runs has been told to end.
        """
        self.close()
        await self._guard.wait_ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


# ---- chat


class Chat(Handle):
    """A conversation with a text model: its system prompt, its messages so far, and at most one
    answer at a time.

    When it leaves too little room for an answer, turns are left out for good: never the system
    prompt, and the first turn last (`engine.shift`). The answer tells which (`Answer.dropped`), and
    so does its `Started`. All that was computed for the turn before is reused, as far as it begins
    alike: ``usage.cached_tokens`` tells.

    The messages grow by question and answer when the answer has been read to its end, or is
    stopped after some of it was read: then by what was read. An answer that failed, was stopped
    before any of its text was read, or was dropped, leaves no trace: its question can be asked
    again.
    """

    def __init__(
        self,
        engine: Engine,
        model: str = "",
        *,
        system: str = "",
        sampling: SamplingParams | None = None,
    ) -> None:
        super().__init__("chat")
        self._engine = engine
        self._model = model
        self._sampling = sampling or SamplingParams()
        self._asked: weakref.ref[Answer] | None = None
        self._messages: list[Mapping[str, Any]] = []
        self.reset(system=system)

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation so far, the system prompt first: role and content each."""
        return tuple(dict(message) for message in self._messages)

    def ask(self, text: str, *, timeout_s: float | None = None) -> Answer:
        """Ask for an answer; it begins at once, read or not. Never waits.

        Raises:
            ShuttingDown: the chat is closed.
            InvalidRequest: the answer before has not been read to its end, or stopped; it goes
                on.
        """
        self._guard.require_open()
        before = self._current
        if before is not None and before.error is None:
            raise InvalidRequest.of(
                "text", "the answer before still runs: read it to its end, or stop it"
            )
        question = {"role": "user", "content": text}
        request = GenerateRequest(
            model=self._model,
            chat=ChatMessages((*self.messages, question), shifts=True),
            sampling=self._sampling,
            timeout_s=timeout_s,
        )
        generation = self._engine.submit(request, buffer=self._engine.config.in_process_buffer)
        self._guard.add(generation)
        answer = Answer(self, text, generation)
        self._asked = weakref.ref(answer)
        return answer

    def stop(self) -> None:
        """End the answer that runs, with what was read of it. Its iteration ends. Never waits."""
        super().stop()
        self._settle(self._current)

    def close(self) -> None:
        super().close()
        self._settle(self._current)

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation, and stop an answer that runs; the next starts from the system
        prompt, or from a new one. Never waits."""
        self.stop()
        if system is None:
            kept = [message for message in self._messages if message["role"] == "system"]
        else:
            kept = [{"role": "system", "content": system}] if system else []
        self._messages = kept

    @property
    def _current(self) -> Answer | None:
        """The answer that is not over, if its reader still has it."""
        return None if self._asked is None else self._asked()

    def _settle(self, answer: Answer | None, *, is_whole: bool = False) -> None:
        """An answer is over; the first time, it becomes part of the conversation. A whole one does
        though it be empty: it was the model's."""
        if answer is None or self._current is not answer:
            return
        self._asked = None
        if answer.error is None and (answer.text or is_whole):
            self._messages = [
                *without(self._messages, answer._generation.dropped),
                {"role": "user", "content": answer.question},
                {"role": "assistant", "content": answer.text},
            ]


class Answer:
    """The events of one answer: as an `engine.api.Stream`, but one that was stopped simply ends.
    Leaving its block, if it has one, stops it.

    ``text`` is what was read of it, ``reasoning`` what the model put apart before that, which does
    not become part of the conversation. One that is dropped is ended wherever it is collected.
    """

    def __init__(self, chat: Chat, question: str, generation: Generation) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._generation = generation
        self._chat = chat
        self.question = question
        self.text = ""
        self.reasoning = ""

    @property
    def dropped(self) -> tuple[Mapping[str, Any], ...]:
        """The messages that were left out of the conversation to make room, oldest first; known
        from the first event on."""
        generation = self._generation
        assert generation.request.chat is not None
        return tuple([generation.request.chat.messages[index] for index in generation.dropped])

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    @property
    def error(self) -> TrioletError | None:
        """What it failed of; None as well for one that runs, or was stopped."""
        error = self._generation.error
        return None if isinstance(error, RequestCancelled) else error

    @property
    def is_over(self) -> bool:
        """It has been read to its end, or was stopped."""
        return self._chat._current is not self

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> StreamEvent:
        try:
            event = await self._generation.receive()
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
        """Read to the end; the whole text.

        Raises:
            TrioletError: what it failed of; ``text`` has what came before.
        Cancellation: the answer goes on and can be read on.
        """
        async for _event in self:
            pass
        return self.text

    def close_reader(self) -> None:
        """The reader leaves: the answer ends if it has not. Idempotent; never waits."""
        self._generation.cancel(EndReason.CANCELLED)
        self._chat._settle(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close_reader()

    def __del__(self) -> None:
        # Wherever it is collected, on any thread and at any time: so nothing but a signal.
        generation = self._generation
        if not generation.is_closed:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(generation.cancel, EndReason.CANCELLED)

    # ---- for a reader on another thread, as `Generation` offers it

    @property
    def is_closed(self) -> bool:
        return self._generation.is_closed

    @property
    def on_ready(self) -> Callable[[], None] | None:
        return self._generation.on_ready

    @on_ready.setter
    def on_ready(self, call: Callable[[], None] | None) -> None:
        self._generation.on_ready = call

    def take_ready(self) -> list[StreamEvent]:
        """As `Generation.take_ready`; what is taken counts as read."""
        events = [] if self.is_over else self._generation.take_ready()
        for event in events:
            self._note(event)
        if self._generation.is_closed:
            self._chat._settle(self)
        return events

    def release(self, num_messages: int) -> None:
        self._generation.release(num_messages)

    def _note(self, event: StreamEvent) -> None:
        if isinstance(event, Tokens):
            self.text += event.text
            if isinstance(event, AnswerTokens):
                self.reasoning += event.reasoning
        elif isinstance(event, Finished):  # the one choice's: nothing comes after it
            self._chat._settle(self, is_whole=True)


# ---- encoders


class _Embedder:
    """The engine's own `EmbedFunction`: one request, gathered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, model: str, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        made: dict[int, Sequence[float]] = {}
        async with self._engine.embed(EmbedRequest(model=model, inputs=tuple(texts))) as stream:
            async for event in stream:
                if isinstance(event, Embedding):
                    made[event.index] = event.values
        return [made[index] for index in range(len(texts))]


class _Ranker:
    """The engine's own `RankFunction`: one request, gathered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, model: str, query: str, documents: Sequence[str]) -> Sequence[float]:
        made: dict[int, float] = {}
        request = RerankRequest(model=model, query=query, documents=tuple(documents))
        async with self._engine.rerank(request) as stream:
            async for event in stream:
                if isinstance(event, Score):
                    made[event.index] = event.score
        return [made[index] for index in range(len(documents))]


class Encoder(Handle):
    """Turns texts into vectors; any number of calls at a time."""

    def __init__(
        self, engine: Engine, model: str = "", *, function: EmbedFunction | None = None
    ) -> None:
        super().__init__("encoder")
        self._model = model
        self._function = function or _Embedder(engine)

    def embed(self, texts: Sequence[str]) -> Coroutine[Any, Any, tuple[tuple[float, ...], ...]]:
        """Await one vector per text, in their order.

        Raises:
            TrioletError: as `Engine.embed` has it. And as `Guard.call`.
        Cancellation: ends the call.
        """

        async def job() -> tuple[tuple[float, ...], ...]:
            return tuple([tuple(one) for one in await self._function(self._model, texts)])

        return self._guard.call(job)


class CrossEncoder(Handle):
    """Scores documents against a query; any number of calls at a time."""

    def __init__(
        self, engine: Engine, model: str = "", *, function: RankFunction | None = None
    ) -> None:
        super().__init__("cross-encoder")
        self._model = model
        self._function = function or _Ranker(engine)

    def rank(self, query: str, documents: Sequence[str]) -> Coroutine[Any, Any, tuple[float, ...]]:
        """Await one score per document, in their order; higher is closer to the query.

        Raises:
            TrioletError: as `Engine.rerank` has it. And as `Guard.call`.
        Cancellation: ends the call.
        """

        async def job() -> tuple[float, ...]:
            return tuple(await self._function(self._model, query, documents))

        return self._guard.call(job)
