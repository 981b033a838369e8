"""The frame of the runners that compute with torch in this process, whatever their kind of work.

Rule: every call sets the thread-local state that it needs, because each may come from another
thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from engine.errors import EngineBug
from engine.gc_tuning import collect_after_close, return_freed_memory
from engine.worker.failures import load_failures, step_failures
from engine.worker.forward.thread_state import thread_state
from engine.worker.load.devices import estimate_on
from engine.worker.load.resolve import short_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from engine.worker.interface import Inspection, LoadProgress, MemoryEstimate, RunnerSpec
    from engine.worker.tokenizing.tokenizer import HfTokenizer

PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")
InfoT = TypeVar("InfoT")


class InProcessRunner(Generic[PlanT, ResultT, InfoT]):
    """A `engine.worker.interface.Runner` without its model, which each kind of work loads and runs.

    Life: 1. made from a spec, which holds nothing; 2. `load`; 3. `execute`, any number of times;
    4. `close`, after which only `close` may be called.
    """

    NEEDS = "weights"  # what needs memory in a load, for messages

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._device = torch.device("cpu")
        self._tokenizer: HfTokenizer | Future[HfTokenizer] | None = None

    @property
    def tokenizer(self) -> HfTokenizer:
        """The model's tokenizer, for plain text. Valid after `load`. In a load's first step, this
        waits for the thread that builds it."""
        if isinstance(self._tokenizer, Future):
            self._tokenizer = self._tokenizer.result()
        if self._tokenizer is None:
            raise EngineBug("the tokenizer was asked for before the model was loaded")
        return self._tokenizer

    def estimate(self) -> MemoryEstimate:
        """Return the memory that `load` will need, from the config and the weight files' headers.

        Raises:
            SpawnFailed: the model cannot be served, as far as these files show.
        """
        found = self.inspect()
        return estimate_on(torch.device(found.device), found.num_bytes)

    def inspect(self) -> Inspection:
        """Return the model's kind and its parts' bytes. Raises as `estimate`."""
        with self._load_failures():
            return self._inspect()

    def load(self, progress: Callable[[LoadProgress], None]) -> InfoT:
        """Load the model and compute a first step.

        Raises:
            SpawnFailed: the model cannot be served; one sentence says why. Nothing is kept.
        """
        with self._load_failures(), thread_state(self._spec.threads, self._device):
            info = self._load(progress)
        return_freed_memory()
        return info

    def execute(self, plan: PlanT) -> ResultT:
        """Compute one step.

        Raises:
            MemoryError: the device ran out of memory.
            EngineBug: the plan does not fit what the runner keeps.
            Exception: the step failed in another way.
        """
        with step_failures(), thread_state(self._spec.threads, self._device):
            return self._execute(plan)

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._tokenizer = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        collect_after_close()

    def _inspect(self) -> Inspection:
        raise NotImplementedError

    def _load(self, progress: Callable[[LoadProgress], None]) -> InfoT:
        raise NotImplementedError

    def _execute(self, plan: PlanT) -> ResultT:
        raise NotImplementedError

    def _load_failures(self) -> AbstractContextManager[None]:
        """Return a context in which any failure of a load closes the runner and becomes a
        SpawnFailed of one sentence."""
        return load_failures(short_name(self._spec.model), self.close, needs=self.NEEDS)
