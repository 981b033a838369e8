"""The input and output events of a scheduler: the same for every kind of work.

Rule 1: a scheduler's `apply` takes the inputs in order; apart from `plan`, nothing else changes a
scheduler. Rule 2: an accepted request causes exactly one `Finished` for each choice; a refused
request causes exactly one `Refused` and nothing else. Rule 3: a journal line shows no prompt text,
no object addresses, and nothing that differs between two equal runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from engine.core.common.meter import Meter

if TYPE_CHECKING:
    from engine.core.common.credit import Credit
    from engine.core.common.phases import Phase
    from engine.core.common.steps import StepFailure
    from engine.core.common.types import (
        EndReason,
        PlanId,
        RequestId,
        Timings,
        Usage,
    )
    from engine.errors import FieldViolation, TrioletError


class Journaled(Protocol):
    """A value that goes into a scheduler or comes out of one."""

    def journal_line(self) -> str:
        """Return the value in one stable line, which simulations compare and a dump shows."""


class CoreRequest(Journaled, Protocol):
    """The properties of a request of any kind that the loop and the supervisor use.

    Times are seconds of the engine's one clock (D18).
    """

    @property
    def request_id(self) -> RequestId:
        """The core's name for the request, which is never used twice."""

    @property
    def arrival(self) -> float:
        """When the request reached the engine."""

    @property
    def deadline(self) -> float | None:
        """When the request must have ended; None without a deadline."""

    @property
    def priority(self) -> int:
        """The rank among waiting requests; the lowest starts first."""

    @property
    def holder(self) -> str:
        """Whose request it is (`engine.core.common.shares`); "" for all without a name."""

    @property
    def weight(self) -> int:
        """Its holder's part beside other holders."""

    @property
    def num_choices(self) -> int:
        """How many `Finished` events the request gets."""

    @property
    def num_tokens(self) -> int:
        """Tokens that wait in the queue until the request starts."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt or the inputs, as the request's usage reports them."""

    @property
    def num_tokens_ahead(self) -> int:
        """The most tokens that the request may need computed, output tokens included."""


class CoreResult(Protocol):
    """The result of one plan."""

    @property
    def plan_id(self) -> PlanId:
        """The number of that plan."""


RequestT = TypeVar("RequestT", bound=CoreRequest)
ResultT = TypeVar("ResultT", bound=CoreResult)


class Event:
    """An event. ``LINE`` is the format of its journal line; "" means the class's name."""

    __slots__ = ()
    LINE: ClassVar[str] = ""

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        return self.LINE.format(self) or type(self).__name__.lower()


class PauseMode(Enum):
    """What a pause does to requests (D19; control.proto, PauseMode)."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


# ---- inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit(Generic[RequestT]):
    """Submit a request, with the credit of the stream that gets its messages, and the meter of
    what it costs."""

    request: RequestT
    credit: Credit
    meter: Meter = field(default_factory=Meter)

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        return f"submit {self.request.journal_line()}"


@dataclass(frozen=True, slots=True)
class Cancel(Event):
    """End a request early. An unknown id is ignored, because the request has ended by itself in
    the meantime."""

    LINE = "cancel {0.request_id} {0.reason.value}"
    request_id: RequestId
    reason: EndReason


@dataclass(frozen=True, slots=True)
class ReaderDrained(Event):
    """A stream whose credit was starved (`Credit.mark_starved`) has free slots again."""

    LINE = "drained {0.request_id}"
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StepDone(Event, Generic[ResultT]):
    """The plan in flight was executed, with this result."""

    LINE = "done {0.result.plan_id}"
    result: ResultT


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The execution of the plan in flight raised an error."""

    LINE = "failed {0.failure.plan_id} {0.failure.kind.value}"
    failure: StepFailure


@dataclass(frozen=True, slots=True)
class Pause(Event):
    """Start no more steps, or no more requests, as ``mode`` says."""

    LINE = "pause {0.mode.value}"
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume(Event):
    """End a pause."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """End the requests whose end is due, such as stalled ones (`Core.next_wakeup`)."""


class KindEvent(Event):
    """An input that only some kinds of work handle; the other kinds ignore it."""

    __slots__ = ()


# The inputs that are the same for every kind of work.
ControlEvent: TypeAlias = Cancel | ReaderDrained | Pause | Resume | Tick
InputEvent: TypeAlias = Submit[RequestT] | StepDone[ResultT] | StepFailed | ControlEvent | KindEvent


# ---- outputs ---------------------------------------------------------------------------------


class OutputEvent(Journaled, Protocol):
    """An event that a scheduler emits about one request."""

    @property
    def request_id(self) -> RequestId:
        """The core's name for the request."""


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """The request is in the queue."""

    LINE = "  admitted {0.request_id} {0.prompt_tokens}"
    request_id: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a choice.

    ``matched`` is the stop string or stop token id that ended the choice, ``phase`` the phase in
    which it ended. ``detail`` describes a failure; ``violation`` names the field of the request
    that caused the failure.
    """

    request_id: RequestId
    choice: int
    reason: EndReason
    usage: Usage
    timings: Timings
    matched: str | int | None = None
    phase: Phase | None = None
    detail: str = ""
    violation: FieldViolation | None = None

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        name = f"{self.request_id}/{self.choice}"
        phase = "" if self.phase is None else self.phase.value
        return f"  finished {name} {self.reason.value} {phase}"


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """The request was not accepted, because of ``error``."""

    LINE = "  refused {0.request_id} {0.error.reason}"
    request_id: RequestId
    error: TrioletError
