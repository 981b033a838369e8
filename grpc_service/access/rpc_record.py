"""The record of one RPC: its caller's address and quota, and the values of its log line.

Rule: the interceptor (`grpc_service.access.interceptor`) makes one record for each call and passes
it to the call's handler; nothing else keeps one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.requests.quota import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.requests.quota import Quota
    from engine.requests.stream import RequestStream
    from grpc_service.rpc.call import Call


@dataclass(eq=False, slots=True)
class Rpc:
    """One RPC, as its handler sees it.

    ``call`` is the gRPC call: what a handler reads and writes. ``request_id`` is the client's own
    or one made for it. ``arrived_at`` is when the request's last byte had come, on Trio's clock.
    ``quota`` is the key holder's, None for a call without a key; ``leave_quota`` is called when the
    call has ended. ``stream`` is set by the code that submits a request to the engine for this RPC.
    """

    call: Call
    request_id: str = ""
    arrived_at: float = 0.0
    quota: Quota | None = None
    leave_quota: Callable[[], None] = lambda: None
    stream: RequestStream[Any] | None = None

    @property
    def origin(self) -> Origin:
        """The request's id, quota and address, as `Engine.submit` takes them."""
        return Origin(self.request_id, self.quota, self.call.connection.address)

    @property
    def logged_id(self) -> str:
        """The request's id in the engine, or else the RPC's own; "-" for none."""
        if self.stream is not None:
            return self.stream.request_id
        return self.request_id or "-"
