"""The calls of a connection that have come, while their handlers lack what they need to begin.

A server that leaves waits until there are none (`RpcServer.settle`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.call import Call


class Arrivals:
    """The calls that have come and that their handlers have not taken. ``on_progress`` is called
    when the last one was taken or has ended."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._calls: dict[Call, None] = {}
        self._on_progress = on_progress

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Take note that a call has come."""
        self._calls[call] = None

    def note_taken(self, call: Call) -> None:
        """Take note that the handler has all that it needs, so that the call would be served now if
        no more calls were; or that the call has ended. Idempotent."""
        if call in self._calls:
            del self._calls[call]
            if not self._calls:
                self._on_progress()
