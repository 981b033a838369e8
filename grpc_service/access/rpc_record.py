"""The records of calls: the caller's address and quota, and the values of the call's log line.

Rule: the code that admits a call makes one record for it and passes it to the call's handler;
nothing else keeps one. gRPC's calls have an `Rpc` (`grpc_service.access.interceptor`), requests
over HTTP have a record of their own kind (`grpc_service.openai`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.requests.quota import Origin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from engine.requests.quota import Quota
    from engine.requests.stream import RequestStream
    from grpc_service.rpc.call import Call


@dataclass(eq=False, slots=True, kw_only=True)
class CallRecord:
    """One call, whatever its protocol.

    ``method`` is its name in the log, ``peer`` its client's address as grpc writes it, and
    ``address`` the one by which use is counted. ``request_id`` is the client's own or one made for
    it. ``arrived_at`` is when the request had come whole, on Trio's clock. ``quota`` is the
    holder's, None for a call without one; ``num_counted`` requests are counted by ``counted_by``.
    ``is_operator``: the client may operate the server, and ask about everybody's requests.
    ``stream`` is set by the code that submits a request to the engine for this call. ``others`` are
    the accounts (`RequestStream.account`) of the other requests of a call that has several.
    """

    method: str
    peer: str
    address: str
    request_id: str = ""
    arrived_at: float = 0.0
    quota: Quota | None = None
    is_operator: bool = False
    counted_by: Quota | None = None
    num_counted: int = 0
    stream: RequestStream[Any] | None = None
    others: tuple[Mapping[str, str | int | float], ...] = ()

    @property
    def origin(self) -> Origin:
        """The request's id, quota and address, as `Engine.submit` takes them."""
        return Origin(self.request_id, self.quota, self.address)

    @property
    def only_of(self) -> str | None:
        """The name of the holder whose requests alone the client may end or ask about; None if it
        may do so with everybody's."""
        return None if self.is_operator else self.origin.holder

    @property
    def logged_id(self) -> str:
        """The request's id in the engine, or else the call's own; "-" for none."""
        if self.stream is not None:
            return self.stream.request_id
        return self.request_id or "-"

    def enter_quota(self, count: int = 1) -> None:
        """Count the call's requests against its holder's limits, if it has one, until
        `leave_quota`.

        Raises:
            Overloaded: the holder would run more requests than it may.
        """
        if self.quota is not None:
            self.quota.counted.enter(count)
            self.counted_by, self.num_counted = self.quota.counted, count

    def leave_quota(self) -> None:
        """End what `enter_quota` began. Idempotent."""
        if self.counted_by is not None:
            self.counted_by.leave(self.num_counted)
            self.counted_by = None


@dataclass(eq=False, slots=True, kw_only=True)
class Rpc(CallRecord):
    """One RPC, as its handler sees it. ``call`` is the gRPC call: what a handler reads and
    writes. ``read_next`` returns the next decoded message of a request that is a stream, and None
    behind the last one."""

    call: Call
    read_next: Callable[[], Awaitable[Any]] | None = None

    @classmethod
    def of(cls, call: Call) -> Rpc:
        """Return the record of a call that has just come."""
        address = call.connection.address
        return cls(call=call, method=call.method, peer=call.peer, address=address)
