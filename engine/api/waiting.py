"""Lets a thread block until the engine's answers, events, or end.

`tools/regen_faces.py` makes the blocking methods from those of `engine.api.aio`; they use this
file.

Rule: answers and events come through a `queue.SimpleQueue`, which waits without the GIL and wakes
for signals.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.api import portal
from engine.api.portal import End, Feed, Portal
from engine.errors import ShuttingDown
from engine.requests.readers import Latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from engine.api import engine as api
    from engine.api.portal import Source

T = TypeVar("T")
EventT = TypeVar("EventT")


class Reply(portal.Reply[T]):
    """An answer for a thread that blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._box: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def _put(self, take: Callable[[], T]) -> None:
        self._box.put(take)

    def wait(self) -> Callable[[], T]:
        """Wait for the answer, without the GIL. Return a function that returns or raises it."""
        return self._box.get()


def end_silently_at_exit() -> None:
    """End this thread silently if it is a daemon that Python, which exits, is about to kill."""
    if portal.dies_with_interpreter():
        raise SystemExit


def require_waiting_allowed(portal: Portal) -> None:
    """Check that this thread may wait for the engine.

    Raises:
        RuntimeError: This is the engine's thread. ShuttingDown: This process is a fork.
    """
    portal.require_own_process()
    if threading.current_thread() is portal.thread:
        raise RuntimeError("this call blocks, and was made on the engine's own thread")


def engine_of(portal: Portal) -> api.Engine:
    """Return the engine. Raises ShuttingDown if it is closed, or this process is a fork."""
    try:
        return portal.engine
    except ShuttingDown:
        end_silently_at_exit()
        raise


def wait_end(portal: Portal, timeout_s: float | None) -> None:
    """Wait until the engine's thread has ended, for at most ``timeout_s``; not on that thread."""
    if threading.current_thread() is not portal.thread:
        portal.thread.join(timeout_s)


# ---- streams


class Streams:
    """Opens the streams of one engine."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    def open(
        self, owner: object, make_source: Callable[[api.Engine, portal.Feed], Source]
    ) -> Stream[Any]:
        """Return a stream of what ``make_source`` returns on the engine's thread. Does not wait. An
        error of ``make_source`` is the stream's end."""
        stream: Stream[Any] = Stream(self._portal, owner)
        try:
            self._portal.open_stream(stream._feed, make_source)
        except ShuttingDown:
            end_silently_at_exit()
            raise
        return stream

    def open_begun(
        self,
        owner: object,
        make_source: Callable[[api.Engine, portal.Feed], Source],
        ask: Callable[[Callable[[api.Engine], None]], None],
    ) -> Stream[Any]:
        """Return a stream like `open`, after ``make_source`` has been called; raise its error.
        ``ask`` calls a function on the engine's thread, and waits for that."""
        stream: Stream[Any] = Stream(self._portal, owner)
        feed = stream._feed
        self._portal.wait_as(feed)
        try:
            ask(lambda engine: feed.follow(make_source(engine, feed)))
        except BaseException:
            self._portal.forget(feed)
            raise
        return stream


class _Feed(Feed):
    """The engine's half of a `Stream`."""

    def __init__(self, portal: Portal) -> None:
        super().__init__(portal)
        self.queue: SimpleQueue[Any] = SimpleQueue()  # events of one kind of request, and `End`

    def push(self, item: Any) -> None:
        self.queue.put(item)


class Stream(Generic[EventT]):
    """The events of one request, for a thread that blocks: those of `engine.api.engine.Stream`.
    Iterating ends after the last event of a request that succeeded, and raises its `TrioletError`
    after the last event of one that did not; after that the stream has ended.

    Leaving its block, `close`, or dropping it ends the request. Threads may share a stream: each
    event goes to one of them, and the end to all.
    """

    def __init__(self, portal: Portal, owner: object) -> None:
        self._portal = portal
        self._owner = owner  # while a stream is read, its handle is not dropped, and so not closed
        self._feed = _Feed(portal)
        self._lock = threading.Lock()
        self._num_taken = 0
        self._released_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[EventT]:
        return self

    def __next__(self) -> EventT:
        require_waiting_allowed(self._portal)
        item: Any = None
        while item is None:
            item = self._next_item()
            if isinstance(item, self._feed.credited):
                self._count_taken()
            elif isinstance(item, Latest):
                item = item.take()
        if isinstance(item, End):
            self._feed.queue.put(End())  # the end for other threads that wait, or come later
            if item.error is None:
                raise StopIteration
            if isinstance(item.error, ShuttingDown):
                end_silently_at_exit()
            raise item.error
        event: EventT = item
        return event

    def _next_item(self) -> EventT | End:
        """Return the queue's next item. Before a longer wait, the credit of all events taken is
        given back: a step of many choices may need more message slots than the stream has left."""
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
            self._portal.try_post(feed.leave)

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
        """Give the credit of ``taken`` events back. The caller must not hold the lock, or other
        threads would wait for it while the engine's thread is woken."""
        feed = self._feed  # the command must not keep the stream alive
        if taken:
            self._portal.try_post(lambda: feed.release(taken))
