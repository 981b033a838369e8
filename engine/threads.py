"""The one way into a worker thread.

Rule 1: nothing else calls `trio.to_thread`. Rule 2: a job is never abandoned: cancelling the
caller waits for the job's end, so whoever runs a step knows that it is over (R11, R202).

`Threads` is a protocol because virtual time cannot overtake a real thread (Trio issue 456): the
simulator injects one that runs the job inline and sleeps its virtual cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Threads(Protocol):
    """Runs blocking jobs beside the event loop."""

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``job`` in a thread of ``limiter`` and give its result or raise its exception.

        Cancellation: looked at before the job starts; a started job is waited for, and its
        result is returned without a checkpoint after it. Store it before awaiting anything.
        """
        ...


class WorkerThreads:
    """`Threads` by Trio's thread cache. A hop costs about 0.1 ms (R26, R32)."""

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        return await trio.to_thread.run_sync(job, abandon_on_cancel=False, limiter=limiter)
