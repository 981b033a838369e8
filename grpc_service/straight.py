"""Writes that start where their event comes, while the RPC's task goes on waiting.

A task that is woken for each message costs its wake-up twice: for the event, and when the write is
done. Most messages are one event that nobody is ahead of, so the batch's own callback starts the
write, and grpc's future tells of its end. What a message costs: `python -m tools.bench front`.

Rule 1: one write at a time, and none while the task writes: `begin` is for a task that waits.
Rule 2: a write waits for asyncio's futures alone, which nobody cancels, as grpc.aio's do. It is not
run by a task: `asyncio.sleep`, timeouts and task groups are not for it.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Write = Coroutine[Any, Any, None]


class StraightWriter:
    """Runs writes of one RPC without a task, on the asyncio thread.

    ``start`` gives the write of an event, or None where the task is to do it. ``on_done`` is called
    after each, ``on_failed`` with what it raised. Both run in the context this was made in, when
    the write had to wait.
    """

    __slots__ = ("_context", "_on_done", "_on_failed", "_start", "_write")

    def __init__(
        self,
        start: Callable[[Any], Write | None],
        on_done: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._start = start
        self._on_done = on_done
        self._on_failed = on_failed
        self._context = copy_context()
        self._write: Write | None = None

    @property
    def is_writing(self) -> bool:
        return self._write is not None

    def begin(self, event: Any) -> bool:
        """Start to write ``event``. What the write raises goes to ``on_failed``. False: it is the
        task's to write."""
        try:
            self._write = self._start(event)
        except Exception as error:
            self._on_failed(error)
            return True
        if self._write is None:
            return False
        self._go_on()
        return True

    def _go_on(self, _future: object = None) -> None:
        """What a task does at each step: run on until the write waits, or is over."""
        assert self._write is not None
        try:
            future = self._write.send(None)
        except StopIteration:
            self._write = None
            self._on_done()
        except (Exception, asyncio.CancelledError) as error:
            self._write = None
            self._on_failed(error)
        else:
            future._asyncio_future_blocking = False  # somebody has heard that it is waited for
            future.add_done_callback(self._go_on, context=self._context)
