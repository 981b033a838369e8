"""Which requests fit the model, and which prompts can be computed by their deadlines.

Rule: the decision has no effects, except that `StepTimes` notes a refused deadline. It takes
constant time, except where a deadline makes it look up the prompt's cached prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.text.memory.blocks import blocks_for
from engine.errors import DeadlineInfeasible, FieldViolation, RequestTooLarge

if TYPE_CHECKING:
    from engine.core.text.ledger import Ledger
    from engine.core.text.step_times import StepTimes
    from engine.core.text.types import Request


class Intake:
    """Decides which requests of one scheduler do not fit, or cannot be computed in time."""

    def __init__(self, ledger: Ledger, times: StepTimes) -> None:
        self._ledger = ledger
        self._times = times

    def misfit(self, request: Request, buffer: int) -> RequestTooLarge | None:
        """Return the error of a request that can never fit this model, or None. ``buffer`` is how
        many messages its stream holds."""
        violation = self._misfit(request, buffer)
        return None if violation is None else RequestTooLarge([violation])

    def _misfit(self, request: Request, buffer: int) -> FieldViolation | None:
        config, length = self._ledger.config, len(request.prompt)
        if length >= config.max_model_len:
            takes = f"the model takes at most {config.max_model_len - 1} and one to answer"
            return FieldViolation("input", f"has {length} tokens, but {takes}")
        can_run = min(config.max_num_seqs, buffer)
        if request.num_choices > can_run:
            return FieldViolation("n", f"is {request.n}, but {can_run} can run")
        copies = request.num_choices - 1 if length % config.block_size else 0
        if blocks_for(length, config.block_size) + copies > config.num_blocks:
            return FieldViolation(
                "n", f"is {request.n}, and as many copies of the prompt do not fit"
            )
        return None

    def infeasible(self, request: Request, now: float) -> DeadlineInfeasible | None:
        """Refuse a prompt that cannot be computed by its deadline, whatever else runs (D18). A
        cached prefix takes no time; it is looked up only if that can change the decision."""
        if request.deadline is None or request.deadline <= now:
            return None  # the deadline has passed, and the request's scope is about to end it
        left, length = request.deadline - now, len(request.prompt)
        if self._times.least_s(length) <= left:
            return None
        missing = length - self._ledger.cached_tokens(self._ledger.keys_of(request))
        seconds = self._times.least_s(missing)
        if seconds <= left:
            return None
        self._times.note_refusal(missing)
        return DeadlineInfeasible(
            f"the prompt takes at least {seconds:.3g} s, of which {left:.3g} s are left",
            phase=Phase.QUEUED.value,
        )
