"""The tasks that serve one connection's calls.

A task waits until its call may begin, serves it, ends it if its deadline has passed, and charges
the connection's account for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc import accounts
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc_service.rpc.call import Call
    from grpc_service.rpc.fairness import StartLimiter
    from grpc_service.rpc.limits import Limits

    ServeCall = Callable[[Call], Awaitable[None]]

# Statuses of faulty requests, and of calls that clients ended before the answer.
CLIENTS_FAULTS = {
    *(StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED),
    *(StatusCode.OUT_OF_RANGE, StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED),
}
UNFINISHED = {None, StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED}


@dataclass(eq=False)
class CallTasks:
    """The tasks of one connection's calls, in ``nursery``. ``serve_call`` serves a call from its
    start to its end. ``on_end`` is called when a call's task ends. ``num_running`` tasks have not
    ended."""

    _nursery: trio.Nursery
    _start_limiter: StartLimiter
    _serve_call: ServeCall
    _on_end: Callable[[], None]
    _num_useless: int = 0  # tasks that wait to refuse their calls
    _has_room: trio.Event = field(default_factory=trio.Event)  # set when a call ends or starts
    num_running: int = 0

    def start(self, call: Call) -> None:
        """Serve a call in a task of its own."""
        self.num_running += 1
        self._nursery.start_soon(self._serve, call)

    async def wait_for_room(self, limits: Limits) -> None:
        """Wait while too many calls wait to be refused, or have not ended: a client may reset every
        call as soon as it has begun it.

        Cancellation: safe.
        """
        while (
            self.num_running > limits.calls_per_connection
            or self._num_useless > limits.refusals_queued_max
        ):
            self._has_room = trio.Event()
            await self._has_room.wait()

    async def _serve(self, call: Call) -> None:
        try:
            with call.scope:
                await self._begin(call)  # a call that is reset leaves the queue
                if call.refusal:
                    call.refuse()
                elif call.fault is not None:
                    await call.end(*call.fault.status)
                elif not call.is_late:
                    await self._serve_call(call)
            # The deadline cancelled the scope, before or after the call's start, or a reset did;
            # after a reset `end` does nothing.
            if call.scope.cancelled_caught or call.is_late:
                await call.end(StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        finally:
            _settle(call)
            call.release()
            self.num_running -= 1
            self._has_room.set()
            self._on_end()

    async def _begin(self, call: Call) -> None:
        """Wait until the call may be served: its client has opened a window for the answer, and
        `StartLimiter` lets it begin. A call that is to be refused needs no window.

        Cancellation: safe.
        """
        if not call.refusal and call.fault is None:
            call.scope.deadline = call.deadline
            try:
                await call.wait_for_window()
            except RpcError as fault:
                call.fault = fault.with_traceback(None)  # the traceback refers to the call
        is_useless = bool(call.refusal or call.fault)
        self._num_useless += is_useless
        try:
            await self._start_limiter.enter(call.connection.address)
        finally:
            self._num_useless -= is_useless
            self._has_room.set()


def _settle(call: Call) -> None:
    """Charge a call that has ended, or give back points for it. A call that
    failed by the server's fault costs nothing."""
    account, code = call.connection.account, call.code
    if code is StatusCode.OK:
        account.earn(accounts.GOOD_CALL)
    elif call.refusal or call.fault or call.request.is_faulty or code in CLIENTS_FAULTS:
        account.charge(accounts.FAILED_CALL)
        account.owe(accounts.FAILED_BYTE * call.request.num_received)
    elif code in UNFINISHED and not call.has_answered:
        account.owe(accounts.LOST_CALL)
