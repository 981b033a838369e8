"""Control.WatchStats: streams snapshots of the server's figures.

Rule: a watcher costs one snapshot per second. A watcher that does not read costs nothing, because
the next snapshot is taken only after the last one has been read (D1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from engine.errors import Overloaded
from grpc_service.services import snapshots_codec

if TYPE_CHECKING:
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.services.backend import Backend

WATCH_INTERVAL_S = 1.0
WATCHERS_MAX = 64  # guess: more than a server's dashboards; snapshots take the engine's time

_watchers: set[object] = set()


async def watch_stats(backend: Backend, rpc: Rpc) -> None:
    """Write what GetStats would return, at once and then every `WATCH_INTERVAL_S`.

    Raises:
        Overloaded: there are `WATCHERS_MAX` watchers already.

    Cancellation: safe; every watch ends by it.
    """
    if len(_watchers) >= WATCHERS_MAX:
        raise Overloaded(f"{WATCHERS_MAX} clients watch already", retry_after_s=5.0)
    watcher = object()
    _watchers.add(watcher)
    try:
        while True:
            await rpc.call.write(snapshots_codec.encode_statistics(backend.statistics()))
            await trio.sleep(WATCH_INTERVAL_S)
    finally:
        _watchers.discard(watcher)
