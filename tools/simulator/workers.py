"""The workers of a simulated world: fakes that answer wrongly, die or hang, and who notices.

Rule: a hung step ends by nothing but the production code's kill: the watchdog here only tells,
at the limit, that it hangs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import WorkerLost
from engine.model.fake import FakeRunner
from engine.model.fake_encoder import FakeEncoder
from engine.watchdog import StepWatch, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode_types import EncodeResult
    from engine.core.plan import StepResult
    from engine.replica import AnyRunner


class _Breaking:
    """A fake that keeps its promises up to step ``broken_at``."""

    broken_at: int | None = None

    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)  # type: ignore[misc]  # of the fake that it is mixed into
        is_whole = self.broken_at is None or self.steps <= self.broken_at  # type: ignore[attr-defined]
        return result if is_whole else self._break(result)

    def _break(self, result: Any) -> Any:
        raise NotImplementedError


class BreakingRunner(_Breaking, FakeRunner):
    """From then on it answers another plan than it was asked."""

    def _break(self, result: StepResult) -> StepResult:
        return replace(result, plan_id=result.plan_id + 1)  # type: ignore[operator]


class BreakingEncoder(_Breaking, FakeEncoder):
    """From then on it gives one row's result to another."""

    def _break(self, result: EncodeResult) -> EncodeResult:
        return replace(result, rows=result.rows[1:] + result.rows[:1])


class WorkerProcess:
    """A fake in a process of its own, which may die and be killed: `engine.replica.Mortal`. Its
    death is a pipe's end, as there. ``draw_death`` is asked before each step, and may raise."""

    def __init__(self, runner: AnyRunner, draw_death: Callable[[WorkerProcess], None]) -> None:
        self._runner = runner
        self._draw_death = draw_death
        self.sentinel, self._alive = os.pipe()
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Any) -> Any:
        if not self.is_dead:
            self._draw_death(self)
        if self.is_dead:
            raise self.lost()
        return self._runner.execute(plan)

    def lost(self) -> WorkerLost:
        return WorkerLost("drawn")

    def kill(self, why: str) -> None:
        if not self.is_dead:
            self.is_dead = True
            os.close(self._alive)

    def rss_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.kill("closed")
        os.close(self.sentinel)
        self._runner.close()


class VirtualWatchdog(Watchdog):
    """`engine.watchdog.Watchdog` without its thread: it looks when the world says so."""

    def watch(self, name: str, on_change: Callable[[], None]) -> StepWatch:
        watch = _VirtualStepWatch(name, self, on_change)
        self._watches = (*self._watches, watch)
        return watch

    def wake(self) -> None:
        """There is no thread that sleeps."""

    def look(self) -> None:
        """Tell of each step that has run for the limit."""
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
