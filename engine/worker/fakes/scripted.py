"""The base of all fake runners: the costs and failures of steps come from a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.core.common.steps import RowFailure, RowPhase
from engine.worker.fakes.tokenizer import FakeTokenizer
from engine.worker.interface import LoadProgress, MemoryEstimate

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.common.types import SequenceId
    from engine.worker.fakes.text import FakeScript


PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")


class ScriptedRunner(Generic[PlanT, ResultT]):
    """A runner without a model, which describes itself by ``info``. ``steps`` counts the executed
    steps, and ``is_executing`` is set during one."""

    def __init__(self, script: FakeScript, info: Any) -> None:
        self.script = script
        self.info = info
        self.steps = 0
        self.is_executing = False

    @property
    def tokenizer(self) -> FakeTokenizer:
        """A tokenizer that follows the script."""
        return FakeTokenizer(self.script)

    def execute(self, plan: PlanT) -> ResultT:
        """Compute a plan, with the costs and faults of the script.

        Raises:
            RuntimeError: Another step is running. AssertionError: The plan breaks a rule of its
                kind of work. BaseException: A fault of the script.
        """
        if self.is_executing:
            raise RuntimeError("two steps at once on one worker")
        self.is_executing = True
        try:
            return self._execute(plan)
        finally:
            self.is_executing = False

    def _execute(self, plan: PlanT) -> ResultT:
        raise NotImplementedError

    def estimate(self) -> MemoryEstimate:
        """Return the ``memory_bytes`` of the runner's info."""
        return MemoryEstimate(self.info.memory_bytes)

    def load(self, progress: Callable[[LoadProgress], None]) -> Any:
        """Sleep as long as the script says, then return the info.

        Raises:
            BaseException: The script's ``load_error``.
        """
        progress(LoadProgress("weights"))
        self.script.sleep(self.script.load_s)
        if self.script.load_error is not None:
            raise self.script.load_error
        return self.info

    def _spend(self, num_tokens: int) -> float:
        """Count a step and sleep for its cost by the script. Return the seconds."""
        script, step = self.script, self.steps
        self.steps += 1
        cost = script.step_s + script.token_s * num_tokens + script.step_costs.get(step, 0.0)
        if cost:
            script.sleep(cost)
        return cost

    def _row_fault(self, sequence: SequenceId) -> RowFailure | None:
        """Return the failure of a row that the script's ``sample_fault`` draws, or None."""
        draw = self.script.sample_fault
        phase = None if draw is None else draw()
        return None if phase is None else RowFailure(sequence, RowPhase(phase), "drawn")

    def _fail(self, plan: PlanT, fault_of: Callable[[PlanT], BaseException | None] | None) -> None:
        """Raise the error that the script has for the number of this step, or else the one that
        ``fault_of`` returns for the plan. Return if there is neither."""
        fault = self.script.step_faults.get(self.steps - 1)
        if fault is None and fault_of is not None:
            fault = fault_of(plan)
        if fault is not None:
            raise fault
