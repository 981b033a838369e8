"""Passes answers, events and credit between the engine's thread and asyncio event loops.

`engine.api.aio` is the engine for asyncio programs on top of it.

Rule 1: one `loop.call_soon_threadsafe` wakes all streams of a loop that have events of a step, and
one command gives back the credit of the events that they took (`Crossing`).
Rule 2: nothing here blocks a loop, and no future holds an exception: an answer is passed as a
function that returns or raises it, so an answer without a waiter is dropped silently.
Rule 3: cancelling a task that waits for an event or an answer ends the request or the call, as it
would end an asynchronous generator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from engine.api import portal
from engine.api.portal import End, Portal
from engine.errors import ShuttingDown
from engine.requests.readers import Latest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Self

    from engine.api import engine as api
    from engine.api.portal import Source

T = TypeVar("T")
EventT = TypeVar("EventT")


# ---- waiting for the engine


class Reply(portal.Reply[T]):
    """An answer for a task of the running loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[Callable[[], T]] = self._loop.create_future()

    def _put(self, take: Callable[[], T]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: no task waits
            self._loop.call_soon_threadsafe(self._resolve, take)

    def _resolve(self, take: Callable[[], T]) -> None:
        if not self._taken.done():
            self._taken.set_result(take)

    async def wait(self) -> Callable[[], T]:
        """Wait for the answer. Return a function that returns or raises it.

        Cancellation: only the waiting ends.
        """
        return await self._taken


async def end_silently_at_exit() -> None:
    """Wait for ever if Python is about to kill this daemon thread: like every daemon, it then ends
    silently at exit. Otherwise return at once."""
    if portal.dies_with_interpreter():
        await asyncio.get_running_loop().create_future()


async def wait_end(portal: Portal, timeout_s: float | None) -> None:
    """Wait until the engine's thread has ended, for at most ``timeout_s``.

    Cancellation: only the waiting ends.
    """
    ended: Reply[None] = Reply()
    portal.expect_end(ended)
    try:
        await asyncio.wait_for(ended.wait(), timeout_s)
    except TimeoutError:
        return
    finally:
        portal.forget(ended)
    portal.thread.join()  # the engine's thread has nothing left to do


# ---- streams


class Streams:
    """Opens the streams of one engine, for any number of event loops."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._crossings: WeakValueDictionary[asyncio.AbstractEventLoop, Crossing] = (
            WeakValueDictionary()
        )

    def open(
        self, owner: object, make_source: Callable[[api.Engine, portal.Feed], Source]
    ) -> Stream[Any]:
        """Return a stream, for the running loop, of the source that ``make_source`` returns on the
        engine's thread. An error of ``make_source`` is the stream's end."""
        loop = asyncio.get_running_loop()
        crossing = self._crossings.get(loop)
        if crossing is None:
            crossing = self._crossings[loop] = Crossing(self._portal, loop)
        return Stream(crossing, owner, make_source)


class Crossing:
    """The connection between the engine's thread and one event loop. The loop's streams share it,
    so that one call wakes all that have new events, and one command gives back the credit of all.

    Only these streams keep this connection, and with it the loop, alive.
    """

    def __init__(self, portal: Portal, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.portal = portal
        self._news: list[_Feed] = []  # used on the engine's thread: feeds whose readers are to wake
        self._taken: dict[_Feed, int] = {}  # used on the loop: taken events that still hold credit
        self._timer: asyncio.TimerHandle | None = None

    # ---- on the engine's thread

    def announce(self, feed: _Feed) -> None:
        """Have the reader of ``feed``, which has items, woken after the engine's current turn."""
        if not self._news:
            self.portal.run_after_turn(self._cross)
        self._news.append(feed)

    def _cross(self) -> None:
        news, self._news = self._news, []
        for feed in news:
            feed.is_announced = False
        try:
            self.loop.call_soon_threadsafe(_wake, news)
        except RuntimeError:  # the loop has been closed, so its streams have no reader any more
            for feed in news:
                feed.leave()

    # ---- on the loop

    def take(self, feed: _Feed) -> int:
        """Count an event taken. Return how many taken events of its stream still hold credit."""
        if feed.has_ended:
            return 0  # the stream has ended and needs no credit
        taken = self._taken[feed] = self._taken.get(feed, 0) + 1
        if self._timer is None:
            self._timer = self.loop.call_later(portal.RELEASE_AFTER_S, self.release)
        return taken

    def release(self) -> None:
        """Give back the credit of all events taken, for every stream of the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken, self._taken = self._taken, {}
        self.portal.try_post(lambda: _release(taken))


def _wake(feeds: list[_Feed]) -> None:
    for feed in feeds:
        feed.wake()


def _release(taken: dict[_Feed, int]) -> None:
    for feed, num_events in taken.items():
        feed.release(num_events)


class _Feed(portal.Feed):
    """The engine's half of a `Stream`, with the futures of its waiting readers."""

    def __init__(self, crossing: Crossing) -> None:
        super().__init__(crossing.portal)
        self.items: deque[Any] = deque()  # events of one kind of request, and `End`
        self.is_announced = False
        self._crossing = crossing
        self._waiting: list[asyncio.Future[None]] = []  # used on the loop

    def push(self, item: Any) -> None:
        self.items.append(item)
        if not self.is_announced:
            self.is_announced = True
            self._crossing.announce(self)

    # ---- on the loop

    def wake(self) -> None:
        """Wake all waiting tasks, which then look at the items."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait for new items. May return without any.

        Raises:
            ShuttingDown: The process is a fork: no items will come.
        """
        self._crossing.portal.require_own_process()
        future: asyncio.Future[None] = self._crossing.loop.create_future()
        self._waiting.append(future)
        await future


class Stream(Generic[EventT]):
    """The events of one request, for the asyncio loop that was running when the stream was made:
    those of `engine.api.engine.Stream`. Iterating ends after the last event of a request that
    succeeded, and raises its `TrioletError` after the last event of one that did not; after that
    the stream has ended.

    The request ends early when the stream is closed or dropped, when the block of its ``async
    with`` is left, and when a task is cancelled that waits for an event. Tasks of one loop may
    share a stream: each event goes to one of them, and the end to all.
    """

    def __init__(
        self,
        crossing: Crossing,
        owner: object,
        make_source: Callable[[api.Engine, portal.Feed], Source],
    ) -> None:
        self._crossing = crossing
        self._owner = owner  # while a stream is read, its handle is not dropped, and so not closed
        self._feed = _Feed(crossing)
        try:
            crossing.portal.open_stream(self._feed, make_source)
        except ShuttingDown as error:
            self._feed.has_ended = True
            self._feed.items.append(End(error))

    def __aiter__(self) -> AsyncIterator[EventT]:
        return self

    async def __anext__(self) -> EventT:
        """Return the next event.

        Cancellation: ends the request.
        """
        feed, crossing = self._feed, self._crossing
        if asyncio.get_running_loop() is not crossing.loop:
            raise RuntimeError("the stream belongs to another event loop")
        item: Any = None
        while item is None:
            while not feed.items:
                await self._or_close(feed.wait())
            item = feed.items.popleft()
            if isinstance(item, feed.credited):
                if crossing.take(feed) >= feed.num_per_release:
                    crossing.release()
                    # Let other tasks of the loop run, even if the stream always has events.
                    await self._or_close(asyncio.sleep(0))
            elif isinstance(item, Latest):
                item = item.take()
        if isinstance(item, End):
            feed.items.append(End())  # the end for other tasks that wait, or come later
            if item.error is None:
                raise StopAsyncIteration
            if isinstance(item.error, ShuttingDown):
                await end_silently_at_exit()
            raise item.error
        event: EventT = item
        return event

    async def _or_close(self, waiting: Awaitable[None]) -> None:
        try:
            await waiting
        except BaseException:  # above all asyncio.CancelledError
            self.close()
            raise

    def close(self) -> None:
        """End the request if it has not ended. Idempotent; never waits."""
        feed = self._feed
        if not feed.has_ended:
            self._crossing.portal.try_post(feed.leave)

    async def aclose(self) -> None:
        """Close as `close` does, for `contextlib.aclosing`. Never waits or gets cancelled."""
        self.close()

    def __del__(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
