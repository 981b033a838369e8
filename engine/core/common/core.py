"""What a replica needs from a kind of work: the `Core` protocol, and its statistics.

A kind of work (text, encoders, drawing) is a request, a plan and a result. Its scheduler decides
what a step computes; its runner turns a plan into a result. The loop, the replica and the
supervisor know a scheduler by `Core` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.core.common.events import Journaled, RequestT, ResultT

if TYPE_CHECKING:
    from collections.abc import Sized

    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.common.phases import Phase
    from engine.core.common.types import DraftCounts, Explanation, PlanId, RequestId


class Plan(Journaled, Protocol):
    """One step that a runner executes."""

    @property
    def plan_id(self) -> PlanId:
        """The plan's number, which its result repeats."""
        ...

    @property
    def rows(self) -> Sized:
        """One entry for each sequence or input that the step computes."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        ...


PlanT = TypeVar("PlanT", bound=Plan)
PlanT_co = TypeVar("PlanT_co", bound=Plan, covariant=True)


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """A snapshot of one scheduler. A field that a kind of work does not have is 0.

    The first four count sequences, inputs of an encoder, or drawings: those in a step or ready for
    one, those that wait for their start, those parked because of their reader, and those that have
    ended while a step still uses what they hold. ``queued_tokens`` are the tokens of those that
    wait, and ``peak_waiting`` is how many have been in the queue at most. Blocks are of the KV
    pool, and states are the state slots of a model with recurrent layers, of which
    ``cached_states`` have a snapshot. The other fields count since the start; ``late_results`` are
    results for sequences that had ended.
    """

    running: int = 0
    waiting: int = 0
    parked: int = 0
    ending: int = 0
    queued_tokens: int = 0
    peak_waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    free_states: int = 0
    total_states: int = 0
    cached_states: int = 0
    step_count: int = 0
    step_rows_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    late_results: int = 0
    plans_discarded: int = 0
    drafts: tuple[DraftCounts, ...] = ()  # of each drafter


class CoreConfig(Protocol):
    """The limits of a scheduler that others read, too."""

    @property
    def max_queued_requests(self) -> int:
        """How many requests may wait for their start."""
        ...

    @property
    def stall_timeout_s(self) -> float:
        """How long a full stream may go unread, in seconds."""
        ...


class Core(Protocol[RequestT, PlanT_co, ResultT]):
    """One replica's scheduler: synchronous, not thread-safe, and never waits.

    Two methods drive it: `apply` takes everything that happens, `plan` returns the next step, whose
    `StepDone` or `StepFailed` must be applied before the next `plan`. Time comes as ``now``, in
    seconds of the engine's one clock; nothing here reads a clock.
    """

    @property
    def config(self) -> CoreConfig:
        """The scheduler's limits."""
        ...

    def apply(self, event: InputEvent[RequestT, ResultT], now: float) -> list[OutputEvent]:
        """Take one input event and return the output events that it caused, in order.

        Raises:
            EngineBug: The result is not of the plan in flight; nothing changed.
        """
        ...

    def plan(self, now: float) -> tuple[PlanT_co | None, list[OutputEvent]]:
        """Return the next step, or None if there is nothing to compute; and the output events that
        planning caused.

        Raises:
            EngineBug: A plan is in flight already.
        """
        ...

    def prepare(self, now: float) -> None:
        """Make the next plan while a step runs, so that `plan` only has to return it."""
        ...

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before, or None if it never will."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        ...

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether the request holds anything: a place in the queue, memory, a row."""
        ...

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a live request, or None if it is not live."""
        ...

    def has_begun(self, request_id: RequestId) -> bool:
        """Return whether the worker knows of a live request, because a step with a row of it has
        begun. A request of a prepared plan has not begun, whatever its phase."""
        ...

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Return what a live request does and waits for, or None if it is not live."""
        ...

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand."""
        ...

    def prefix_keys(self, request: RequestT) -> list[bytes]:
        """Return the keys of the prompt's parts that may be cached, for `cached_tokens`. The
        request need not be submitted. A kind of work without a prefix cache returns no keys."""
        ...

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return how many tokens of the prefix with these keys need not be computed here."""
        ...

    def check(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: It names the first invariant that does not hold.
        """
        ...
