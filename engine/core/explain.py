"""Why a live request is where it is: a look at the scheduler that changes nothing.

Rule 1: constant time but for the line's and the running list's bounded lengths (and the hashes of
a prompt whose turn it is, kept for when it starts); never asks the worker, so that a step in
flight does not matter. Rule 2: what is said of a reason is what the planner acts on: its own
arithmetic is asked, not repeated.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from engine.core.events import PauseMode
from engine.core.lifecycle import State
from engine.core.types import Explanation

if TYPE_CHECKING:
    from engine.core.ledger import Ledger
    from engine.core.planner import PlannedStep, Planner
    from engine.core.sequence import LiveRequest, Sequence

# From the furthest behind: with several choices, the first state there is tells.
_BEHIND = (State.PARKED, State.WAITING, State.RUNNING, State.ENDING)


class Explainer:
    """Explains requests of one scheduler."""

    def __init__(self, ledger: Ledger, planner: Planner) -> None:
        self._ledger = ledger
        self._planner = planner

    def explain(
        self,
        live: LiveRequest,
        now: float,
        *,
        pause: PauseMode | None,
        tokens_per_s: float,
        run_s: float,
        steps: tuple[PlannedStep, ...],
    ) -> Explanation:
        """What the choice that is furthest behind does and waits for. ``steps``: executing and
        prepared. Of late, 0 while nothing is known: ``tokens_per_s`` were computed, and a sequence
        ran for ``run_s`` to its end."""
        seq = self._furthest_behind(live)
        position = self._position(seq)
        lacking = self._lacking() if position else ""
        is_to_start = position and pause is None and not seq.is_known_to_worker
        return Explanation(
            state=seq.state.name,
            waiting_for=self._reason(seq, position, lacking, now, pause, steps),
            position=position,
            estimate_s=self._estimate(position, lacking, now, tokens_per_s, run_s)
            if is_to_start
            else None,
            computed_tokens=_start_of_rows(seq, steps),
            blocks=len(seq.blocks),
            parked_s=seq.seconds_in("parked", now),
        )

    def _furthest_behind(self, live: LiveRequest) -> Sequence:
        there = [seq for seq in live.sequences if seq.state is not State.FINISHED]
        return min(there, key=lambda seq: (_BEHIND.index(seq.state), seq.num_computed, seq.choice))

    def _position(self, seq: Sequence) -> int:
        """1 for the first in line, its parent's for a choice that forks from it; 0 outside."""
        first = seq.live.parent if seq.is_attached else seq
        if first.state is not State.WAITING:
            return 0
        line = self._ledger.waiting
        return 1 + bisect_left(line, first.waiting_key, key=lambda other: other.waiting_key)

    def _lacking(self) -> str:
        """What keeps the line's head from its start; empty: nothing but the step."""
        ledger = self._ledger
        head = ledger.waiting[0]
        if ledger.num_seats + ledger.seats_of(head) > ledger.config.max_num_seqs:
            return f"seats: {ledger.num_seats} of {ledger.config.max_num_seqs} sequences run"
        lacking = self._planner.lacks(head)
        if lacking > 0:
            return f"KV blocks: {lacking} are lacking, {ledger.pool.num_free} are free"
        return ""

    def _estimate(
        self, position: int, lacking: str, now: float, tokens_per_s: float, run_s: float
    ) -> float | None:
        """How long until its start: as long as what is ahead takes to compute or, where the head
        has to wait for a sequence to end, as long as it takes that many sequences to end (of N
        that run for T each, N / T end in a second). Before those that run for long have ended, T is
        at least how long they have run."""
        line, running = self._ledger.waiting[:position], self._ledger.running
        if not lacking:
            ahead = sum([other.num_tokens for other in line[:-1]])
            return ahead / tokens_per_s if tokens_per_s > 0 else None
        if run_s <= 0 or not running:
            return None
        so_far_s = sum([seq.run_s(now) for seq in running]) / len(running)
        seats = sum([self._ledger.seats_of(one) for one in line])
        return seats * max(run_s, so_far_s) / self._ledger.num_seats

    def _reason(
        self,
        seq: Sequence,
        position: int,
        lacking: str,
        now: float,
        pause: PauseMode | None,
        steps: tuple[PlannedStep, ...],
    ) -> str:
        if seq.state is State.PARKED:
            return "reader: it has not read what was sent"
        if seq.state is State.ENDING:
            return "the step in flight, which still uses its blocks"
        may_go_on = seq.state is State.RUNNING or seq.is_known_to_worker
        if pause is PauseMode.KEEP or (pause is PauseMode.WAIT and not may_go_on):
            return f"resume: the model is paused ({pause.value})"
        if seq.state is State.RUNNING:
            is_left_out = bool(steps) and not seq.in_step
            return "token budget: the step has no room for its prompt" if is_left_out else ""
        if not position:
            return "the prompt, which another choice of the request computes"
        return self._reason_of_line(seq, position, lacking, now)

    def _reason_of_line(self, seq: Sequence, position: int, lacking: str, now: float) -> str:
        """What holds up the line's head, or that what is ahead has a higher priority."""
        if position > 1:
            head = self._ledger.waiting[0]
            levels = [self._ledger.waiting_key_of(one, now)[0] for one in (head, seq)]
            if levels[0] < levels[1]:
                return "priority: requests that go before it are ahead"
        if lacking:
            return lacking
        return "token budget: the next steps compute what is ahead" if position > 1 else "a step"


def _start_of_rows(seq: Sequence, steps: tuple[PlannedStep, ...]) -> int:
    """Where its rows in the plans begin: what is computed for certain. Plans count ahead."""
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
