"""Decodes requests: what is large in a thread, beside the loop that serves every stream.

Rule 1: more than `LARGE_BYTES` are judged, parsed, translated and checked in a thread, one request
at a time, since threads share Python's lock. Rule 2: holders of keys, and addresses without keys,
take turns. Rule 3: a request that waits for its turn stays in its call's body, where its bytes are
counted, and it leaves the queue when its call ends.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.replica.threads import WorkerThreads
from grpc_service.rpc.fairness import FairLock
from grpc_service.rpc.methods import decoder_of, take_request, wait_for_request

if TYPE_CHECKING:
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.methods import Method

LARGE_BYTES = 2**16  # the largest take the loop some milliseconds; a thread takes 0.2 ms. Guess


class Decoding:
    """Reads the requests of calls. Made and used inside `trio.run`."""

    def __init__(self) -> None:
        self._turns = FairLock()
        self._limiter = trio.CapacityLimiter(1)

    async def request_of(self, method: Method, rpc: Rpc) -> Any:
        """Wait for the one request of a call, and return what its handler takes. From then on, when
        it has come whole, its time counts (`Rpc.arrived_at`).

        Raises what `grpc_service.rpc.methods.read_request` raises.

        Cancellation: safe; a thread that decodes goes on to its end, which is waited for.
        """
        call = rpc.call
        await wait_for_request(method, call)
        rpc.arrived_at = trio.current_time()
        decode = decoder_of(method, call)
        if call.request.next_bytes <= LARGE_BYTES:
            return decode(await take_request(method, call))
        owner = rpc.quota or call.connection.address
        async with self._turns.hold(owner):
            job = partial(decode, await take_request(method, call))
            return await WorkerThreads().run(job, self._limiter)
