"""Control.WatchStats: a snapshot now and then, for whoever keeps watching.

Rule: a watcher costs a snapshot a second, and one that does not read costs nothing: it gets the
next when it has read the last (D1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from engine.errors import Overloaded
from grpc_service import snapshots

if TYPE_CHECKING:
    from grpc_service.connections import Context
    from grpc_service.front import Front

WATCH_INTERVAL_S = 1.0
WATCHERS_MAX = 64  # guess: dashboards and people; each one's snapshots take the engine's time

_watchers: set[object] = set()


async def watch_stats(front: Front, context: Context) -> None:
    """Write what GetStats would answer, at once and then every `WATCH_INTERVAL_S`.

    Raises:
        Overloaded: `WATCHERS_MAX` watch already.
    Cancellation: safe; it is how a watch ends.
    """
    if len(_watchers) >= WATCHERS_MAX:
        raise Overloaded(f"{WATCHERS_MAX} clients watch already", retry_after_s=5.0)
    watcher = object()
    _watchers.add(watcher)
    try:
        while True:
            await context.write(snapshots.encode_statistics(front.statistics()))
            await trio.sleep(WATCH_INTERVAL_S)
    finally:
        _watchers.discard(watcher)
