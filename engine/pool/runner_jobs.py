"""Runs jobs that block in worker threads: making runners, loading them, and closing them.

Rule: whatever such a job raises becomes an `Exception`, so that a library's SystemExit ends one
load and not the process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import trio

from engine.errors import SpawnFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.errors import TrioletError
    from engine.replica.replica import AnyRunner, ProcessWorker
    from engine.replica.threads import Threads

T = TypeVar("T")

log = logging.getLogger(__name__)

LOADS_AT_ONCE = 16  # threads for loads, and others for closes; a guess: loads mostly read files


class RunnerJobs:
    """Runs the jobs of all runners, each kind of job with its own limit on threads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._load_limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
        self._alone_limiter = trio.CapacityLimiter(1)
        self._close_limiter = trio.CapacityLimiter(LOADS_AT_ONCE)

    async def run_for_load(self, job: Callable[[], T], *, is_alone: bool = False) -> T:
        """Run ``job``, a part of a model's load, in a thread, and return its result. ``is_alone``:
        no two such jobs run at the same time.

        Raises:
            SpawnFailed: the job raised something that is not an `Exception`.
            Exception: the job raised it.
        Cancellation: before the job starts; a job that has started is waited for.
        """
        limiter = self._alone_limiter if is_alone else self._load_limiter
        return await self._threads.run(_as_failure(job), limiter)

    async def close(self, runner: AnyRunner) -> None:
        """Close a runner in a thread, because that may take a while. A failure is logged.

        Cancellation: the runner is closed all the same.
        """
        try:
            with trio.CancelScope(shield=True):
                await self._threads.run(_as_failure(runner.close), self._close_limiter)
        except Exception as error:
            log.error("a worker did not close", exc_info=error)

    async def close_all(self, runners: Iterable[AnyRunner]) -> None:
        """Close runners one after another, as `close`. Cancellation: all of them are closed."""
        for runner in runners:
            await self.close(runner)

    async def cause_of_death(self, process: ProcessWorker) -> TrioletError:
        """Return why a worker process died. Its exit status may come a moment after its death.

        Cancellation: before the job starts; a job that has started is waited for.
        """
        return await self._threads.run(process.lost, self._close_limiter)


def _as_failure(job: Callable[[], T]) -> Callable[[], T]:
    """Return ``job`` with every exception that is not an `Exception` turned into SpawnFailed."""

    def run() -> T:
        try:
            return job()
        except Exception:
            raise
        except BaseException as error:
            raise SpawnFailed(f"its loading raised {type(error).__name__}") from error

    return run
