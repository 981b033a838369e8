"""Runs the tasks that serve requests, in one nursery that takes no task once the pool has ended.

Rule: a task that is started here is joined before the engine's block is left, whether its request
has ended or not.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class RequestTasks:
    """Starts tasks in one nursery, which is open from `running` to `close`."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    @property
    def is_open(self) -> bool:
        """Whether `start` takes tasks."""
        return self._nursery is not None

    def start(
        self, task: Callable[..., Awaitable[Any]], *arguments: object, name: str | None = None
    ) -> None:
        """Start ``task(*arguments)``. Never waits.

        Raises:
            ShuttingDown: the nursery is closed; nothing was started.
        """
        if self._nursery is None:
            raise ShuttingDown("the engine is closed")
        self._nursery.start_soon(task, *arguments, name=name)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take tasks from now until `close`, and wait for those that were started.

        Cancellation: cancels every task and waits for its end.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            yield

    def close(self) -> None:
        """Take no more tasks. Idempotent."""
        self._nursery = None
