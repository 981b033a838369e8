"""The values that every kind of work has: ids, ends, usage, timings, explanations, statistics.

Rule: everything here is a frozen value that pickles without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    from engine.core.common.prompts import PromptState

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
PlanId = NewType("PlanId", int)


class EndReason(Enum):
    """Why a choice ended. STOP and LENGTH are successes; all others become an error status."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    STALLED = "stalled"
    SHUTDOWN = "shutdown"
    FAILED = "failed"

    @property
    def is_success(self) -> bool:
        """Whether the choice ended by STOP or LENGTH."""
        return self in (EndReason.STOP, EndReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one choice; ``cached_tokens`` of the prompt were in the prefix cache.
    ``resumed_tokens`` of the completion were generated for the requests that this one continues.
    ``drafted_tokens`` were guessed ahead; ``accepted_tokens`` of them are in the completion."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    resumed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a choice spent in each phase; together they are its time from arrival to end.

    ``load_s`` is the wait for the model, ``queue_s`` the rest of the time before its prompt is
    computed, including its tokenizing. The core itself counts both as ``queue_s``
    (`RequestStream.push` separates them).
    """

    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    parked_s: float = 0.0


class DraftCounts(NamedTuple):
    """Counts what one drafter has drafted: steps verified ``drafts`` drafts with ``drafted``
    tokens, of which ``accepted`` were right. ``by_position`` [k] counts the drafts whose token k,
    from 0, was right and came from this drafter; a token is right only if all tokens before it
    were."""

    drafter: str
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a live request is doing, and why.

    ``position`` is its place in the waiting queue: 1 starts next, 0 if it is not queued.
    ``estimate_s`` is the time until it starts, None if that is unknown or it has started.
    ``computed_tokens`` have their KV values in the pool. Over all its choices, ``drafted_tokens``
    were guessed ahead and ``accepted_tokens`` of them were right; ``drafts`` has each drafter's
    counts. ``prompt`` is None once a text request has its first token, and for other kinds of work.
    """

    state: str
    waiting_for: str = ""
    position: int = 0
    estimate_s: float | None = None
    computed_tokens: int = 0
    blocks: int = 0
    parked_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: tuple[DraftCounts, ...] = ()
    prompt: PromptState | None = None

    def waiting_for_client(self, left_s: float) -> Explanation:
        """Return this, noting that the request goes on for ``left_s`` seconds without a client."""
        what = f"its client, which lost its connection and has {left_s:.1f} s to attach"
        return replace(
            self, waiting_for=f"{self.waiting_for}; {what}" if self.waiting_for else what
        )


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """A snapshot of one scheduler: what every kind of work counts. A kind may have a class of its
    own with more.

    The first four fields count sequences, encoder inputs or drawings: ``running`` ones are in a
    step or ready for a step, ``waiting`` ones have not started, ``parked`` ones wait for their
    reader, and ``ending`` ones have ended while a step still uses their memory. ``queued_tokens``
    are the tokens in the queue, ``peak_waiting`` is the most entries it has had. The other fields
    count since the start; ``late_results`` are results for choices that had ended.
    """

    running: int = 0
    waiting: int = 0
    parked: int = 0
    ending: int = 0
    queued_tokens: int = 0
    peak_waiting: int = 0
    step_count: int = 0
    step_rows_total: int = 0
    prompt_tokens_total: int = 0
    late_results: int = 0
