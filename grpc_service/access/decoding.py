"""Decodes requests: all but small ones in threads, beside the loop that serves every stream.

Rule 1: a request of more than `SMALL_BYTES` is parsed and checked in a thread. Rule 2: only two
threads decode, one the requests of up to `LARGE_BYTES` and one the larger ones, since threads share
Python's lock; each serves holders of keys, and addresses without keys, in turn. Rule 3: a request
that waits for its turn stays in its call's body, where its bytes are counted, and it leaves the
queue when its call ends. Rule 4: requests above `LARGE_BYTES` that are decoded and not yet answered
have at most `DECODED_BYTES` per owner and `ALL_DECODED_BYTES` together, because texts that wait for
the tokenizer take memory, too. A single request may have more.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import DeadlineExceeded
from engine.replica.threads import WorkerThreads
from engine.requests.stream import server_deadline
from grpc_service.rpc.fairness import FairLock
from grpc_service.rpc.methods import decoder_of, take_request, wait_for_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.methods import Method

# The worst request of this size, five hundred empty messages of a chat, takes the loop 4 ms; a
# hop to a thread and back takes 0.2 ms. tests/unit/test_value_counts.py measures the 4 ms.
SMALL_BYTES = 2**10
LARGE_BYTES = 2**16  # guess: honest requests are seldom larger; shorter ones do not wait for larger
DECODED_BYTES = 2**20  # guess: enough to keep the tokenizer busy
ALL_DECODED_BYTES = 2 * DECODED_BYTES  # guess: room for two owners
DECODED_S = 5.0  # how long a request counts at most. Guess: a second tokenises 1 MiB of text


class Decoding:
    """Reads the requests of calls. Made and used inside `trio.run`."""

    def __init__(self) -> None:
        self._medium, self._large = _Lane(), _Lane()
        self._room = _Room()

    async def request_of(self, method: Method, rpc: Rpc) -> Any:
        """Wait for the request of a call, or its first message, and return what its handler takes.
        The call's timeout counts from the request's last byte (`Rpc.arrived_at`).

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

        async def take() -> bytes:
            return await take_request(method, call)

        def answer_frees(free: Callable[[], None]) -> None:
            call.on_answer = free

        deadline = server_deadline(rpc.arrived_at, call.time_remaining())
        owner = rpc.quota or rpc.address
        return await self.in_thread(decode, take, num_bytes, owner, deadline, answer_frees)

    async def next_of(self, method: Method, rpc: Rpc) -> Any:
        """Wait for the next message of a request that is a stream, and return what its handler
        takes; None behind the last one. The handler bounds what it has decoded.

        Raises:
            Exception: as `grpc_service.rpc.methods.read_request`.
        Cancellation: safe, as in `request_of`.
        """
        call = rpc.call
        if await call.read(stays=True) is None:
            return None
        decode, num_bytes = decoder_of(method, call), call.request.next_bytes
        if num_bytes <= SMALL_BYTES:
            return decode(await take_request(method, call))
        take, owner = partial(take_request, method, call), rpc.quota or rpc.address
        with ExitStack() as decoded:

            def decoding_frees(free: Callable[[], None]) -> None:
                decoded.callback(free)

            return await self.in_thread(decode, take, num_bytes, owner, math.inf, decoding_frees)

    async def in_thread(
        self,
        decode: Callable[[bytes], Any],
        take: Callable[[], Awaitable[bytes]],
        num_bytes: int,
        owner: Hashable,
        deadline: float,
        answer_frees: Callable[[Callable[[], None]], None],
    ) -> Any:
        """Return ``decode`` of the bytes of a request that ``take`` returns, in a thread, in the
        turn of its ``owner``. For a large one, ``answer_frees`` gets the function that is to be
        called at the first answer (Rule 4).

        Raises:
            DeadlineExceeded: the deadline passed while the request waited for its turn.
            Exception: as ``decode`` and ``take``.
        Cancellation: safe, as in `request_of`.
        """
        lane = self._medium if num_bytes <= LARGE_BYTES else self._large
        with trio.move_on_at(deadline):
            if num_bytes > LARGE_BYTES:
                answer_frees(await self._room.take(owner, num_bytes))
            return await lane.decode(decode, take, owner)
        raise DeadlineExceeded(
            "the deadline passed in phase read, before the request was decoded",
            phase="read",
            tokens_done=0,
        )


class _Share:
    """The bytes of requests that are decoded and not yet answered: at most ``most``, or a single
    request's. A request counts for at most `DECODED_S`, so that others do not wait for its model's
    load or pause. Tasks hold ``turns`` while they wait for room. ``num_users`` counts the requests
    that wait or are counted."""

    def __init__(self, most: int) -> None:
        self.turns = FairLock()
        self.taken: dict[object, tuple[int, float]] = {}  # bytes, and since when; in order of time
        self.num_users = 0
        self._most = most
        self._freed = trio.Event()

    async def wait_for_room(self, num_bytes: int) -> None:
        while self.taken and sum(size for size, _ in self.taken.values()) + num_bytes > self._most:
            oldest, (_, since) = next(iter(self.taken.items()))
            self._freed = trio.Event()
            with trio.move_on_at(since + DECODED_S) as scope:
                await self._freed.wait()
            if scope.cancelled_caught:
                self.free(oldest)

    def free(self, request: object) -> None:
        self.taken.pop(request, None)
        self._freed.set()


class _Room:
    """Bounds the bytes of large requests that are decoded and not yet answered (Rule 4)."""

    def __init__(self) -> None:
        self._all = _Share(ALL_DECODED_BYTES)
        self._owners: dict[Hashable, _Share] = {}

    async def take(self, owner: Hashable, num_bytes: int) -> Callable[[], None]:
        """Wait for room for a request, after its owner's earlier requests and in turn with other
        owners, and return a function that gives the room back. Calling it again changes nothing.

        Cancellation: safe; the task leaves the queue.
        """
        own = self._owners.setdefault(owner, _Share(DECODED_BYTES))
        with ExitStack() as leaving:
            own.num_users += 1
            leaving.callback(self._leave, owner, own)
            async with own.turns.hold(None):
                await own.wait_for_room(num_bytes)
                async with self._all.turns.hold(owner):
                    await self._all.wait_for_room(num_bytes)
                    request = object()
                    for share in (own, self._all):
                        share.taken[request] = num_bytes, trio.current_time()
                        leaving.callback(share.free, request)
            return leaving.pop_all().close

    def _leave(self, owner: Hashable, own: _Share) -> None:
        own.num_users -= 1
        if not own.num_users:
            del self._owners[owner]


class _Lane:
    """Decodes one request after another in a thread."""

    def __init__(self) -> None:
        self._turns = FairLock()
        self._limiter = trio.CapacityLimiter(1)

    async def decode(
        self,
        decode: Callable[[bytes], Any],
        take: Callable[[], Awaitable[bytes]],
        owner: Hashable,
    ) -> Any:
        async with self._turns.hold(owner):
            job = partial(decode, await take())
            return await WorkerThreads().run(job, self._limiter)
