"""What happens to the scheduler, and what it says happened.

Rule 1: `Scheduler.apply` takes the inputs, in the order they are applied; `plan` aside, there
is no other way in. Rule 2: an accepted request emits exactly one `Finished` per choice, a
refused one exactly one `Refused` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from engine.core.credit import Credit
    from engine.core.encode_types import Encoded, EncodeRequest, EncodeResult
    from engine.core.plan import StepFailure, StepResult
    from engine.core.types import (
        EndReason,
        Request,
        RequestId,
        SequenceId,
        Timings,
        TokenLogprob,
        Usage,
    )
    from engine.errors import FieldViolation, TrioletError


class PauseMode(Enum):
    """What a pause does to the requests there are (D19)."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


# ---- inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A request and the credit of the stream its messages go to."""

    request: Request | EncodeRequest
    credit: Credit


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early; ``detail`` is for the log. Unknown ids are ignored: the request
    ended by itself in the meantime."""

    request_id: RequestId
    reason: EndReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReaderDrained:
    """A starved stream has slots again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StepDone:
    """The plan in flight was executed."""

    result: StepResult | EncodeResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The plan in flight raised."""

    failure: StepFailure


@dataclass(frozen=True, slots=True)
class Pause:
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix that no live sequence uses, and make the others unmatchable."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: act on what `next_wakeup` announced."""


InputEvent = (
    Submit
    | Cancel
    | ReaderDrained
    | StepDone
    | StepFailed
    | Pause
    | Resume
    | ResetPrefixCache
    | Tick
)


# ---- outputs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in the queue."""

    request_id: RequestId
    prompt_tokens: int


class Tokens(NamedTuple):
    """What one step gave one choice. ``text`` may be empty while a character is incomplete or
    a stop string may still form."""

    request_id: RequestId
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence lost its blocks and will be recomputed; nothing it sent changes."""

    request_id: RequestId
    sequence: SequenceId
    choice: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a choice. ``matched`` is the stop string or stop token id.
    ``detail`` (log only) tells more of a failure, ``phase`` where an early end met it,
    ``violation`` which field of the request made it fail."""

    request_id: RequestId
    choice: int
    reason: EndReason
    usage: Usage
    timings: Timings
    matched: str | int | None = None
    phase: str = ""
    detail: str = ""
    violation: FieldViolation | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was never accepted."""

    request_id: RequestId
    error: TrioletError


OutputEvent: TypeAlias = "Admitted | Tokens | Encoded | Preempted | Finished | Refused"
