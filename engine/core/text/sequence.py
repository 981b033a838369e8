"""A live request and its sequences: the mutable state that the core keeps of each.

Rule 1: `Sequence.advance` is the only writer of ``state``. Rule 2: the other fields are written by
the ledger, the step being planned and the commit of its results; `admission` and `explain` only
read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.core.common.live_requests import LiveRequest
from engine.core.common.phases import Phase
from engine.core.common.types import BlockId, SequenceId, Timings, Usage
from engine.core.common.waiting_queue import BACKGROUND_FROM, aged_priority
from engine.core.text.drafting.draft_counts import counts_of
from engine.core.text.lifecycle import Event, State, advance

if TYPE_CHECKING:
    from engine.core.common.credit import Credit
    from engine.core.common.events import CoreRequest
    from engine.core.common.shares import Share
    from engine.core.common.waiting_queue import Key
    from engine.core.text.drafting.draft_lengths import Drafting
    from engine.core.text.types import Request

Rank = tuple[int, float, int]

PHASES = (Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.PARKED)


def waiting_key(request: CoreRequest, now: float, aging_s: float, tie: int) -> Key:
    """Return the request's key in the waiting queue: its priority after aging, then the earliest
    deadline, then arrival. Deadlines give the same order as the time left until them, and it need
    not be sorted again as time passes."""
    level = aged_priority(request, now, aging_s)
    deadline = math.inf if request.deadline is None else request.deadline
    return (level, deadline, request.arrival, tie)


class Sequence:
    """One choice of a request: its tokens, its blocks and its progress.

    Progress (D4): ``num_computed`` of ``num_tokens`` tokens are in the KV pool; a step computes
    some of the rest. Both run ahead of the steps in flight, so that the next plan can be prepared
    meanwhile (D9): a plan counts its rows as computed and the tokens that they will sample as known
    (`count_ahead`); undoing it takes both back (`count_back`). ``num_pending`` rows in flight
    sample a token; ``num_chunks`` compute a chunk of a prompt and sample none.

    ``blocks`` is the block table, empty unless the sequence holds blocks. ``keys`` are the
    prefix-cache keys of its full blocks, computed as needed. If its model has recurrent layers,
    ``state_slot`` is where its state is as long as it has blocks, and ``branch`` is the position up
    to which keys and values were cached when it started; keys and values behind the snapshot that
    it began from are computed again. ``is_attached``: this is a further choice of n > 1, and its
    parent still computes their prompt. ``wants_scores``: the prompt's log-probabilities are asked
    for, and this choice computes them. ``num_resumed`` tokens of a continued choice's output are
    older than the request. ``drafting`` records how many drafts were right; None before the first.
    ``num_reasoning`` is the worker's count of its reasoning, which comes with its end.
    """

    __slots__ = (
        "blocks",
        "branch",
        "cached_tokens",
        "choice",
        "credit",
        "drafting",
        "is_attached",
        "is_known_to_worker",
        "keys",
        "live",
        "max_tokens",
        "num_chunks",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_reasoning",
        "num_resumed",
        "num_tokens",
        "output",
        "phase",
        "phase_seconds",
        "phase_since",
        "rank",
        "request_id",
        "sequence_id",
        "state",
        "state_slot",
        "waiting_key",
        "wants_scores",
    )

    def __init__(self, sequence_id: SequenceId, live: LiveText, choice: int, now: float) -> None:
        self.sequence_id = sequence_id
        self.live = live
        self.choice = choice
        self.request_id = live.request.request_id
        self.credit = live.credit
        self.rank: Rank = (live.request.priority, live.request.arrival, sequence_id)
        self.state = State.WAITING
        self.is_attached = choice > 0 and not live.request.outputs
        self.is_known_to_worker = False
        self.blocks: list[BlockId] = []
        self.keys: list[bytes] = []
        self.state_slot: BlockId | None = None
        self.branch = 0
        outputs = live.request.outputs
        self.output: list[int] = list(outputs[choice] or ()) if outputs else []
        self.num_resumed = len(self.output)
        self.num_reasoning = 0
        self.num_prompt = len(live.request.prompt)
        self.max_tokens = live.request.stops.max_tokens
        self.num_tokens = self.num_prompt + self.num_resumed
        self.num_computed = 0
        self.num_pending = 0
        self.num_chunks = 0
        self.cached_tokens = 0
        self.drafting: Drafting | None = None
        prompt_logprobs = live.request.sampling.prompt_logprobs
        self.wants_scores = choice == 0 and prompt_logprobs is not None
        self.waiting_key: Key = ()
        self.phase = Phase.QUEUED
        self.phase_since = now
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.sequence_id} {self.state.value} "
            f"{self.num_computed}/{self.num_tokens} in {len(self.blocks)} blocks>"
        )

    @property
    def is_background(self) -> bool:
        """Whether the request is computed only while nothing else is to be."""
        return self.rank[0] >= BACKGROUND_FROM

    @property
    def has_sampled(self) -> bool:
        """Whether a token was sampled for the sequence."""
        return len(self.output) > self.num_resumed

    @property
    def has_ended(self) -> bool:
        """Whether the sequence's end has been reported."""
        return self.state in (State.FINISHED, State.ENDING)

    @property
    def in_step(self) -> int:
        """How many plans, executing or prepared, have a row or a fork for the sequence."""
        return self.num_pending + self.num_chunks

    @property
    def num_known(self) -> int:
        """Number of tokens whose ids are known: all but those that a step in flight samples."""
        return self.num_tokens - self.num_pending

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt's log-probabilities are still to be computed; then the whole prompt is
        computed, too, even if a part of it is cached."""
        return self.wants_scores and not self.output and self.num_computed < self.num_prompt - 1

    @property
    def request(self) -> Request:
        """The request of which the sequence is a choice."""
        return self.live.request

    @property
    def queued_tokens(self) -> int:
        """The tokens to compute when the sequence starts."""
        return self.num_tokens

    def key_in_queue(self, now: float, aging_s: float) -> Key:
        """Return the sequence's key in the waiting queue (`waiting_key`)."""
        return waiting_key(self.live.request, now, aging_s, self.sequence_id)

    def is_late(self, now: float) -> bool:
        """Return whether the request's deadline has passed."""
        return self.live.is_late(now)

    def advance(self, event: Event) -> None:
        """Change the state by the table of `engine.core.text.lifecycle`.

        Raises:
            IllegalTransition: The table has no such edge; the state is unchanged.
        """
        self.state = advance(self.state, event)

    def count_ahead(self, end: int, *, samples: bool) -> None:
        """Count a planned row as computed up to ``end``, and the token that it samples as known."""
        self.num_computed = end
        if samples:
            self.num_tokens += 1
            self.num_pending += 1
        else:
            self.num_chunks += 1

    def count_back(self, start: int, *, samples: bool) -> None:
        """Undo `count_ahead` of a row that began at ``start``."""
        self.num_computed = start
        if samples:
            self.num_tokens -= 1
            self.num_pending -= 1
        else:
            self.num_chunks -= 1

    def enter(self, phase: Phase, now: float) -> None:
        """Stop the clock of the sequence's phase so far, and start that of ``phase``."""
        self.phase_seconds[self.phase] += max(0.0, now - self.phase_since)
        self.phase = phase
        self.phase_since = now

    def seconds_in(self, phase: Phase, now: float) -> float:
        """Return the seconds spent in a phase so far."""
        running = max(0.0, now - self.phase_since) if self.phase is phase else 0.0
        return self.phase_seconds[phase] + running

    def run_s(self, now: float) -> float:
        """Return the seconds that the sequence has run so far, prefill and decode together."""
        return self.seconds_in(Phase.PREFILL, now) + self.seconds_in(Phase.DECODE, now)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the token ids at positions ``start … end - 1``, prompt and output together."""
        past = self.num_prompt
        if start >= past:
            return self.output[start - past : end - past]
        return [*self.live.request.prompt[start:end], *self.output[: max(0, end - past)]]

    def usage(self) -> Usage:
        """Return the usage so far; cached tokens count for the choice that computed the prompt."""
        counts = () if self.drafting is None else counts_of([self.drafting.counter])
        return Usage(
            self.num_prompt,
            self.cached_tokens,
            len(self.output),
            self.num_resumed,
            sum([count.drafted for count in counts]),
            sum([count.accepted for count in counts]),
            self.num_reasoning,
        )

    def timings(self) -> Timings:
        """Return the seconds by phase up to the last `enter`."""
        seconds = self.phase_seconds
        return Timings(
            queue_s=seconds[Phase.QUEUED],
            prefill_s=seconds[Phase.PREFILL],
            decode_s=seconds[Phase.DECODE],
            parked_s=seconds[Phase.PARKED],
        )


class LiveText(LiveRequest["Request"]):
    """A request between its admission and its last choice's end.

    ``is_guest``: its client has lost the connection, and may come back. ``root`` is the parent key
    of its first block in the prefix cache. ``share`` is that of its holder.
    """

    __slots__ = ("is_guest", "root", "sequences", "share")

    def __init__(self, request: Request, credit: Credit, share: Share, root: bytes = b"") -> None:
        super().__init__(request, credit)
        self.share = share
        self.sequences: list[Sequence] = []
        self.is_guest = False
        self.root = root

    @property
    def phase(self) -> Phase | None:
        """The phase of the request's first choice that has not ended; None if all have."""
        return next((seq.phase for seq in self.sequences if not seq.has_ended), None)

    @property
    def has_begun(self) -> bool:
        """Whether the worker knows a choice of the request, and not all choices have ended."""
        return not self.is_over and any(seq.is_known_to_worker for seq in self.sequences)

    @property
    def num_blocks(self) -> int:
        """How many blocks the request's sequences list; a shared block counts for each of them."""
        return sum([len(seq.blocks) for seq in self.sequences])

    @property
    def parent(self) -> Sequence:
        """The choice that computes the prompt for all choices."""
        return self.sequences[0]

    @property
    def attached(self) -> list[Sequence]:
        """Choices that still wait for the parent to compute their prompt."""
        return [seq for seq in self.sequences if seq.is_attached]

    @property
    def is_over(self) -> bool:
        """Whether the end of every choice has been reported."""
        return all(seq.has_ended for seq in self.sequences)
