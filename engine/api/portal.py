"""The engine's own thread, and the way into it from programs that do not run Trio.

`engine.api.aio`, and the module for blocking threads that is generated from it, are two façades
over one `Portal`.

Rule 1: one daemon thread per open engine runs Trio. Everything enters that thread as a command of
`Portal.post`, and commands run in the order in which they were posted.
Rule 2: finalisers only post. Only a façade's `close` and the interpreter's exit wait for the
thread to end.
Rule 3: the portal knows every `Waiter`, and answers all of them when its thread ends, however it
ends. So no thread or task waits for an engine that has ended.
Rule 4: a request's own credit bounds the events that a reader has not taken, and credit is given
back only as events are taken. There is no second buffer.

How an engine that was left open ends with the interpreter, in CPython's order: the main thread
ends; `threading` calls the functions that were registered with it, then joins all threads that are
not daemons; then `atexit` functions run; then the daemon threads die. The interpreter would wait
for a non-daemon thread before any of our code could ask that thread to end, so the engine's thread
is a daemon. It is closed at the first of these moments and not by `atexit`: by then torch's own
handlers, which were registered later and therefore run earlier, have torn down what a loading model
is using (seen: errors, and a hang). Threads that outlive the main thread get ShuttingDown. Daemon
threads among them end silently, as they do at every exit (`dies_with_interpreter`).
A forked child has no engine: the engine's thread stayed in the parent, and every call in the child
raises ShuttingDown.
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
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import trio

from engine.api import engine as api
from engine.core.common.types import EndReason
from engine.errors import ShuttingDown, TrioletError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.config import EngineConfig
    from engine.pool.loader import RunnerFactory

T = TypeVar("T")

log = logging.getLogger(__name__)

EXIT_LIMIT_S = 30.0  # longest wait for the engine at exit, e.g. while it imports torch; not tuned
RELEASE_AFTER_S = 0.1  # longest delay of giving credit back; far below any stall timeout


# ---- waiters, answers and feeds


class Waiter(Protocol):
    """A thread or a task outside the engine's thread that waits for the engine."""

    def lose(self, error: BaseException) -> None:
        """Wake the waiter with this error: no answer will come. Runs on the engine's thread;
        calling it more than once, or after the answer, has no effect."""


class Reply(Generic[T]):
    """One answer for a thread or a task that waits for it. Each façade hands it over in its own
    way."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._is_answered = False

    def _put(self, take: Callable[[], T]) -> None:
        """Pass the waiter a function that returns the answer or raises its error. Never waits."""
        raise NotImplementedError

    def give(self, value: T) -> None:
        """Answer with a value, unless there was an answer before."""
        self._put_first(lambda: value)

    def lose(self, error: BaseException) -> None:
        """Answer with an error, unless there was an answer before."""

        def fail() -> NoReturn:
            raise error

        self._put_first(fail)

    def _put_first(self, take: Callable[[], T]) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._put(take)


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a stream: how the stream ended."""

    error: BaseException | None = None


class Source(Protocol):
    """The source of a feed's events: a `RequestStream` or an `Answer`. Used on the Trio thread."""

    @property
    def credited(self) -> tuple[type, ...]:
        """The classes of events that hold a slot of the stream's credit."""

    @property
    def num_per_release(self) -> int:
        """The number of taken events after which their credit is given back without delay."""

    def release(self, num_messages: int) -> None:
        """Give back the credit of ``num_messages`` events."""

    def cancel(self, reason: EndReason) -> None:
        """End the request, unless it has ended. Never waits."""


class Feed:
    """The engine's half of a façade's stream. The engine refers to the feed and not to the stream,
    so that a stream that the program has dropped can be collected.

    All methods run on the Trio thread. Any thread may read ``credited`` and ``num_per_release``, of
    its `Source`, after the first event, and ``has_ended``.
    """

    def __init__(self, portal: Portal) -> None:
        self.credited: tuple[type, ...] = ()
        self.num_per_release = 1
        self.has_ended = False
        self._portal = portal
        self._source: Source | None = None

    def push(self, item: Any) -> None:
        """Hand an event, or the `End`, over to the reader. Never waits."""
        raise NotImplementedError

    def lose(self, error: BaseException) -> None:
        """End the stream with an error that is not its request's own."""
        self.has_ended = True
        self._source = None
        self.push(End(error))

    def end(self, error: TrioletError | None) -> None:
        """Hand the end over to the reader (`engine.requests.stream.Reader`)."""
        self.has_ended = True
        self._source = None
        self._portal.forget(self)
        self.push(End(error))

    def follow(self, source: Source) -> None:
        """Use ``source``, whose events go to this feed, to give credit back and end the request."""
        self.credited, self.num_per_release = source.credited, source.num_per_release
        if not self.has_ended:
            self._source = source

    def release(self, num_messages: int) -> None:
        """Give back the credit of ``num_messages`` events."""
        if self._source is not None:
            self._source.release(num_messages)

    def leave(self) -> None:
        """End the request, because its reader has left. The end still comes to this feed, for other
        threads or tasks that wait for the stream."""
        if self._source is not None:
            self._source.cancel(EndReason.CANCELLED)


# ---- the thread


class Portal:
    """The engine's thread and the way into it.

    Its states: made → `launch` → open → `signal_close` → ended. Every thread may call the methods,
    except those under "on the Trio thread".
    """

    def __init__(
        self, config: EngineConfig, make_runner: RunnerFactory, started: Reply[None]
    ) -> None:
        self._process = os.getpid()
        self._is_closing = False
        self._has_ended = False
        self._waiters: dict[Waiter, None] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._engine: api.Engine | None = None
        self._nursery: trio.Nursery | None = None
        self._after_turn: list[Callable[[], None]] = []
        self._turns = trio.lowlevel.ParkingLot()
        self.thread = threading.Thread(
            target=self._run,
            args=(config, make_runner, started),
            name="triolet engine",
            daemon=True,
        )

    def launch(self) -> None:
        """Start the thread; never waits. ``started`` is answered when the engine takes requests, or
        with the error that kept it from starting; the thread is then about to end."""
        _open[self] = None
        self.thread.start()

    # ---- into the thread, from any other

    def post(self, command: Callable[[], object]) -> None:
        """Run ``command`` on the Trio thread, after those posted before. Never waits.

        Raises:
            ShuttingDown: the engine is closed, or was opened before a fork; nothing will run.
        """
        self.require_own_process()
        if self._is_closing or self._token is None:
            raise ShuttingDown("the engine is closed")
        try:
            self._token.run_sync_soon(_run_safely, command)
        except trio.RunFinishedError:
            raise ShuttingDown("the engine has ended") from None

    def try_post(self, command: Callable[[], object]) -> None:
        """Run ``command`` as `post` does, or do nothing if the engine has ended. For finalisers."""
        with suppress(ShuttingDown):
            self.post(command)

    def require_own_process(self) -> None:
        """Check that the engine's thread is in this process.

        Raises:
            ShuttingDown: this process is a fork of the one that opened the engine.
        """
        if self._process != os.getpid():
            raise ShuttingDown("the engine was opened by the process that this one is a fork of")

    def wait_as(self, waiter: Waiter) -> None:
        """Register a waiter until it is `forget`-ten. Register it before its command is posted:
        then either the command runs, or `post` raises, or the thread's end finds the waiter."""
        self._waiters[waiter] = None

    def forget(self, waiter: Waiter) -> None:
        """Remove a waiter; no effect if it is not registered."""
        self._waiters.pop(waiter, None)

    def ask(self, question: Callable[[api.Engine], T], reply: Reply[T]) -> None:
        """Answer ``reply`` with the result of a function that does not wait, called on the Trio
        thread. Raises ShuttingDown as `post`."""
        self._expect(reply, lambda: self._answer(question, reply))

    def call(self, job: Callable[[api.Engine], Awaitable[T]], reply: Reply[T]) -> None:
        """Answer ``reply`` with the result of an async function. It is called on the Trio thread in
        the order of the commands, and awaited in a task of its own. Raises as `post`."""
        self._expect(reply, lambda: self._begin(job, reply))

    def abandon(self, reply: Reply[T]) -> None:
        """Cancel the job that would answer ``reply``, because its waiter has left."""
        self.forget(reply)
        self.try_post(reply.scope.cancel)

    def open_stream(self, feed: Feed, make_source: Callable[[api.Engine, Feed], Source]) -> None:
        """Have the Trio thread make a source whose events go to ``feed``. An error of
        ``make_source`` is the stream's end. Raises as `post`."""

        def command() -> None:
            try:
                feed.follow(make_source(self.engine, feed))
            except Exception as error:
                self.forget(feed)
                feed.lose(error)

        self._expect(feed, command)

    def _expect(self, waiter: Waiter, command: Callable[[], None]) -> None:
        self.wait_as(waiter)
        try:
            self.post(command)
        except BaseException:
            self.forget(waiter)
            raise

    # ---- the end

    @property
    def is_own_process(self) -> bool:
        """Whether the engine's thread is in this process, and not in the one it was forked from."""
        return self._process == os.getpid()

    def signal_close(self) -> None:
        """Ask the engine to end. Idempotent, for any thread and any finaliser; never waits."""
        if not self.is_own_process:
            return
        # Here `_is_closing` is set before `_token` is read; `_main`, in the engine's thread, sets
        # `_token` before it reads `_is_closing`. So one of the two threads sees the other's value.
        self._is_closing = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._cut)

    def expect_end(self, waiter: Waiter) -> None:
        """Call the waiter's `Waiter.lose` when the thread has ended, or now if it has. Never
        waits."""
        # As in `signal_close`: `_run` sets the flag first and looks at the waiters second.
        self.wait_as(waiter)
        if self._has_ended:
            waiter.lose(ShuttingDown("the engine has ended"))

    # ---- on the Trio thread

    def run_after_turn(self, function: Callable[[], None]) -> None:
        """Call ``function`` when the Trio task that runs now has yielded: after a step's delivery,
        and not in the middle of it."""
        self._after_turn.append(function)
        self._turns.unpark()

    @property
    def engine(self) -> api.Engine:
        """The engine, for commands, and for making a handle on any thread.

        Raises:
            ShuttingDown: as `post`.
        """
        self.require_own_process()
        if self._engine is None:
            raise ShuttingDown("the engine is closed")
        return self._engine

    def _run(self, config: EngineConfig, make_runner: RunnerFactory, started: Reply[None]) -> None:
        failure: BaseException = ShuttingDown("the engine ended before it began")
        try:
            trio.run(self._main, config, make_runner, started)
        except BaseException as error:
            failure = error
            if self._nursery is not None:  # otherwise the façade's `open_engine` raises the error
                log.exception("the engine's thread failed")
        finally:
            self._is_closing = self._has_ended = True
            self._engine = None
            started.lose(failure)  # no effect if the engine had started
            for waiter in list(self._waiters):
                waiter.lose(ShuttingDown("the engine has ended"))
            self._waiters.clear()
            self._finish_turn()
            _open.pop(self, None)

    async def _main(
        self, config: EngineConfig, make_runner: RunnerFactory, started: Reply[None]
    ) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # A system task outlives the engine, whose last act is to end its streams.
        trio.lowlevel.spawn_system_task(self._finish_turns)
        with self._scope:
            async with (
                api.open_engine(config, make_runner=make_runner) as engine,
                trio.open_nursery() as nursery,
            ):
                self._engine, self._nursery = engine, nursery
                started.give(None)
                if self._is_closing:
                    self._cut()
                await trio.sleep_forever()

    async def _finish_turns(self) -> None:
        while True:
            self._finish_turn()
            await self._turns.park()

    def _finish_turn(self) -> None:
        while self._after_turn:
            functions, self._after_turn = self._after_turn, []
            for function in functions:
                _run_safely(function)

    def _cut(self) -> None:
        self._engine = None  # later commands find no engine
        self._scope.cancel(reason="the engine was closed")

    def _answer(self, question: Callable[[api.Engine], T], reply: Reply[T]) -> None:
        try:
            reply.give(question(self.engine))
        except Exception as error:
            reply.lose(error)
        # An error that is no Exception ends the thread, which then finds the reply registered.
        self.forget(reply)

    def _begin(self, job: Callable[[api.Engine], Awaitable[T]], reply: Reply[T]) -> None:
        try:
            # The job is called here, in order: a `stop` that is posted later comes later.
            awaitable = job(self.engine)
        except Exception as error:
            self.forget(reply)
            reply.lose(error)
            return
        assert self._nursery is not None
        self._nursery.start_soon(self._finish, awaitable, reply)

    async def _finish(self, awaitable: Awaitable[T], reply: Reply[T]) -> None:
        try:
            with reply.scope:
                reply.give(await awaitable)
        except Exception as error:
            reply.lose(error)
        finally:
            reply.lose(ShuttingDown("the engine was closed meanwhile"))
            self.forget(reply)


def _run_safely(command: Callable[[], object]) -> None:
    """Run a command. One that raises is a bug, for which Trio would end the whole thread."""
    try:
        command()
    except Exception:
        log.exception("a command from another thread failed")


# ---- the interpreter's exit

_open: dict[Portal, None] = {}
_is_exiting = threading.Event()


def dies_with_interpreter() -> bool:
    """Return whether Python is exiting and is about to kill the current thread, which is a daemon.
    A daemon that waited for the engine should end as silently as any other daemon."""
    return _is_exiting.is_set() and threading.current_thread().daemon


def _close_what_is_open() -> None:
    _is_exiting.set()
    for portal in list(_open):
        portal.signal_close()
    limit = time.monotonic() + EXIT_LIMIT_S
    for portal in list(_open):
        portal.thread.join(max(0.0, limit - time.monotonic()))


# The function is private, but `concurrent.futures` uses it too; without it, `atexit` has to do.
getattr(threading, "_register_atexit", atexit.register)(_close_what_is_open)
