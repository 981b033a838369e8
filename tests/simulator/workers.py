"""The workers of a simulated world: fakes that answer wrongly, die or hang, and their watchdog.

Rule: only the production code's kill ends a hung step. The watchdog of this file only reports, at
the time limit, that a step hangs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.types import PlanId
from engine.errors import WorkerLost
from engine.replica.watchdog import StepWatch, Watchdog
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.image_generation import FakeImageGenerationRunner
from engine.worker.fakes.text import FakeRunner
from engine.worker.process.answers import GRACE_S, Answer, Answers, OutOfStep
from engine.worker.process.group import WorkerGroup
from engine.worker.process.messages import raised
from tests.simulator.counting import CountRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode.types import EncodeResult
    from engine.replica.replica import AnyRunner


class _Breaking:
    """A fake that keeps its contract up to step ``broken_at``."""

    broken_at: int | None = None

    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)  # type: ignore[misc]  # of the fake that it is mixed into
        is_whole = self.broken_at is None or self.steps <= self.broken_at  # type: ignore[attr-defined]
        return result if is_whole else self._break(result)

    def _break(self, result: Any) -> Any:
        """Return the result with another plan's id."""
        change = getattr(result, "_replace", None) or partial(replace, result)
        return change(plan_id=PlanId(result.plan_id + 1))


class BreakingRunner(_Breaking, FakeRunner):
    """A text model that after step ``broken_at`` answers with another plan's id."""


class BreakingEncoder(_Breaking, FakeEncoder):
    """An encoder that after step ``broken_at`` gives one row's result to another."""

    def _break(self, result: EncodeResult) -> EncodeResult:
        return replace(result, rows=result.rows[1:] + result.rows[:1])


class BreakingArtist(_Breaking, FakeImageGenerationRunner):
    """An image model that after step ``broken_at`` answers with another plan's id."""


class BreakingCounter(_Breaking, CountRunner):
    """A counting model that after step ``broken_at`` answers with another plan's id."""


class WorkerProcess:
    """A fake that behaves like a worker process (`engine.replica.replica.ProcessWorker`).

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


class FakeRank:
    """The process of one rank, as `engine.worker.process.worker_process.WorkerProcess`, as far as
    a group needs it. ``steps`` are the ids of its plans, the same on all ranks."""

    def __init__(self) -> None:
        self.sentinel, self._alive = os.pipe()
        self.is_alive = True
        self.steps: list[object] = []
        self.num_collectives = 0

    def kill(self, why: str) -> None:
        """Kill the process."""
        if self.is_alive:
            self.is_alive = False
            os.close(self._alive)

    def end(self, patience_s: float) -> str:
        """Return how the process ended; a killed process has ended at once."""
        return "ended"

    def ask_to_end(self) -> None:
        """Do nothing: `close` ends the process."""

    def close(self) -> None:
        """End the process and close its pipe."""
        self.kill("closed")
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def dump_stacks(self) -> None:
        """Do nothing."""

    def rss_bytes(self) -> int:
        """Return the resident memory, which is none."""
        return 0


class GroupWorker(WorkerProcess):
    """A fake like a group of processes: rank 0 has the runner, and the others only count.

    How it ends, and how it judges the ranks' answers, is production code (`WorkerGroup`,
    `Answers`). ``draw_failures`` returns the ranks that fail in a step by themselves, and where:
    before their collective or after it. ``on_violation`` is called with a description of each
    violation.
    """

    def __init__(
        self,
        runner: BreakingRunner,
        size: int,
        draw_death: Callable[[WorkerProcess], None],
        draw_failures: Callable[[int], dict[int, bool]],
        note_grace: Callable[[float], None],
        on_violation: Callable[[str], None],
    ) -> None:
        self._runner: BreakingRunner = runner
        self._draw_death = draw_death
        self._draw_failures = draw_failures
        self._note_grace = note_grace
        self._on_violation = on_violation
        self.ranks: Any = tuple(FakeRank() for _ in range(size))
        self.group = WorkerGroup("group", self.ranks)
        self.is_dead = False

    @property
    def sentinel(self) -> int:  # type: ignore[override]
        """The descriptor that shows the death of a rank."""
        return self.group.sentinel

    def execute(self, plan: Any) -> Any:
        """Execute a plan on every rank that is alive, and return what rank 0 computed."""
        if not self.is_dead:
            self._draw_death(self)
        if self.is_dead:
            raise self.lost()
        ranks = self.ranks
        answers = Answers(len(ranks), is_step=True)
        failures = self._draw_failures(len(ranks))
        if failures:
            self._runner.script.step_faults[self._runner.steps] = RuntimeError("drawn")
        result, error = self._execute_whole(plan)
        # If some ranks fail before the collective, the others wait in it, and never answer. If all
        # ranks fail, none waits: a device computes after its process has gone on.
        waits = len(failures) < len(ranks) and any(failures.values())
        for number, rank in enumerate(ranks):
            is_before = failures.get(number, False)
            rank.num_collectives += not is_before
            if error is None or (failures and number not in failures):
                if not waits:
                    rank.steps.append(plan.plan_id)
                    answers.take(number, Answer("done", None))
            elif is_before or not waits:
                answers.take(number, Answer("raised", raised(error, rank.num_collectives)))
        try:
            if not answers.is_over:
                self._note_grace(GRACE_S)
                raise answers.give_up()
            answers.in_order()
        except OutOfStep as lost:
            self.kill(str(lost))
            raise self.lost() from lost
        states = {(len(rank.steps), rank.num_collectives) for rank in ranks}
        if len(states) > 1:
            self._on_violation(f"the ranks of a group go on in different states: {states}")
        if error is not None:
            raise error
        return result

    def _execute_whole(self, plan: Any) -> tuple[Any, Exception | None]:
        """Execute a plan on rank 0. A fault of the runner happens on every rank alike."""
        try:
            return self._runner.execute(plan), None
        except Exception as error:
            return None, error

    def lost(self) -> WorkerLost:
        """End the group and return the error for a lost worker."""
        self.is_dead = True
        self.group.end(0.0)
        if any(rank.is_alive for rank in self.ranks):
            self._on_violation("a rank lives on after its group has ended")
        return WorkerLost("drawn")

    def kill(self, why: str) -> None:
        """Kill the group."""
        self.is_dead = True
        self.group.kill(why)

    def kill_rank(self, number: int) -> None:
        """Let one rank die."""
        self.is_dead = True
        self.ranks[number % len(self.ranks)].kill("drawn")

    def close(self) -> None:
        """Close the runner and every rank."""
        self.is_dead = True
        self.group.close()
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
