"""Explains what a live request does and waits for, from the scheduler's state alone.

Rule 1: an explanation changes nothing, and never asks the worker, so a step in flight does not
delay it. Its time is bounded by the lengths of the waiting queue and of the running list, and by
the hashes of the prompt at the head of the queue, which are kept. Rule 2: the reasons come from
`admission`, which decides whether a sequence starts, and are not computed in a second way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.live_requests import (
    HELD_BY_NONE,
    HELD_WHILE_RUNNING,
    HELD_WHILE_WAITING,
    NOT_READ,
)
from engine.core.common.phases import Phase
from engine.core.common.types import Explanation
from engine.core.text import admission
from engine.core.text.drafting.draft_counts import counts_of
from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Set

    from engine.core.common.events import PauseMode
    from engine.core.text.guests import Guests
    from engine.core.text.ledger import Ledger
    from engine.core.text.outlook import Outlook
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import LiveText, Sequence

# The states of a choice, from the furthest behind to the furthest ahead.
_BEHIND = (State.PARKED, State.WAITING, State.RUNNING, State.ENDING)


class Explainer:
    """Explains requests of one scheduler."""

    def __init__(self, ledger: Ledger, guests: Guests, outlook: Outlook) -> None:
        self._ledger = ledger
        self._guests = guests
        self._outlook = outlook

    def explain(
        self,
        live: LiveText,
        now: float,
        *,
        tokens_per_s: float,
        run_s: float,
        steps: tuple[PlannedStep, ...],
    ) -> tuple[Explanation, Set[PauseMode]]:
        """Return what the choice that is furthest behind does, what it waits for unless the model
        is paused, and the pauses that hold it up.

        ``steps`` are the step that executes and the one that is prepared. ``tokens_per_s`` is the
        recent rate (`RecentRate`), ``run_s`` how long a sequence runs (`Endings`); both are 0 while
        unknown.
        """
        seq = self._furthest_behind(live)
        position = self._position(seq)
        lacking = self._lacking() if position else ""
        estimate_s: float | None = 0.0
        if position:
            estimate_s = self._estimate(position, lacking, now, tokens_per_s, run_s)
        counters = [item.drafting.counter for item in live.sequences if item.drafting is not None]
        drafts = counts_of(counters)
        explained = Explanation(
            state=seq.state.name,
            waiting_for=self._reason(seq, position, lacking, now, steps),
            position=position,
            estimate_s=estimate_s if position and not seq.is_known_to_worker else None,
            computed_tokens=_start_of_rows(seq, steps),
            blocks=len(seq.blocks),
            parked_s=seq.seconds_in(Phase.PARKED, now),
            drafted_tokens=sum([draft.drafted for draft in drafts]),
            accepted_tokens=sum([draft.accepted for draft in drafts]),
            drafts=drafts,
            prompt=self._outlook.state(live, now, steps, estimate_s if lacking else 0.0),
        )
        return explained, _held_by(seq)

    def _furthest_behind(self, live: LiveText) -> Sequence:
        there = [seq for seq in live.sequences if seq.state is not State.FINISHED]
        return min(there, key=lambda seq: (_BEHIND.index(seq.state), seq.num_computed, seq.choice))

    def _position(self, seq: Sequence) -> int:
        """Return the place in the queue, 1 for the first, 0 for a sequence that is not in the
        queue. A choice that will fork has its parent's place."""
        first = seq.live.parent if seq.is_attached else seq
        if first.state is not State.WAITING:
            return 0
        return self._ledger.waiting.position_of(first)

    def _lacking(self) -> str:
        """Return what the head of the queue lacks to start; empty if it only needs a step."""
        ledger = self._ledger
        head = ledger.waiting.items[0]
        if ledger.seats_over(head) > 0:
            return f"seats: {ledger.num_seats} of {ledger.config.max_num_seqs} sequences run"
        if (over := admission.states_over(ledger, head)) > 0:
            return f"state slots: {over} are lacking, parked requests or a step have them"
        lacking = admission.lacks(ledger, head)
        if lacking > 0:
            return f"KV blocks: {lacking} are lacking, {ledger.pool.num_free} are free"
        return ""

    def _estimate(
        self, position: int, lacking: str, now: float, tokens_per_s: float, run_s: float
    ) -> float | None:
        """Return in how many seconds the sequence at ``position`` starts; None if that is unknown.

        This is the time to compute the tokens ahead of it. If the head of the queue lacks
        something, it is the time in which enough running sequences end: of N that run for T seconds
        each, N / T end in a second. T is at least the mean time that the running sequences have run
        so far, because long ones may not have ended yet.
        """
        queue, running = self._ledger.waiting.items[:position], self._ledger.running
        if not lacking:
            ahead = sum([other.num_tokens for other in queue[:-1]])
            return ahead / tokens_per_s if tokens_per_s > 0 else None
        if run_s <= 0 or not running:
            return None
        so_far_s = sum([seq.run_s(now) for seq in running]) / len(running)
        seats = sum([self._ledger.seats_of(item) for item in queue])
        return seats * max(run_s, so_far_s) / self._ledger.num_seats

    def _reason(
        self,
        seq: Sequence,
        position: int,
        lacking: str,
        now: float,
        steps: tuple[PlannedStep, ...],
    ) -> str:
        if seq.state is State.PARKED:
            return self._guests.reason(seq.live, now) if seq.live.is_guest else NOT_READ
        if seq.state is State.ENDING:
            return "the step in flight, which still uses its blocks"
        if seq.state is State.RUNNING and seq.in_step:
            return ""
        if seq.is_background and self._ledger.background_gives_way():
            return "the others: it is background work"
        if seq.state is State.RUNNING:
            if not steps:
                return ""
            if self._ledger.shares.is_contested:
                return "its turn: other holders have had less of the machine, or its prompt no room"
            return "token budget: the step has no room for its prompt"
        if not position:
            return "the prompt, which another choice of the request computes"
        return self._reason_to_wait(seq, position, lacking, now)

    def _reason_to_wait(self, seq: Sequence, position: int, lacking: str, now: float) -> str:
        """Return what the head of the queue lacks, or that the requests ahead have a higher
        priority."""
        if position > 1:
            head = self._ledger.waiting.items[0]
            levels = [self._ledger.waiting.key_of(item, now)[0] for item in (head, seq)]
            if levels[0] < levels[1]:
                return "priority: requests that go before it are ahead"
        if lacking:
            return lacking
        return "token budget: the next steps compute what is ahead" if position > 1 else "a step"


def _held_by(seq: Sequence) -> Set[PauseMode]:
    waits_for_reader = seq.state is State.PARKED and not seq.live.is_guest
    if waits_for_reader or seq.state is State.ENDING:
        return HELD_BY_NONE
    may_go_on = seq.state is State.RUNNING or seq.is_known_to_worker
    return HELD_WHILE_RUNNING if may_go_on else HELD_WHILE_WAITING


def _start_of_rows(seq: Sequence, steps: tuple[PlannedStep, ...]) -> int:
    """Return how many of the sequence's tokens are certainly computed. Rows in plans are counted
    ahead (`Sequence.count_ahead`), so this is where the first of its rows begins."""
    starts = [
        row.start
        for step in steps
        for row, other in zip(step.rows, step.sequences, strict=True)
        if other is seq
    ]
    forks = [step for step in steps if seq in step.forks.get(seq.live.parent.sequence_id, ())]
    if forks:
        return 0
    return min(starts, default=seq.num_computed)
