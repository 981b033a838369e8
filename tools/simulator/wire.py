"""The front's side of a simulated world: asyncio's loop, turned by hand on Trio's thread.

Rule 1: `grpc_service.bridge` is the one that serves, with its queues, its courier and its credit;
what is replaced is the thread that asyncio's loop has there, and gRPC. Rule 2: asyncio's tasks move
only in a turn, each turn is `latency_s` after its cause, and all waiting is Trio's: so a world is a
function of its seed. Rule 3: the loop never looks at a file or at a clock of its own.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from grpc_service.bridge import Bridge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from engine.api import Engine

T = TypeVar("T")


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's loop, its other threads' door led to `on_call`, its timers to `on_timer`."""

    def __init__(
        self,
        on_call: Callable[[Callable[..., object]], None],
        on_timer: Callable[[float, Callable[..., object]], None],
    ) -> None:
        super().__init__()
        self._on_call = on_call
        self._on_timer = on_timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(0.0, callback, args, self, context)
        self._on_timer(delay, lambda: handle.cancelled() or callback(*args))
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        self._on_call(lambda: callback(*args))


class Wire:
    """Runs asyncio tasks that talk to ``bridge``. Made by `open_wire`."""

    def __init__(self, engine: Engine, latency_s: float) -> None:
        self.bridge = Bridge(engine, clock=trio.current_time)
        self.nursery: trio.Nursery  # of what asyncio's tasks wait for
        self.latency_s = latency_s
        self._posted: list[Callable[[], object]] = []
        self._has_posted = trio.Event()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._loop = _Loop(self.post, self._post_later)
        self.bridge.attach(self._loop)

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in the loop's next turn."""
        self._posted.append(callback)
        self._has_posted.set()

    def _post_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        async def wait() -> None:
            await trio.sleep(delay_s)
            self.post(callback)

        self.nursery.start_soon(wait)

    async def run(self) -> None:
        """Turn the loop whenever something was posted, until cancelled."""
        while True:
            await self._has_posted.wait()
            if self.latency_s:
                await trio.sleep(self.latency_s)
            self._has_posted = trio.Event()
            self._turn()

    def _turn(self) -> None:
        """Everything posted, and everything that follows from it without waiting."""
        posted, self._posted = self._posted, []
        for callback in posted:
            self._loop.call_soon(callback)
        while self._loop._ready:  # type: ignore[attr-defined]
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def close(self) -> None:
        """As the server's stop does: what still runs is cancelled, and must end."""
        self._turn()  # those that are to start, start
        for task in self._tasks:
            self._loop.call_soon(task.cancel)
        self._turn()
        left = [task for task in self._tasks if not task.done()]
        self._loop.close()
        assert not left, f"{left} outlive their cancellation"

    # ---- for Trio's tasks

    async def handle(self, handler: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a handler as an asyncio task, and give it once it has started."""
        started: list[asyncio.Task[None]] = []
        has_started = trio.Event()

        def start() -> None:
            task = self._loop.create_task(handler())
            self._tasks[task] = None
            started.append(task)
            has_started.set()

        self.post(start)
        await has_started.wait()
        return started[0]

    async def join(self, task: asyncio.Task[None]) -> None:
        """Wait for a handler's end; what it raised, a cancellation apart, is raised here."""
        has_ended = trio.Event()
        self.post(lambda: task.add_done_callback(lambda _: has_ended.set()))
        await has_ended.wait()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    # ---- for asyncio's tasks

    async def wait(self, waiting: Callable[[], Awaitable[object]]) -> None:
        """Let Trio wait for something; cancelling ends only the asyncio task's part."""
        future = self._loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        async def wait() -> None:
            await waiting()
            self.post(settle)

        self.nursery.start_soon(wait)
        await future


@asynccontextmanager
async def open_wire(engine: Engine, latency_s: float) -> AsyncIterator[Wire]:
    """A bridge to ``engine``, running until the block is left; then its calls are cut."""
    wire = Wire(engine, latency_s)
    async with trio.open_nursery() as nursery:
        wire.nursery = nursery
        try:
            await nursery.start(wire.bridge.run)
            nursery.start_soon(wire.run)
            yield wire
        finally:
            wire.close()
            nursery.cancel_scope.cancel(reason="the wire is closed")
