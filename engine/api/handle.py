"""The base of all handles: their running calls, and whether they are closed.

Rule 1: a derived class has no flag and no event of its own for either.
Rule 2: `Handle.stop` and `Handle.close` only signal, whatever the state; they never wait.
Rule 3: a call that fails affects only its caller; the handle stays open.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from engine.core.common.types import EndReason
from engine.errors import RequestCancelled, ShuttingDown, StepFailed, TrioletError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Self

T = TypeVar("T")

log = logging.getLogger(__name__)


class Running(Protocol):
    """A request or a call that a handle can end: a `RequestStream`, or a `_Call`."""

    def cancel(self, reason: EndReason) -> None:
        """End the request or call. Never waits."""

    async def wait_closed(self) -> None:
        """Wait until the request or call has ended. Cancellation: only the waiting ends."""


class _Call:
    """One awaited call: its cancel scope and its end. ``ended`` is None until it begins."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended: trio.Event | None = None

    def cancel(self, reason: EndReason) -> None:
        """End the call; a call that has not begun will not begin."""
        self.scope.cancel(reason=reason.value)

    async def wait_closed(self) -> None:
        """Wait until the call has ended, if it has begun. Cancellation: only the waiting ends."""
        if self.ended is not None:
            await self.ended.wait()


class Handle:
    """An object that a Trio program uses for several requests. At the end of its ``async with`` a
    handle is closed, and its running requests and calls have ended.

    It has weak references only: the supervisor holds a stream, and its caller's frame holds a call;
    both leave the handle when they are garbage. ``name`` is its name in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_closed = False
        # The order is kept, so that a simulated run cancels in the same order every time.
        self._running: weakref.WeakKeyDictionary[Running, None] = weakref.WeakKeyDictionary()

    @property
    def is_closed(self) -> bool:
        """Whether new calls are refused."""
        return self._is_closed

    def _require_open(self) -> None:
        """Check that the handle is open.

        Raises:
            ShuttingDown: the handle is closed.
        """
        if self._is_closed:
            raise ShuttingDown(f"the {self._name} is closed")

    def _add(self, running: Running) -> None:
        """Register a running request or call, until it is garbage.

        Raises:
            ShuttingDown: the handle is closed; nothing was added.
        """
        self._require_open()
        self._running[running] = None

    def _call(self, job: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Return a coroutine that awaits ``job()`` as one call of the handle. The call counts from
        now on, and not only when the coroutine is awaited.

        Raises:
            ShuttingDown: the handle is closed; raised now. The coroutine raises what follows.
            RequestCancelled: `stop` or `close` came first; ``job`` may not have been called.
            StepFailed: the job raised something that is no TrioletError, which was logged and is
                the cause. The handle stays open, as after a TrioletError of the job.
        Cancellation: as the job's.
        """
        call = _Call()
        self._add(call)
        return self._run(call, job)

    async def _run(self, call: _Call, job: Callable[[], Awaitable[T]]) -> T:
        if not call.scope.cancel_called:
            call.ended = trio.Event()
            try:
                with call.scope:
                    return await job()
            except TrioletError:
                raise
            except Exception as error:
                log.exception("a call of the %s failed", self._name)
                raise StepFailed(
                    f"the model failed on this call of the {self._name}", log_detail=repr(error)
                ) from error
            finally:
                call.ended.set()
                self._running.pop(call, None)  # an error's traceback may hold the call for long
        raise RequestCancelled(f"the call was stopped by its {self._name}")

    def stop(self) -> None:
        """End everything that was asked for so far; the handle stays open. Idempotent; never
        waits."""
        for running in list(self._running):
            running.cancel(EndReason.CANCELLED)

    def close(self) -> None:
        """Refuse new calls, and `stop`. Idempotent; never waits."""
        self._is_closed = True
        self.stop()

    async def aclose(self) -> None:
        """Close as `close` does, and wait until everything that runs has ended. This takes as long
        as a call needs to notice its cancellation, and does not depend on any reader.

        Cancellation: only the waiting ends; the handle is closed.
        """
        self.close()
        for running in list(self._running):
            await running.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
