"""Decodes requests: all but the small in threads, beside the loop that serves every stream.

Rule 1: more than `SMALL_BYTES` are judged, parsed, translated and checked in a thread. Rule 2: of
requests up to `LARGE_BYTES` one is decoded at a time, and one of larger ones, since threads share
Python's lock; holders of keys, and addresses without keys, take turns in each. Rule 3: a request
that waits for its turn stays in its call's body, where its bytes are counted, and it leaves the
queue when its call ends. Rule 4: of larger requests an owner has at most `DECODED_BYTES`, or one,
between decoding and the call's first answer: texts that wait for the tokenizer are memory, too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import DeadlineExceeded
from engine.replica.threads import WorkerThreads
from engine.requests.stream import server_deadline
from grpc_service.rpc.fairness import FairLock
from grpc_service.rpc.methods import take_request, wait_for_request

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.call import Call
    from grpc_service.rpc.methods import Method

# The worst request of so many bytes, five hundred empty messages of a chat, takes the loop 4 ms; a
# hop to a thread and back takes 0.2 ms. tests/unit/test_value_counts.py measures the first.
SMALL_BYTES = 2**10
LARGE_BYTES = 2**16  # guess: few honest requests are larger, and shorter ones do not wait for them
DECODED_BYTES = 2**21  # guess: enough to keep the tokenizer busy
DECODED_S = 5.0  # guess: a text of that size is tokenised in a second


class Decoding:
    """Reads the requests of calls. Made and used inside `trio.run`."""

    def __init__(self) -> None:
        self._medium, self._large = _Lane(), _Lane()
        self._room = _Room()

    async def request_of(self, method: Method, rpc: Rpc) -> Any:
        """Wait for the one request of a call, and return what its handler takes. From then on, when
        it has come whole, its time counts (`Rpc.arrived_at`).

        Raises:
            DeadlineExceeded: the deadline passed while the request waited for its turn.
            Exception: as `grpc_service.rpc.methods.read_request`.
        Cancellation: safe; a thread that decodes goes on to its end, which is waited for.
        """
        call = rpc.call
        decode = await wait_for_request(method, call)
        rpc.arrived_at = trio.current_time()
        num_bytes = call.request.next_bytes
        if num_bytes <= SMALL_BYTES:
            return decode(await take_request(method, call))
        lane = self._medium if num_bytes <= LARGE_BYTES else self._large
        owner = rpc.quota or call.connection.address
        with trio.move_on_at(server_deadline(rpc.arrived_at, call.time_remaining())):
            if num_bytes > LARGE_BYTES:
                call.on_answer = await self._room.take(owner, num_bytes)
            return await lane.decode(decode, method, call, owner)
        raise DeadlineExceeded(
            "the deadline passed in phase read, before the request was decoded",
            phase="read",
            tokens_done=0,
        )


class _Owned:
    """What one owner has of the room: the bytes and the time of each request, the first one first.
    ``num_waiting`` wait for room, of which the next one holds ``order``."""

    def __init__(self) -> None:
        self.taken: dict[object, tuple[int, float]] = {}
        self.num_waiting = 0
        self.order = trio.Lock()
        self.freed = trio.Event()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes are within the room, or alone in it."""
        used = sum(size for size, _ in self.taken.values())
        return not used or used + num_bytes <= DECODED_BYTES


class _Room:
    """Bounds what each owner has of large requests that are decoded and not answered (Rule 4). A
    request has its room for at most `DECODED_S`, so that one whose model is loaded or paused does
    not hold up its owner's others."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, _Owned] = {}

    async def take(self, owner: Hashable, num_bytes: int) -> Callable[[], None]:
        """Wait for room for a request, behind those that came before, and return a function that
        gives it back. Calling it again changes nothing.

        Cancellation: safe; the task leaves the queue.
        """
        owned = self._owners.setdefault(owner, _Owned())
        owned.num_waiting += 1
        try:
            async with owned.order:
                while not owned.has_room(num_bytes):
                    oldest, (_, since) = next(iter(owned.taken.items()))
                    owned.freed = trio.Event()
                    with trio.move_on_at(since + DECODED_S) as scope:
                        await owned.freed.wait()
                    if scope.cancelled_caught:
                        owned.taken.pop(oldest, None)
            key = object()
            owned.taken[key] = num_bytes, trio.current_time()
        finally:
            owned.num_waiting -= 1
            self._forget(owner, owned)
        return partial(self._give_back, owner, owned, key)

    def _give_back(self, owner: Hashable, owned: _Owned, key: object) -> None:
        owned.taken.pop(key, None)
        owned.freed.set()
        self._forget(owner, owned)

    def _forget(self, owner: Hashable, owned: _Owned) -> None:
        if not (owned.taken or owned.num_waiting) and self._owners.get(owner) is owned:
            del self._owners[owner]


class _Lane:
    """Decodes one request after another in a thread."""

    def __init__(self) -> None:
        self._turns = FairLock()
        self._limiter = trio.CapacityLimiter(1)

    async def decode(
        self, decode: Callable[[bytes], Any], method: Method, call: Call, owner: Hashable
    ) -> Any:
        async with self._turns.hold(owner):
            job = partial(decode, await take_request(method, call))
            return await WorkerThreads().run(job, self._limiter)
