"""The engine for programs that block: scripts, notebooks, threads.

    with engine.sync.open_engine(config) as eng:
        for event in eng.generate(request):
            ...

Rule 1: one daemon thread per open engine runs Trio; everything enters it as a command of
`_Portal.post`, in order, and comes back through a `queue.SimpleQueue`, which waits without the GIL
and wakes for signals (R17). Rule 2: finalisers only post; nothing but `Engine.close` and the exit
of the interpreter joins. Rule 3: whoever waits is known to the portal, which answers everyone when
its thread ends, however it ends: nobody waits for an engine that is gone.
Rule 4: what a reader has not taken is bounded by its request's own credit, given back as it is
taken; there is no second buffer.

How it ends with the interpreter, in CPython's order: the main thread ends; `threading` calls what
was registered with it, then joins the threads that are no daemons; then come `atexit`, and the
death of the daemons. A thread that is no daemon would be waited for before anything of ours could
tell it to end, so ours is one. It is closed at the first of these moments, not by `atexit`: by then
torch's own handlers, which were registered later and so come sooner, have torn down what a model
that still loads is using (seen: errors, and a hang). So threads that outlive the main thread hear
ShuttingDown; daemons among them end without a word, as they would have anyway.
The file is longer than most: half of it is the surface of `engine.api` and `engine.handles` said
once more, and the other half is nobody else's business.
In a forked child there is no engine: its thread stayed in the parent, and every call says so.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 torch imports it, and at exit that fails
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import trio

from engine import api, handles
from engine.config import EngineConfig
from engine.core.events import Tokens
from engine.encoding import credited_by
from engine.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from engine.core.events import PauseMode
    from engine.core.plan import TokenSpan
    from engine.core.types import Explanation
    from engine.encode_requests import (
        EmbedEvent,
        EmbedRequest,
        EncodeRequests,
        RerankEvent,
        RerankRequest,
    )
    from engine.pool import RunnerFactory
    from engine.requests import Chat as ChatMessages
    from engine.requests import GenerateRequest, SamplingParams, StreamEvent
    from engine.status import AbortOutcome, EngineStatistics, ModelStatus

T = TypeVar("T")
EventT = TypeVar("EventT")

log = logging.getLogger(__name__)

EXIT_LIMIT_S = 30.0  # guess: importing torch on a busy machine; what hangs is left to die then
RELEASE_AFTER_S = 0.1  # guess: far below any stall timeout, far above what waking Trio costs
RELEASE_SHARE = 4  # credit goes back at the latest when this part of the buffer was taken


# ---- the thread


class _Waiter(Protocol):
    """Somebody on another thread who waits for the engine."""

    def lose(self, error: ShuttingDown) -> None:
        """The engine is gone: wake up with this. On any thread; more than once is harmless."""
        ...


class _Reply(Generic[T]):
    """One answer on its way to the thread that waits for it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._box: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def give(self, value: T) -> None:
        self._box.put((value, None))

    def lose(self, error: BaseException) -> None:
        self._box.put((None, error))

    def wait(self) -> tuple[T | None, BaseException | None]:
        """The first that was put. Blocks without the GIL."""
        return self._box.get()


class _Portal:
    """The engine's thread and the way into it.

    Life: made → `start` → open → `signal_close` → ended. ``post``, ``ask`` and ``call`` are for
    every thread; what stands under "on the Trio thread" is not.
    """

    def __init__(self, config: EngineConfig, make_runner: RunnerFactory) -> None:
        self._process = os.getpid()
        self._is_closing = False
        self._started: _Reply[None] = _Reply()
        self._waiters: dict[_Waiter, None] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._engine: api.Engine | None = None
        self._nursery: trio.Nursery | None = None
        self._thread = threading.Thread(
            target=self._run, args=(config, make_runner), name="triolet engine", daemon=True
        )

    def start(self) -> None:
        """Start the thread and wait until the engine takes requests.

        Raises:
            Exception: whatever kept the engine from starting; the thread has ended.
        """
        _open[self] = None
        self._thread.start()
        try:
            _, error = self._started.wait()
        except BaseException:  # Ctrl-C
            self.signal_close()
            raise
        if error is not None:
            self._thread.join()
            raise error

    # ---- into the thread, from any other

    def post(self, command: Callable[[], object]) -> None:
        """Run ``command`` on the Trio thread, after those posted before. Never waits.

        Raises:
            ShuttingDown: the engine is closed, or was opened before a fork; nothing will run.
        """
        if self._process != os.getpid():
            raise ShuttingDown("the engine was opened by the process that this one is a fork of")
        if self._is_closing or self._token is None:
            raise _as_heard_here(ShuttingDown("the engine is closed"))
        try:
            self._token.run_sync_soon(_run_safely, command)
        except trio.RunFinishedError:
            raise _as_heard_here(ShuttingDown("the engine has ended")) from None

    def try_post(self, command: Callable[[], object]) -> None:
        """As `post`, but nothing where there is no engine any more. For finalisers."""
        with suppress(ShuttingDown, SystemExit):
            self.post(command)

    def require_waiting_allowed(self) -> None:
        """A thread may not wait for itself, nor for one that a fork left behind.

        Raises:
            RuntimeError: this is the engine's thread. ShuttingDown: as `post`, after a fork.
        """
        if self._process != os.getpid():
            raise ShuttingDown("the engine was opened by the process that this one is a fork of")
        if threading.current_thread() is self._thread:
            raise RuntimeError("this call blocks, and was made on the engine's own thread")

    def wait_as(self, waiter: _Waiter) -> None:
        """Know of a waiter until it is `forget`-ten. Before its command is posted: then either
        the command runs, or `post` raises, or the thread's end finds the waiter here."""
        self._waiters[waiter] = None

    def forget(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter, None)

    def ask(self, question: Callable[[api.Engine], T]) -> T:
        """The result of a function that does not wait, run on the Trio thread. Blocks."""
        reply: _Reply[T] = _Reply()
        return self._exchange(reply, lambda: self._answer(question, reply))

    def call(self, job: Callable[[api.Engine], Awaitable[T]]) -> T:
        """The result of an async function, called in turn and awaited in a task of its own.
        Blocks; a KeyboardInterrupt here cancels it."""
        reply: _Reply[T] = _Reply()
        return self._exchange(reply, lambda: self._begin(job, reply))

    def _exchange(self, reply: _Reply[T], command: Callable[[], None]) -> T:
        self.require_waiting_allowed()
        self.wait_as(reply)
        try:
            self.post(command)
            value, error = reply.wait()
        except BaseException:
            self.try_post(reply.scope.cancel)
            raise
        finally:
            self.forget(reply)
        if error is not None:
            raise _as_heard_here(error)
        return value  # type: ignore[return-value]  # None where T is None

    # ---- the end

    def signal_close(self) -> None:
        """Tell the engine to end. Idempotent, from any thread and any finaliser; never waits."""
        if self._process != os.getpid():
            return
        # The flag first, the token second; `_main` sets the token first and looks at the flag
        # second: one of the two sees the other.
        self._is_closing = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._cut)

    def close(self, timeout_s: float | None = None) -> None:
        """`signal_close`, and wait for the thread's end, at most ``timeout_s``. On the engine's
        own thread, and after a fork, it does not wait."""
        self.signal_close()
        if self._process == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- on the Trio thread

    def _run(self, config: EngineConfig, make_runner: RunnerFactory) -> None:
        failure: BaseException = ShuttingDown("the engine ended before it began")
        try:
            trio.run(self._main, config, make_runner)
        except BaseException as error:
            failure = error
            if self._nursery is not None:  # else `start` raises it
                log.exception("the engine's thread failed")
        finally:
            self._is_closing = True
            self._started.lose(failure)  # heard only if it has not started
            for waiter in list(self._waiters):
                waiter.lose(ShuttingDown("the engine has ended"))
            self._waiters.clear()
            _open.pop(self, None)

    async def _main(self, config: EngineConfig, make_runner: RunnerFactory) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with (
                api.open_engine(config, make_runner=make_runner) as engine,
                trio.open_nursery() as nursery,
            ):
                self._engine, self._nursery = engine, nursery
                self._started.give(None)
                if self._is_closing:
                    self._cut()
                await trio.sleep_forever()

    def _cut(self) -> None:
        if self._engine is not None:
            self._engine.refuse_new()
            self._engine = None  # no command finds it any more
        self._scope.cancel(reason="the engine was closed")

    @property
    def engine(self) -> api.Engine:
        """The engine, for commands.

        Raises:
            ShuttingDown: there is none.
        """
        if self._engine is None:
            raise ShuttingDown("the engine is closed")
        return self._engine

    def _answer(self, question: Callable[[api.Engine], T], reply: _Reply[T]) -> None:
        try:
            reply.give(question(self.engine))
        except Exception as error:
            reply.lose(error)

    def _begin(self, job: Callable[[api.Engine], Awaitable[T]], reply: _Reply[T]) -> None:
        try:
            # called here, in turn: a stop that is posted later comes later
            awaitable = job(self.engine)
        except Exception as error:
            reply.lose(error)
            return
        assert self._nursery is not None
        self._nursery.start_soon(_run_job, awaitable, reply)


_open: dict[_Portal, None] = {}
_is_exiting = threading.Event()


def _close_what_is_open() -> None:
    _is_exiting.set()
    for portal in list(_open):
        portal.signal_close()
    limit = time.monotonic() + EXIT_LIMIT_S
    for portal in list(_open):
        portal.close(max(0.0, limit - time.monotonic()))


async def _run_job(awaitable: Awaitable[T], reply: _Reply[T]) -> None:
    try:
        with reply.scope:
            reply.give(await awaitable)
    except Exception as error:
        reply.lose(error)
    finally:
        reply.lose(ShuttingDown("the engine was closed meanwhile"))  # unless something was put


# private, but `concurrent.futures` rests on it too; without it, `atexit` is nearly as good
getattr(threading, "_register_atexit", atexit.register)(_close_what_is_open)


def _as_heard_here(error: BaseException) -> BaseException:
    """An error as the current thread is to raise it. At exit, Python kills daemon threads where
    they wait; one that waited for us ends as silently."""
    is_killed = _is_exiting.is_set() and threading.current_thread().daemon
    return SystemExit() if is_killed and isinstance(error, ShuttingDown) else error


def _run_safely(command: Callable[[], object]) -> None:
    """A command that raises is a bug; Trio would end everything for it."""
    try:
        command()
    except Exception:
        log.exception("a command from another thread failed")


# ---- streams


class _Source(Protocol):
    """What a reader follows: a `Lifetime` or an `Answer`. On the Trio thread."""

    on_ready: Callable[[], None] | None

    @property
    def is_closed(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def take_ready(self) -> list[Any]: ...
    def release(self, num_messages: int) -> None: ...
    def close_reader(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of a stream: how it ended."""

    error: BaseException | None = None


class _Reader:
    """What a stream's two threads share. It, and not the `Stream`, is known to the engine, so that
    a stream which nobody holds any more can be collected."""

    def __init__(self, portal: _Portal) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()  # events of one kind of request, and _End
        self._portal = portal
        self._source: _Source | None = None

    def lose(self, error: BaseException) -> None:
        self.queue.put(_End(error))

    # ---- on the Trio thread

    def follow(self, source: _Source) -> None:
        """Hand over everything that ``source`` has and gets."""
        self._source = source
        source.on_ready = self._deliver
        self._deliver()

    def _deliver(self) -> None:
        source = self._source
        if source is None:
            return
        for event in source.take_ready():
            self.queue.put(event)
        if source.is_closed:
            self._source, source.on_ready = None, None
            self._portal.forget(self)
            self.queue.put(_End(source.error))

    def release(self, num_messages: int) -> None:
        if self._source is not None:
            self._source.release(num_messages)

    def leave(self) -> None:
        if self._source is not None:
            self._source.close_reader()


class _Closing:
    """What leaving its block closes."""

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


class Stream(_Closing, Generic[EventT]):
    """The events of one request, for a thread that blocks: those of `engine.api.Stream`. Iterating
    ends after the last event of a request that succeeded, and raises its `TrioletError` after the
    last event of one that did not; after that it has ended.

    Leaving its block, `close`, or dropping it ends the request. Threads may share one: each event
    goes to one of them, and the end to all.
    """

    def __init__(
        self,
        portal: _Portal,
        buffer: int,
        owner: object,
        credited: tuple[type, ...] = (Tokens,),
    ) -> None:
        self._portal = portal
        self._credited = credited
        self._owner = owner  # a handle that is dropped closes; not while it is read through
        self._reader = _Reader(portal)
        self._lock = threading.Lock()
        self._num_taken = 0
        self._released_at = time.monotonic()
        self._release_at = max(1, buffer // RELEASE_SHARE)

    def __iter__(self) -> Iterator[EventT]:
        return self

    def __next__(self) -> EventT:
        self._portal.require_waiting_allowed()
        item = self._next_item()
        if isinstance(item, _End):
            self._reader.queue.put(_End())  # for whoever else waits, or comes later
            if item.error is not None:
                raise _as_heard_here(item.error)
            raise StopIteration
        if isinstance(item, self._credited):
            self._count_taken()
        return item

    def _next_item(self) -> EventT | _End:
        """The next of the queue. Before a longer wait, whatever was taken is given back: a step of
        many choices may need more slots than are left beside it."""
        queue = self._reader.queue
        item: EventT | _End
        if self._num_taken:
            with suppress(Empty):
                item = queue.get(timeout=RELEASE_AFTER_S)
                return item
            with self._lock:
                self._give_back()
        item = queue.get()
        return item

    def close(self) -> None:
        """End the request if it has not ended. Idempotent; never waits."""
        reader = self._reader
        self._portal.try_post(reader.leave)

    def __del__(self) -> None:
        self.close()

    def _follow(self, make_source: Callable[[], _Source]) -> None:
        """Have the Trio thread make the source and follow it. If that raises, so will reading."""
        portal, reader = self._portal, self._reader  # the command must not hold the stream

        def command() -> None:
            try:
                reader.follow(make_source())
            except Exception as error:
                portal.forget(reader)
                reader.lose(error)

        portal.wait_as(reader)
        try:
            portal.post(command)
        except BaseException:
            portal.forget(reader)
            raise

    def _count_taken(self) -> None:
        """Give credit back now and then: waking the Trio thread for every token would cost more
        than the token. A reader that is slow gives back each time."""
        with self._lock:
            self._num_taken += 1
            is_late = time.monotonic() - self._released_at >= RELEASE_AFTER_S
            if is_late or self._num_taken >= self._release_at:
                self._give_back()

    def _give_back(self) -> None:
        reader, taken = self._reader, self._num_taken  # the command must not hold the stream
        self._num_taken, self._released_at = 0, time.monotonic()
        self._portal.try_post(lambda: reader.release(taken))


# ---- the engine


class Engine(_Closing):
    """A running engine, for threads that block; made by `open_engine`. Every method may be called
    from any thread but the engine's own, and raises ShuttingDown once it is closed.

    A KeyboardInterrupt ends the waiting, and what was waited for.
    """

    def __init__(self, config: EngineConfig, portal: _Portal) -> None:
        self.config = config
        self._portal = portal

    def __del__(self) -> None:
        self._portal.signal_close()

    def close(self, timeout_s: float | None = None) -> None:
        """Cut what still runs, read or not, and wait until the engine's thread has ended: a step
        or a load that runs is waited for, for at most ``timeout_s``. Idempotent. `drain` first to
        let other threads finish.

        Whoever waits in another thread gets ShuttingDown.
        """
        self._portal.close(timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, and wait until those that run have ended; after ``timeout_s`` (the
        configured drain timeout) they are cut. `close` is still to be called."""
        self._portal.call(lambda engine: engine.drain_in_background(timeout_s))

    # ---- generating

    def generate(self, request: GenerateRequest) -> Stream[StreamEvent]:
        """Run a request; a refusal is raised at the first event. Does not wait."""
        buffer, portal = self.config.in_process_buffer, self._portal
        stream: Stream[StreamEvent] = Stream(portal, buffer, self)
        stream._follow(lambda: portal.engine.submit(request, buffer=buffer))
        return stream

    def embed(self, request: EmbedRequest) -> Stream[EmbedEvent]:
        """Make one vector per input (`engine.api.Engine.embed`). Does not wait."""
        return self._encode(request)

    def rerank(self, request: RerankRequest) -> Stream[RerankEvent]:
        """Score every document (`engine.api.Engine.rerank`). Does not wait."""
        return self._encode(request)

    def _encode(self, request: EncodeRequests) -> Stream[Any]:
        buffer, portal = self.config.in_process_buffer, self._portal
        stream: Stream[Any] = Stream(portal, buffer, self, credited_by(request))
        stream._follow(lambda: portal.engine.submit(request, buffer=buffer))
        return stream

    def chat(
        self, model: str = "", *, system: str = "", sampling: SamplingParams | None = None
    ) -> Chat:
        """A conversation (`engine.handles.Chat`)."""
        return Chat(
            self,
            self._portal.ask(
                lambda engine: handles.Chat(engine, model, system=system, sampling=sampling)
            ),
        )

    def encoder(self, model: str = "", *, function: handles.EmbedFunction | None = None) -> Encoder:
        """A maker of vectors (`engine.handles.Encoder`)."""
        return Encoder(
            self,
            self._portal.ask(lambda engine: handles.Encoder(engine, model, function=function)),
        )

    def cross_encoder(
        self, model: str = "", *, function: handles.RankFunction | None = None
    ) -> CrossEncoder:
        """A scorer of documents (`engine.handles.CrossEncoder`)."""
        return CrossEncoder(
            self,
            self._portal.ask(lambda engine: handles.CrossEncoder(engine, model, function=function)),
        )

    # ---- text and tokens

    def tokenize(
        self,
        model: str = "",
        *,
        text: str | None = None,
        chat: ChatMessages | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """As `engine.api.Engine.tokenize`."""
        return self._portal.call(
            lambda engine: engine.tokenize(
                model, text=text, chat=chat, add_special_tokens=add_special_tokens
            )
        )

    def detokenize(
        self, ids: Sequence[int], model: str = "", *, skip_special_tokens: bool = True
    ) -> str:
        """As `engine.api.Engine.detokenize`."""
        return self._portal.call(
            lambda engine: engine.detokenize(model, ids, skip_special_tokens=skip_special_tokens)
        )

    # ---- views

    def list_models(self) -> tuple[ModelStatus, ...]:
        """Every configured model, in the order of the configuration."""
        return self._portal.ask(lambda engine: engine.list_models())

    def get_model(self, name: str) -> ModelStatus:
        """One model, by name or alias. Raises ModelNotFound."""
        return self._portal.ask(lambda engine: engine.get_model(name))

    def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready (`engine.api.Engine.wait_ready`)."""
        self._portal.call(lambda engine: engine.wait_ready(name))

    def statistics(self) -> EngineStatistics:
        """The counters as they stand; never waits for a step."""
        return self._portal.ask(lambda engine: engine.statistics())

    # ---- operating

    def pause(self, mode: PauseMode, model: str = "") -> None:
        """As `engine.api.Engine.pause`."""
        self._portal.ask(lambda engine: engine.pause(mode, model))

    def resume(self, model: str = "") -> None:
        """As `engine.api.Engine.resume`."""
        self._portal.ask(lambda engine: engine.resume(model))

    def reset_prefix_cache(self, model: str = "") -> None:
        """As `engine.api.Engine.reset_prefix_cache`."""
        self._portal.ask(lambda engine: engine.reset_prefix_cache(model))

    def abort(self, request_id: str) -> AbortOutcome:
        """As `engine.api.Engine.abort`."""
        return self._portal.ask(lambda engine: engine.abort(request_id))

    def explain(self, request_id: str) -> Explanation:
        """As `engine.api.Engine.explain`."""
        return self._portal.ask(lambda engine: engine.explain(request_id))


def open_engine(
    config: EngineConfig | None = None, *, make_runner: RunnerFactory = api.make_torch_runner
) -> Engine:
    """Start an engine in a thread of its own; its models load in the background. It is a context
    manager that closes; one that is left open is closed when it is collected or at exit.

    Raises:
        Exception: what keeps it from starting; nothing is left running.
    """
    config = config or EngineConfig()
    portal = _Portal(config, make_runner)
    portal.start()
    return Engine(config, portal)


# ---- handles

H = TypeVar("H", bound=handles.Handle)


class _Handle(_Closing, Generic[H]):
    """A handle of `engine.handles`, for threads that block. One that is dropped is closed."""

    def __init__(self, engine: Engine, handle: H) -> None:
        self._handle = handle
        self._engine = engine
        self._portal = engine._portal

    def __del__(self) -> None:
        self._portal.try_post(self._handle.close)

    def stop(self) -> None:
        """End what any thread has asked for before now. Idempotent; never waits."""
        self._portal.try_post(self._handle.stop)

    def close(self) -> None:
        """End what runs and refuse what comes, then wait until all has ended, which no reader can
        hold up. Idempotent, and nothing once the engine is closed."""
        handle = self._handle
        with suppress(ShuttingDown):
            self._portal.call(lambda engine: handle.aclose())


class Chat(_Handle[handles.Chat]):
    """A conversation (`engine.handles.Chat`). What was handed over to the reader's thread counts
    as read, taken from the stream or not; a stream that is closed or dropped is stopped. Its first
    event tells which messages were left out to make room (`Started.dropped`)."""

    def ask(self, text: str, *, timeout_s: float | None = None) -> Stream[StreamEvent]:
        """Ask for an answer; it begins at once. Errors as `engine.handles.Chat.ask`."""
        buffer, handle = self._engine.config.in_process_buffer, self._handle
        stream: Stream[StreamEvent] = Stream(self._portal, buffer, self)
        portal, reader = self._portal, stream._reader
        portal.wait_as(reader)
        try:
            # followed where it is asked: what came between the two would reach nobody
            portal.ask(lambda engine: reader.follow(handle.ask(text, timeout_s=timeout_s)))
        except BaseException:
            portal.forget(reader)
            raise
        return stream

    def reset(self, *, system: str | None = None) -> None:
        """As `engine.handles.Chat.reset`."""
        self._portal.ask(lambda engine: self._handle.reset(system=system))

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation so far (`engine.handles.Chat.messages`)."""
        return self._portal.ask(lambda engine: self._handle.messages)


class Encoder(_Handle[handles.Encoder]):
    """A maker of vectors (`engine.handles.Encoder`)."""

    def embed(self, texts: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """One vector per text, in their order (`engine.handles.Encoder.embed`)."""
        return self._portal.call(lambda engine: self._handle.embed(texts))


class CrossEncoder(_Handle[handles.CrossEncoder]):
    """A scorer of documents (`engine.handles.CrossEncoder`)."""

    def rank(self, query: str, documents: Sequence[str]) -> tuple[float, ...]:
        """One score per document, in their order (`engine.handles.CrossEncoder.rank`)."""
        return self._portal.call(lambda engine: self._handle.rank(query, documents))


__all__ = ["Chat", "CrossEncoder", "Encoder", "Engine", "Stream", "open_engine"]
