"""How a step can fail, and how long its parts took: the same for every kind of work.

Rule: every class here is a value that pickles without torch (D8).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.common.types import PlanId, SequenceId
    from engine.errors import FieldViolation


class RowPhase(StrEnum):
    """The work during which a row failed in a worker. The value is for the log."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"
    SAMPLE = "sample"
    TEXT = "text"  # making text of tokens
    REPLAY = "replay"  # following a constraint through tokens of an earlier stream
    ADAPTER = "adapter"  # looking up the row's adapter


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The failure of a single row: its sequence got nothing from the step.

    ``phase`` is what the worker did when the row failed. ``detail`` is for the log only.
    ``violation`` names the field of the request that is the cause, if one is.
    """

    sequence: SequenceId
    phase: RowPhase
    detail: str
    violation: FieldViolation | None = None

    @property
    def cause(self) -> str:
        """Why the sequence failed, for the log."""
        return f"{self.phase}: {self.detail}"


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The seconds that a step spent inside the worker, by part. ``draft_s`` is what a draft model
    took before the forward."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    text_s: float = 0.0
    draft_s: float = 0.0


class FailureKind(Enum):
    """Why a whole step failed."""

    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The failure of a whole step, whose execution raised an error. Of its plan, only the lists
    ``released`` and ``admitted`` took effect; the next plan does not repeat them."""

    plan_id: PlanId
    kind: FailureKind
    detail: str

    @property
    def cause(self) -> str:
        """Why the step failed, for the log."""
        what = "memory: " if self.kind is FailureKind.OUT_OF_MEMORY else ""
        return f"{what}{self.detail}"
