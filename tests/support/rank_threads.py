"""The ranks of a divided model as threads of this process, for tests of what they compute.

In production each rank is a process, which takes seconds to start. The threads run the same
runners, which meet and add up in the same way.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.interface import MemoryEstimate, RunnerSpec
from engine.worker.text.interface import ModelInfo
from engine.worker.text.rank_runners import LeadingRunner, rank_runner
from tests.support.model_zoo import REFERENCE


class RankThreads:
    """A `TextRunner` of which every rank has a thread. ``ranks`` are the runners."""

    def __init__(self, directory: Path, *, size: int = 2, way: str = "", **fields: Any) -> None:
        self._meeting = os.memfd_create("ranks")
        spec = RunnerSpec(
            **({"model": str(directory), "kv_bytes": 1 << 24, "threads": 1} | fields),
            tp=size,
            rendezvous=f"/proc/self/fd/{self._meeting}",
        )
        self.ranks: list[LeadingRunner] = []
        for rank in range(size):
            runner = rank_runner(replace(spec, rank=rank))
            runner._chosen = ReferenceBackend() if way == REFERENCE else None
            self.ranks.append(runner)
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]

    def load(self, progress: Callable[[Any], None] = lambda progress: None) -> ModelInfo:
        """Load all ranks and return the first one's info."""
        info: ModelInfo = self.on_each(lambda runner: runner.load(progress))[0]
        return info

    def execute(self, plan: Any) -> Any:
        """Compute a plan on all ranks and return the first one's result."""
        return self.on_each(lambda runner: runner.execute(plan))[0]

    def compile(self, constraint: Any) -> int:
        """Compile a constraint, as the first rank alone does."""
        return self.ranks[0].compile(constraint)

    @property
    def tokenizer(self) -> Any:
        """The first rank's tokenizer."""
        return self.ranks[0].tokenizer

    def estimate(self) -> MemoryEstimate:
        """Return what all ranks will need."""
        each = self.on_each(lambda runner: runner.estimate())
        return replace(each[0], num_bytes=sum(one.num_bytes for one in each))

    def forget(self, constraint: Any) -> None:
        """Drop a compiled constraint, as the first rank alone does."""
        self.ranks[0].forget(constraint)

    def on_each(self, call: Callable[[LeadingRunner], Any]) -> list[Any]:
        """Call with every rank, each in its thread, and return the results.

        Raises:
            Exception: the error of the lowest rank that raised one.
        """
        jobs = [
            thread.submit(call, rank)
            for thread, rank in zip(self._threads, self.ranks, strict=True)
        ]
        errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Close all ranks and end their threads.

        The file of torch's store stays open: the store's destructor, which the garbage collector
        may call at any time, uses the file's descriptor, and aborts if that is a socket by then.
        """
        self.on_each(lambda runner: runner.close())
        for thread in self._threads:
            thread.shutdown()
