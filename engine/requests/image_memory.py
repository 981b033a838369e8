"""Bounds the memory of images over all requests: of their files, and of decoded images.

A file of 100 bytes may become an image of 150 KB, so that neither the size of messages nor the
queue's tokens bound decoded images. Rule: requests get memory for decoded images in the order in
which they ask, and a request that waits for it can be cancelled at once; a request whose files find
no room is refused.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import trio

from engine.errors import Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set
    from contextlib import ExitStack

    from engine.core.common.types import RequestId

# Bytes of all requests' decoded images. A guess: 1,700 images of 224 × 224 pixels fit, the input of
# some tens of steps.
IMAGE_BYTES_MAX = 256 * 2**20
# One request's largest share of these bytes, so that one client leaves room for others. A guess.
REQUEST_SHARE = 1 / 4
# Bytes of the image files of all live requests: a photograph takes a second to decode, and arrives
# in less. A guess: sixty photographs of a phone.
FILE_BYTES_MAX = 256 * 2**20


class ImageFiles:
    """Counts the bytes of the image files of all live requests, as ``num_bytes``. Belongs to the
    Trio thread. ``of_guests`` returns how many of these bytes belong to requests whose clients are
    away: they are bounded elsewhere (`engine.requests.detached`), and take no room from others."""

    def __init__(self, of_guests: Callable[[], int] = lambda: 0) -> None:
        self._of_guests = of_guests
        self.num_bytes = 0

    def refusal(self, num_bytes: int) -> Overloaded | None:
        """Return why a request with files of ``num_bytes`` is refused; None if there is room."""
        if not num_bytes or self.num_bytes + num_bytes <= FILE_BYTES_MAX:
            return None
        held = self.num_bytes - self._of_guests()
        if not held or held + num_bytes <= FILE_BYTES_MAX:
            return None
        return Overloaded(
            f"the images of all requests would exceed {FILE_BYTES_MAX >> 20} MiB; try again later",
            retry_after_s=1.0,
        )

    def add(self, num_bytes: int) -> None:
        """Count a request's files from now on."""
        self.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Stop counting a request's files."""
        self.num_bytes -= num_bytes

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Count files during a block.

        Raises:
            Overloaded: there is no room for them.
        """
        if (error := self.refusal(num_bytes)) is not None:
            raise error
        self.add(num_bytes)
        try:
            yield
        finally:
            self.remove(num_bytes)


class ImageMemory:
    """Memory for decoded images. Belongs to the Trio thread.

    ``num_bytes`` bytes are held, by the requests ``holders``.
    """

    def __init__(self, max_bytes: int = IMAGE_BYTES_MAX) -> None:
        self.num_bytes = 0
        self.holders: set[RequestId] = set()
        self._max_bytes = max_bytes
        self._leaving: RequestId | None = None  # the holder that was cancelled last for others
        self._waiting: deque[_Waiter] = deque()

    @property
    def request_bytes_max(self) -> int:
        """The most bytes that one request may hold."""
        return int(self._max_bytes * REQUEST_SHARE)

    def check_count(self, field: str, count: int, each_bytes: int, hint: str = "") -> None:
        """Check that one request may hold so many images.

        Raises:
            RequestTooLarge: the images would take more than one request may have.
        """
        most = max(1, self.request_bytes_max // each_bytes)
        if count > most:
            what = f"has {count} images, of at most {most} in one request{hint}"
            raise RequestTooLarge.of(field, what)

    async def take(
        self,
        num_bytes: int,
        held: ExitStack,
        request_id: RequestId,
        on_short: Callable[[Set[RequestId]], RequestId | None] = lambda holders: None,
    ) -> None:
        """Wait for ``num_bytes`` bytes, at most `request_bytes_max`. ``held`` gives them back.
        ``on_short`` may be called with ``holders`` while memory is lacking, to cancel one of them;
        it returns that one's id, or None. It is not called again before that request's memory is
        back.

        Cancellation: nothing is held.
        """
        waiter = _Waiter(num_bytes, request_id, on_short, trio.Event())
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self._give_back(num_bytes, request_id)
            else:
                self._waiting.remove(waiter)
                self._grant()  # requests behind the cancelled one may need less
            raise
        held.callback(self._give_back, num_bytes, request_id)

    def _give_back(self, num_bytes: int, request_id: RequestId) -> None:
        self.num_bytes -= num_bytes
        self.holders.remove(request_id)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.num_bytes + self._waiting[0].num_bytes <= self._max_bytes:
            waiter = self._waiting.popleft()
            self.num_bytes += waiter.num_bytes
            self.holders.add(waiter.request_id)
            waiter.granted.set()
        if self._waiting and self._leaving not in self.holders:
            self._leaving = self._waiting[0].on_short(self.holders)


class _Waiter(NamedTuple):
    """A request that waits for memory, until ``granted`` is set."""

    num_bytes: int
    request_id: RequestId
    on_short: Callable[[Set[RequestId]], RequestId | None]
    granted: trio.Event
