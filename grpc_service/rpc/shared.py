"""What the connections of one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.accounts import Addresses
    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.connection import Flusher
    from grpc_service.rpc.fairness import (
        FairLock,
        FairShareLimiter,
        OverheadLimiter,
        StartLimiter,
    )
    from grpc_service.rpc.held_bytes import HeldBytes
    from grpc_service.rpc.limits import Limits


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of one server share.

    ``decompressing`` is held by the connection that decompresses a large message. ``serve_call``
    serves a call from start to end. ``on_progress`` is called when a call has ended, and when
    waiting output was sent.
    """

    limits: Limits
    flusher: Flusher
    start_limiter: StartLimiter
    share: FairShareLimiter
    overhead: OverheadLimiter
    held: HeldBytes
    decompressing: FairLock
    serve_call: ServeCall
    on_progress: Callable[[], None]
    addresses: Addresses
