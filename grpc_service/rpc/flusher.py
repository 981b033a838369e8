"""Sends what was written to many connections at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpc_service.rpc.connection import Connection


class Flusher:
    """Sends what was written to many connections, each with one system call: at once or, between
    `hold` and `release`, at `release`. Each connection is then flushed once, whatever was written
    for it."""

    def __init__(self) -> None:
        self.touched: dict[Connection, None] = {}
        self._is_holding = False

    def touch(self, connection: Connection) -> None:
        """Note that ``connection`` has output."""
        if self._is_holding:
            self.touched[connection] = None
        else:
            connection.flush()

    def hold(self) -> None:
        """Collect output until `release`. Must not be nested."""
        self._is_holding = True

    def release(self) -> None:
        """Send the output that was collected since `hold`. Never raises."""
        self._is_holding = False
        touched, self.touched = self.touched, {}
        for connection in touched:
            connection.flush()
