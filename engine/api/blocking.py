"""The engine for programs that block: scripts, notebooks, threads.

    with engine.blocking.open_engine(config) as eng:
        for event in eng.generate(request):
            ...

Rule 1: what the engine gives comes through a `queue.SimpleQueue`, which waits without the GIL and
wakes for signals. Rule 2: `engine.api.portal` has the engine's thread and the rules for it;
this file only waits.
This file is long because half of it is the surface of `engine.api.engine` and `engine.api.handles`
once more, without ``async``.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.api import engine as api
from engine.api import handles, portal
from engine.api.asked import (
    completion_request,
    draw_request,
    embed_request,
    generate_request,
    rerank_request,
)
from engine.api.portal import End, Feed, Portal
from engine.config import engine_config
from engine.core.text.types import Tokens
from engine.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from engine.config import EngineConfig, ModelConfig
    from engine.core.common.events import PauseMode
    from engine.core.common.types import Explanation
    from engine.pool.loader import RunnerFactory
    from engine.requests.chat_values import Chat as ChatMessages
    from engine.requests.draw_values import DrawEvent, DrawRequest
    from engine.requests.encode_values import EmbedEvent, EmbedRequest, RerankEvent, RerankRequest
    from engine.requests.kind import ClientRequest
    from engine.requests.text_values import GenerateRequest, SamplingParams, StreamEvent
    from engine.status import AbortOutcome, EngineStatistics, ModelStatus
    from engine.worker.interface import TokenSpan

T = TypeVar("T")
EventT = TypeVar("EventT")


# ---- waiting for the engine


class _Reply(portal.Reply[T]):
    """An answer for a thread that blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._box: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def _put(self, take: Callable[[], T]) -> None:
        self._box.put(take)

    def wait(self) -> Callable[[], T]:
        """Wait for the answer, without the GIL. Return a function that returns or raises it."""
        return self._box.get()


class _Caller:
    """Asks the engine on behalf of threads that wait for its answers."""

    def __init__(self, portal: Portal) -> None:
        self.portal = portal

    def ask(self, question: Callable[[api.Engine], T]) -> T:
        """Return the result of a function that does not wait, called on the engine's thread."""
        self.require_waiting_allowed()
        reply: _Reply[T] = _Reply()
        with _raised_here():
            self.portal.ask(question, reply)
            return self._wait(reply)

    def call(self, job: Callable[[api.Engine], Awaitable[T]]) -> T:
        """Return the result of an async function, awaited on the engine's thread. A
        KeyboardInterrupt in this thread cancels it."""
        self.require_waiting_allowed()
        reply: _Reply[T] = _Reply()
        with _raised_here():
            self.portal.call(job, reply)
            return self._wait(reply)

    def _wait(self, reply: _Reply[T]) -> T:
        try:
            take = reply.wait()
        except BaseException:  # Ctrl-C
            self.portal.abandon(reply)
            raise
        return take()

    def require_waiting_allowed(self) -> None:
        """Check that this thread may wait for the engine.

        Raises:
            RuntimeError: this is the engine's thread. ShuttingDown: the engine's thread is not in
                this process, which was forked.
        """
        self.portal.require_own_process()
        if threading.current_thread() is self.portal.thread:
            raise RuntimeError("this call blocks, and was made on the engine's own thread")


@contextmanager
def _raised_here() -> Iterator[None]:
    """End a daemon thread silently, instead of raising ShuttingDown in it, while Python exits."""
    try:
        yield
    except ShuttingDown:
        if portal.dies_with_interpreter():
            raise SystemExit from None
        raise


class _Closing:
    """An object that is closed at the end of its ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Feed(Feed):
    """The engine's half of a `Stream`."""

    def __init__(self, portal: Portal) -> None:
        super().__init__(portal)
        self.queue: SimpleQueue[Any] = SimpleQueue()  # events of one kind of request, and `End`

    def push(self, item: Any) -> None:
        self.queue.put(item)


class Stream(_Closing, Generic[EventT]):
    """The events of one request, for a thread that blocks: those of `engine.api.engine.Stream`.
    Iterating ends after the last event of a request that succeeded, and raises its `TrioletError`
    after the last event of one that did not; after that the stream has ended.

    Leaving its block, `close`, or dropping it ends the request. Threads may share one: each event
    goes to one of them, and the end to all.
    """

    def __init__(self, caller: _Caller, owner: object) -> None:
        self._caller = caller
        self._owner = owner  # a dropped handle closes, but not while its stream is read
        self._feed = _Feed(caller.portal)
        self._lock = threading.Lock()
        self._num_taken = 0
        self._released_at = time.monotonic()

    def __iter__(self) -> Iterator[EventT]:
        return self

    def __next__(self) -> EventT:
        self._caller.require_waiting_allowed()
        item = self._next_item()
        if isinstance(item, End):
            self._feed.queue.put(End())  # for other threads that wait, or come later
            if item.error is None:
                raise StopIteration
            with _raised_here():
                raise item.error
        if isinstance(item, self._feed.credited):
            self._count_taken()
        return item

    def _next_item(self) -> EventT | End:
        """Return the queue's next item. Before a longer wait, the credit of all that was taken is
        given back: a step of many choices may need more slots than the rest of the buffer has."""
        queue = self._feed.queue
        item: EventT | End
        if self._num_taken:
            with suppress(Empty):
                item = queue.get(timeout=portal.RELEASE_AFTER_S)
                return item
            with self._lock:
                taken = self._count_anew()
            self._give_back(taken)
        item = queue.get()
        return item

    def close(self) -> None:
        """End the request if it has not ended. Idempotent; never waits."""
        feed = self._feed
        if not feed.has_ended:
            self._caller.portal.try_post(feed.leave)

    def __del__(self) -> None:
        self.close()

    def _count_taken(self) -> None:
        """Give credit back in portions (`Feed.num_per_release`). A slow reader gives back the
        credit of each event."""
        if self._feed.has_ended:
            return  # the stream has ended and needs no credit
        taken = 0
        with self._lock:
            self._num_taken += 1
            is_late = time.monotonic() - self._released_at >= portal.RELEASE_AFTER_S
            if is_late or self._num_taken >= self._feed.num_per_release:
                taken = self._count_anew()
        self._give_back(taken)

    def _count_anew(self) -> int:
        """Return how many taken events still hold credit, and count from 0 again. The caller holds
        the lock."""
        taken, self._num_taken = self._num_taken, 0
        self._released_at = time.monotonic()
        return taken

    def _give_back(self, taken: int) -> None:
        """Give the credit of so many events back. The caller does not hold the lock, for which
        another thread would have to wait until the engine's thread is woken."""
        feed = self._feed  # the command must not hold the stream
        if taken:
            self._caller.portal.try_post(lambda: feed.release(taken))


# ---- the engine


class Engine(_Closing):
    """A running engine, for threads that block; made by `open_engine`. Every method may be called
    from any thread but the engine's own, and raises ShuttingDown once the engine is closed.

    A KeyboardInterrupt ends the waiting, and cancels what the thread waited for.
    """

    def __init__(self, config: EngineConfig, portal: Portal) -> None:
        self.config = config
        self._portal = portal
        self._caller = _Caller(portal)

    def __del__(self) -> None:
        self._portal.signal_close()

    def close(self, timeout_s: float | None = None) -> None:
        """Cut what still runs, read or not, and wait until the engine's thread has ended: for a
        running step or load that may take as long as it lasts, but at most ``timeout_s``.
        Idempotent. `drain` first to let other threads finish.

        Other threads that wait for the engine get ShuttingDown. On the engine's own thread, and
        after a fork, this does not wait.
        """
        self._portal.signal_close()
        thread = self._portal.thread
        if self._portal.is_own_process and threading.current_thread() is not thread:
            thread.join(timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, and wait until the running ones have ended; after ``timeout_s`` (the
        configured drain timeout) they are cut. `close` is still to be called."""
        self._caller.call(lambda engine: engine.drain_in_background(timeout_s))

    # ---- generating and encoding

    def generate(self, request: GenerateRequest | str) -> Stream[StreamEvent]:
        """Run a request, or continue a prompt; a refusal is raised at the first event. Does not
        wait."""
        return self._submit(generate_request(request))

    def complete(self, request: GenerateRequest | str, **sampling: Any) -> str:
        """Return the whole text for a prompt, or for a request of one choice
        (`engine.api.engine.Engine.complete`)."""
        with self.generate(completion_request(request, sampling)) as stream:
            return "".join([event.text for event in stream if isinstance(event, Tokens)])

    def embed(self, request: EmbedRequest) -> Stream[EmbedEvent]:
        """Make one vector per input (`engine.api.engine.Engine.embed`). Does not wait."""
        return self._submit(embed_request(request))

    def rerank(self, request: RerankRequest) -> Stream[RerankEvent]:
        """Score every document (`engine.api.engine.Engine.rerank`). Does not wait."""
        return self._submit(rerank_request(request))

    def draw(self, request: DrawRequest | str) -> Stream[DrawEvent]:
        """Draw images of a prompt (`engine.api.engine.Engine.draw`). Does not wait."""
        return self._submit(draw_request(request))

    def _submit(self, request: ClientRequest) -> Stream[Any]:
        stream: Stream[Any] = Stream(self._caller, self)
        buffer = self.config.in_process_buffer
        with _raised_here():
            self._portal.open_stream(
                stream._feed,
                lambda engine, feed: engine.submit(request, buffer=buffer, reader=feed),
            )
        return stream

    # ---- handles

    def chat(
        self,
        model: str = "",
        *,
        system: str = "",
        sampling: SamplingParams | Mapping[str, Any] | None = None,
    ) -> Chat:
        """Return a conversation (`engine.api.handles.Chat`)."""
        engine = self._get_engine()
        return Chat(self, handles.Chat(engine, model, system=system, sampling=sampling))

    def encoder(self, model: str = "", *, function: handles.EmbedFunction | None = None) -> Encoder:
        """Return a maker of vectors (`engine.api.handles.Encoder`). ``function`` runs on the
        engine's Trio thread."""
        return Encoder(self, handles.Encoder(self._get_engine(), model, function=function))

    def cross_encoder(
        self, model: str = "", *, function: handles.RankFunction | None = None
    ) -> CrossEncoder:
        """Return a scorer of documents (`engine.api.handles.CrossEncoder`). ``function`` runs on
        the engine's Trio thread."""
        engine = self._get_engine()
        return CrossEncoder(self, handles.CrossEncoder(engine, model, function=function))

    def _get_engine(self) -> api.Engine:
        with _raised_here():
            return self._portal.engine

    # ---- text and tokens

    def tokenize(
        self,
        model: str = "",
        *,
        text: str | None = None,
        chat: ChatMessages | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """Return the tokens of a text or a chat (`engine.api.engine.Engine.tokenize`)."""
        return self._caller.call(
            lambda engine: engine.tokenize(
                model, text=text, chat=chat, add_special_tokens=add_special_tokens
            )
        )

    def detokenize(
        self, ids: Sequence[int], model: str = "", *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids (`engine.api.engine.Engine.detokenize`)."""
        return self._caller.call(
            lambda engine: engine.detokenize(model, ids, skip_special_tokens=skip_special_tokens)
        )

    # ---- views

    def list_models(self) -> tuple[ModelStatus, ...]:
        """Return every configured model, in the order of the configuration."""
        return self._caller.ask(lambda engine: engine.list_models())

    def get_model(self, name: str) -> ModelStatus:
        """Return one model, by name or alias (`engine.api.engine.Engine.get_model`)."""
        return self._caller.ask(lambda engine: engine.get_model(name))

    def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready (`engine.api.engine.Engine.wait_ready`)."""
        self._caller.call(lambda engine: engine.wait_ready(name))

    def statistics(self) -> EngineStatistics:
        """Return the counters as they stand; never waits for a step."""
        return self._caller.ask(lambda engine: engine.statistics())

    # ---- operating

    def pause(self, mode: PauseMode, model: str = "") -> None:
        """Pause a model or all (`engine.api.engine.Engine.pause`)."""
        self._caller.ask(lambda engine: engine.pause(mode, model))

    def resume(self, model: str = "") -> None:
        """End a pause (`engine.api.engine.Engine.resume`)."""
        self._caller.ask(lambda engine: engine.resume(model))

    def reset_prefix_cache(self, model: str = "") -> None:
        """Forget cached prefixes (`engine.api.engine.Engine.reset_prefix_cache`)."""
        self._caller.ask(lambda engine: engine.reset_prefix_cache(model))

    def abort(self, request_id: str) -> AbortOutcome:
        """End a request for the operator (`engine.api.engine.Engine.abort`)."""
        return self._caller.ask(lambda engine: engine.abort(request_id))

    def explain(self, request_id: str) -> Explanation:
        """Return what a live request does and waits for (`engine.api.engine.Engine.explain`)."""
        return self._caller.ask(lambda engine: engine.explain(request_id))


def open_engine(
    config: EngineConfig | ModelConfig | str | None = None,
    *,
    make_runner: RunnerFactory = api.make_torch_runner,
) -> Engine:
    """Start an engine in a thread of its own; its models load in the background. ``config`` may
    also be a model, or its name or path. Leaving the engine's ``with`` block closes it; an engine
    that is left open is closed when it is collected, or at exit.

    Raises:
        Exception: what keeps it from starting; nothing is left running.
    """
    config = engine_config(config)
    started: _Reply[None] = _Reply()
    portal = Portal(config, make_runner, started)
    portal.launch()
    try:
        take = started.wait()
    except BaseException:  # Ctrl-C
        portal.signal_close()
        raise
    try:
        take()
    except BaseException:
        portal.thread.join()
        raise
    return Engine(config, portal)


# ---- handles

H = TypeVar("H", bound=handles.Handle)


class _Handle(_Closing, Generic[H]):
    """A handle of `engine.api.handles`, for threads that block. Dropping one closes it."""

    def __init__(self, engine: Engine, handle: H) -> None:
        self._handle = handle
        self._engine = engine
        self._caller = engine._caller

    def __del__(self) -> None:
        self._caller.portal.try_post(self._handle.close)

    def stop(self) -> None:
        """End what any thread has asked for before now. Idempotent; never waits."""
        self._caller.portal.try_post(self._handle.stop)

    def close(self) -> None:
        """End everything that runs, refuse new calls, and wait until all has ended, which does not
        depend on any reader. Idempotent; no effect once the engine is closed."""
        handle = self._handle
        with suppress(ShuttingDown):
            self._caller.call(lambda engine: handle.aclose())


class Chat(_Handle[handles.Chat]):
    """A conversation (`engine.api.handles.Chat`). What was handed over to the reader's thread
    counts as read, taken from the stream or not; a stream that is closed or dropped is stopped.
    Its first event says which messages were left out to make room (`Started.dropped`)."""

    def ask(self, text: str, *, timeout_s: float | None = None) -> Stream[StreamEvent]:
        """Ask for an answer, which begins at once. Waits until the engine has the question.

        Raises:
            InvalidRequest, ShuttingDown: as `engine.api.handles.Chat.ask`.
        """
        handle = self._handle
        stream: Stream[StreamEvent] = Stream(self._caller, self)
        portal, feed = self._caller.portal, stream._feed
        portal.wait_as(feed)
        try:
            self._caller.ask(
                lambda engine: feed.follow(handle.ask(text, timeout_s=timeout_s, reader=feed))
            )
        except BaseException:
            portal.forget(feed)
            raise
        return stream

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation (`engine.api.handles.Chat.reset`)."""
        self._caller.ask(lambda engine: self._handle.reset(system=system))

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation so far (`engine.api.handles.Chat.messages`)."""
        return self._caller.ask(lambda engine: self._handle.messages)


class Encoder(_Handle[handles.Encoder]):
    """Makes vectors (`engine.api.handles.Encoder`)."""

    def embed(self, inputs: handles.Inputs) -> tuple[tuple[float, ...], ...]:
        """Return one vector per text, in their order (`engine.api.handles.Encoder.embed`)."""
        return self._caller.call(lambda engine: self._handle.embed(inputs))


class CrossEncoder(_Handle[handles.CrossEncoder]):
    """Scores documents (`engine.api.handles.CrossEncoder`)."""

    def rank(self, query: str, documents: Sequence[str]) -> tuple[float, ...]:
        """Return one score per document, in their order (`engine.api.handles.CrossEncoder`)."""
        return self._caller.call(lambda engine: self._handle.rank(query, documents))


__all__ = ["Chat", "CrossEncoder", "Encoder", "Engine", "Stream", "open_engine"]
