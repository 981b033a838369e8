"""Streams whose clients have lost their connections: each waits for its client for a while.

Rule 1: a stream that waits counts against its key's max_requests, even if its request has ended.
Rule 2: a stream is forgotten when its resume window ends; its request is then cancelled, if it has
not ended. Rule 3: only the holder of its key can attach to it, and only with its attach token; any
other client gets the error for an unknown stream. Rule 4: waiting streams are bounded, for each
party (`Origin.party`) and in all; if there are too many in all, the party that has the most loses
its oldest. Rule 5: the scheduler computes other requests first (`engine.core.text.guests`). Rule 6:
a server that is full, or short of memory for images, cancels a request whose stream waits here
before it refuses or delays another request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

import trio

from engine.core.common.types import EndReason, Explanation
from engine.errors import RequestNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from engine.core.common.types import RequestId
    from engine.requests.quota import Quota
    from engine.requests.readers import Reader
    from engine.requests.stream import RequestStream
    from engine.requests.tasks import RequestTasks
    from engine.requests.text.kept_events import ReceivedChoice
    from engine.requests.text.stream import TextStream

# Most streams that wait, and most bytes that they keep, if the server's network fails. Guesses.
DETACHED_MAX = 1024
DETACHED_EACH_MAX = 256  # waiting streams of one key's holder, or of an address without a key
DETACHED_BYTES_MAX = 2**28


class DetachedStreams:
    """The streams that clients may attach to, including those that wait for their clients. Belongs
    to the Trio thread."""

    def __init__(self, tasks: RequestTasks) -> None:
        self._tasks = tasks
        # By attach token: streams that a call reads, or that wait; their requests may have ended.
        self._streams: dict[str, TextStream] = {}
        self._waits: dict[str, _Wait] = {}  # by attach token, oldest first
        self._is_closed = False

    @property
    def count(self) -> int:
        """How many streams wait."""
        return len(self._waits)

    def image_bytes(self) -> int:
        """Return the bytes of the image files of waiting streams whose requests have not ended."""
        waiting = [wait.stream for wait in self._waits.values() if not wait.stream.is_closed]
        return sum([stream.request.image_bytes for stream in waiting])

    def register(self, stream: RequestStream[Any]) -> None:
        """Let clients attach to a stream that has a token, until `remove`."""
        self._streams[stream.attach_token] = cast("TextStream", stream)

    def remove(self, stream: TextStream) -> None:
        """Let no client attach to a stream any more."""
        self._streams.pop(stream.attach_token, None)

    def add(self, stream: TextStream) -> bool:
        """Let a stream wait for its client. Return False if the stream may not wait."""
        if self._is_closed or not self._tasks.is_open or stream.resume_window_s is None:
            return False
        self._make_room(stream)
        wait = _Wait(stream, stream.resume_window_s)
        self._waits[stream.attach_token] = wait
        stream.wait_for_client(wait.until)
        self._tasks.start(self._expire, wait, name=f"window of {stream.request_id}")
        return True

    def _make_room(self, stream: TextStream) -> None:
        """Give streams up until there is room for ``stream``: the oldest of its own party if that
        has too many, then the oldest of the party that has the most streams or, if memory is short,
        the most bytes."""
        own = [wait for wait in self._waits.values() if wait.stream.party == stream.party]
        if len(own) >= DETACHED_EACH_MAX:
            self._give_up(own[0], EndReason.CANCELLED)
        left = DETACHED_BYTES_MAX - stream.kept_bytes
        left -= sum([wait.num_bytes for wait in self._waits.values()])
        while self._waits and (len(self._waits) >= DETACHED_MAX or left < 0):
            parties = Counter[Hashable]()
            for wait in self._waits.values():
                parties[wait.stream.party] += wait.num_bytes if left < 0 else 1
            [(most, _)] = parties.most_common(1)
            wait = next(wait for wait in self._waits.values() if wait.stream.party == most)
            left += wait.num_bytes
            self._give_up(wait, EndReason.CANCELLED)

    def make_place(self) -> bool:
        """Cancel a live request whose stream waits, so that a new request has its place. Return
        whether there was such a request."""
        return self._give_up_oldest(lambda stream: True) is not None

    def spare_images(self, holders: Container[RequestId]) -> RequestId | None:
        """Cancel one of the ``holders`` of images' memory whose stream waits, because another
        request lacks memory. Return the cancelled one's id; None if none of them waits."""
        return self._give_up_oldest(lambda stream: stream.core_id in holders)

    def _give_up_oldest(self, is_meant: Callable[[TextStream], bool]) -> RequestId | None:
        """Give up the oldest stream of the party that has the most, among waiting streams with live
        requests for which ``is_meant`` is true. Return its request's core id, or None."""
        waits = [x for x in self._waits.values() if not x.stream.is_closed and is_meant(x.stream)]
        if not waits:
            return None
        [(most, _)] = Counter([wait.stream.party for wait in waits]).most_common(1)
        oldest = next(wait for wait in waits if wait.stream.party == most)
        self._give_up(oldest, EndReason.CANCELLED)
        return oldest.stream.core_id

    def abort(self, request_id: str, only_of: str | None = None) -> None:
        """Stop counting the waiting streams with this id, a holder's or with None all, against
        their keys, because their requests are ended. They wait on, so that their clients get the
        error."""
        for wait in self._waits.values():
            if wait.stream.request_id == request_id and only_of in (
                None,
                wait.stream.origin.holder,
            ):
                wait.stream.counted.release()

    def is_waiting(self, stream: RequestStream[Any]) -> bool:
        """Return whether a stream waits for its client."""
        return stream.attach_token in self._waits

    def waiting(self, request_id: str, only_of: str | None = None) -> TextStream | None:
        """Return the newest waiting stream with this id, a holder's or with None anybody's, if
        there is one."""
        named = [x.stream for x in self._waits.values() if x.stream.request_id == request_id]
        waits = [stream for stream in named if only_of in (None, stream.origin.holder)]
        return waits[-1] if waits else None

    def attachable(self, request_id: str, token: str, holder: Quota | None) -> TextStream:
        """Return the stream that a client may take up (`attach`), even if its request has ended.

        Raises:
            RequestNotFound: the holder has no stream with this id and token.
        """
        stream = self._streams.get(token)
        if stream is None or stream.request_id != request_id or stream.holder is not holder:
            raise RequestNotFound(
                "no stream with this request_id and attach_token can be attached; send the request "
                "again with a continuation"
            )
        return stream

    def attach(
        self,
        stream: TextStream,
        reader: Reader[Any],
        received: Sequence[ReceivedChoice],
        timeout_s: float | None = None,
    ) -> None:
        """Let ``reader`` go on with a stream, whether it waits or not. The request's deadline
        becomes that of the client's new call, if that is earlier.

        Raises:
            InvalidRequest: the client cannot have received so much, and nothing changed; or events
                that it lacks are not kept any more, and the stream does not wait any longer.
        """
        wait = self._waits.get(stream.attach_token)
        if wait is not None and stream.has_dropped(received):
            self._give_up(wait, EndReason.CANCELLED)  # the client must send a continuation
        stream.check_kept(received)
        if wait is not None:
            self._drop(wait)
        stream.attach(reader, received, timeout_s)
        if wait is not None:
            stream.report_client(is_there=True)

    def uncount(self, stream: TextStream) -> None:
        """Stop counting a call that had attached to a stream, unless the stream waits again, or
        another call has attached to it."""
        if not (self.is_waiting(stream) or stream.is_read):
            stream.counted.release()

    def explain(self, stream: RequestStream[Any], explained: Explanation) -> Explanation:
        """Return the explanation of a stream, with a note if it waits for its client."""
        wait = self._waits.get(stream.attach_token)
        if wait is None:
            return explained
        return explained.waiting_for_client(max(0.0, wait.until - trio.current_time()))

    def close(self) -> None:
        """Give up every stream that waits, because the server drains, and let no more wait: no
        client could attach by a new connection, and a continuation works at another server."""
        self._is_closed = True
        for wait in list(self._waits.values()):
            self._give_up(wait, EndReason.SHUTDOWN)

    async def _expire(self, wait: _Wait) -> None:
        """Give a stream up at its window's end. Cancellation: the stream stays as it is."""
        with wait.scope:
            await trio.sleep_until(wait.until)
        if self._waits.get(wait.stream.attach_token) is wait:
            self._give_up(wait, EndReason.CANCELLED)

    def _give_up(self, wait: _Wait, reason: EndReason) -> None:
        self._drop(wait)
        self.remove(wait.stream)
        wait.stream.counted.release()
        wait.stream.cancel(reason)
        wait.stream.bill.give_up(wait.stream)

    def _drop(self, wait: _Wait) -> None:
        del self._waits[wait.stream.attach_token]
        wait.scope.cancel(reason="the stream waits no more")


class _Wait:
    """A waiting stream, the end of its window, and the scope of the task that ends the wait."""

    def __init__(self, stream: TextStream, window_s: float) -> None:
        self.stream = stream
        self.num_bytes = stream.kept_bytes
        self.until = trio.current_time() + window_s
        self.scope = trio.CancelScope()
