"""The workers of a simulated world: fakes that answer wrongly, die or hang, and their watchdog.

Rule: only the production code's kill ends a hung step. The watchdog here only reports at the limit
that the step hangs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import WorkerLost
from engine.replica.watchdog import StepWatch, Watchdog
from engine.worker.fakes.encoder import FakeEncoder
from engine.worker.fakes.text import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode.types import EncodeResult
    from engine.core.text.plan import StepResult
    from engine.replica.replica import AnyRunner


class _Breaking:
    """A fake that keeps its contract up to step ``broken_at``."""

    broken_at: int | None = None

    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)  # type: ignore[misc]  # of the fake that it is mixed into
        is_whole = self.broken_at is None or self.steps <= self.broken_at  # type: ignore[attr-defined]
        return result if is_whole else self._break(result)

    def _break(self, result: Any) -> Any:
        raise NotImplementedError


class BreakingRunner(_Breaking, FakeRunner):
    """A text model that from then on answers with another plan's id."""

    def _break(self, result: StepResult) -> StepResult:
        return replace(result, plan_id=result.plan_id + 1)  # type: ignore[operator]


class BreakingEncoder(_Breaking, FakeEncoder):
    """An encoder that from then on gives one row's result to another."""

    def _break(self, result: EncodeResult) -> EncodeResult:
        return replace(result, rows=result.rows[1:] + result.rows[:1])


class WorkerProcess:
    """A fake in a process of its own (`engine.replica.replica.ProcessWorker`).

    The process may die and be killed; its death shows as a pipe's end, as in production.
    ``draw_death`` is called before each step, and may raise.
    """

    def __init__(self, runner: AnyRunner, draw_death: Callable[[WorkerProcess], None]) -> None:
        self._runner = runner
        self._draw_death = draw_death
        self.sentinel, self._alive = os.pipe()
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Any) -> Any:
        """Execute a plan, unless the process is dead."""
        if not self.is_dead:
            self._draw_death(self)
        if self.is_dead:
            raise self.lost()
        return self._runner.execute(plan)

    def lost(self) -> WorkerLost:
        """Return the error for a lost worker."""
        return WorkerLost("drawn")

    def kill(self, why: str) -> None:
        """Kill the process."""
        if not self.is_dead:
            self.is_dead = True
            os.close(self._alive)

    def rss_bytes(self) -> int:
        """Return the resident memory, which is none."""
        return 0

    def close(self) -> None:
        """Close the runner."""
        self.kill("closed")
        os.close(self.sentinel)
        self._runner.close()


class VirtualWatchdog(Watchdog):
    """`engine.replica.watchdog.Watchdog` without its thread: the world decides when it checks."""

    def watch(self, name: str, on_change: Callable[[], None]) -> StepWatch:
        """Return the watch of one model's steps."""
        watch = _VirtualStepWatch(name, self, on_change)
        self._watches = (*self._watches, watch)
        return watch

    def wake(self) -> None:
        """Do nothing: no thread sleeps."""

    def look(self) -> None:
        """Report each step that has run for the limit."""
        for watch in self._watches:
            if (
                watch.started_at is not None
                and trio.current_time() >= watch.started_at + self.limit_s
            ):
                watch.note_hung(watch.started_at)


class _VirtualStepWatch(StepWatch):
    __slots__ = ()

    def begin(self, step: int) -> None:
        super().begin(step)
        self.started_at = trio.current_time()
