"""What the next step computes while several holders have requests.

Rule 1: the holders that are behind come first, and those far ahead are left out
(`engine.core.common.shares`). Within a holder the order is that of `StepBuilder`: rank for what
runs, and the queue for what waits. Steps are short (`StepTimes.short_step`), so that a holder that
comes waits little: their positions go to the holders in that order. A holder with more decodes than
its positions has them in turn. Rule 2: a holder that cannot be computed holds up nobody, and a
step is empty only if there is nothing to compute. Rule 3: memory goes from a holder to another only
if it then still has at least as much for its weight (`admission.victims_by_share`), so that they
never take it from each other in turn. If every holder lacks memory, the oldest sequence goes on,
whoever's it is (I10).
"""

from __future__ import annotations

from bisect import bisect
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.core.text import admission
from engine.core.text.lifecycle import State
from engine.core.text.step_builder import StepBuilder, count_decodes
from engine.core.text.step_times import TOKENS_EACH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core.common.shares import Share
    from engine.core.text.ledger import Ledger
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes


class _Part(NamedTuple):
    """A holder's part of a step. ``prompts`` and ``decodes`` are its running sequences; the decodes
    are in the order of their turns, and the first ``num_decodes`` may be in the step, beside
    ``num_prompt`` prompt tokens, of ``num_wanted`` that it has."""

    prompts: list[Sequence]
    decodes: list[Sequence]
    num_decodes: int
    num_prompt: int
    num_wanted: int

    def price(self, times: StepTimes) -> float:
        """Return what a step with this part alone costs, in seconds."""
        price = times.price_of_decodes(self.num_decodes) if self.num_decodes else 0.0
        num_prompt = min(self.num_prompt, self.num_wanted)
        return price + (times.price_of_prompts(num_prompt) if num_prompt else 0.0)


class SharedStepBuilder(StepBuilder):
    """Builds one step, in which holders share. ``times`` has what steps cost; the others are as for
    `StepBuilder`."""

    def __init__(
        self,
        ledger: Ledger,
        now: float,
        times: StepTimes,
        prompt_limit: Callable[[int], int],
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        super().__init__(ledger, now, prompt_limit, on_preempt)
        self.share()
        self._times = times
        self._let_in: list[Share] = []
        self._spares_others = False  # whether only background work gives its blocks away
        # The running sequences of all holders that the step may have, and each holder's sequences
        # in their order, so that a holder's turn costs no look at others'.
        self._able: list[Sequence] = []
        self._running: dict[Share, list[Sequence]] = {}
        self._positions = times.short_step()
        self._num_decodes = self._num_prompt = 0  # of those positions
        self._share: Share | None = None  # of the holder whose sequences may start now
        self._is_by_rank = False  # whether the oldest takes memory from anybody
        self._waiting: dict[Share, list[Sequence]] | None = None  # None: not looked up yet

    def build(self) -> PlannedStep | None:
        """Return the next step, as `StepBuilder.build`."""
        self._plan_by_holders()
        return self._finish()

    def build_ahead(self, executing: PlannedStep) -> PlannedStep | None:
        """Return the step after ``executing``, as `StepBuilder.build_ahead`."""
        self._may_preempt = False
        self._executing_keys = executing.pending_keys
        self._plan_by_holders()
        return self._finish()

    def _plan_by_holders(self) -> None:
        """Plan the rows of the holders that are let in, the one that is furthest behind first, and
        of others only as long as the step is empty."""
        ledger = self._ledger
        self._able, self._running = self._beside, _by_holder(self._beside)
        active = order = ledger.shares.in_order()
        if self._but_background:
            able = {*self._running, *(seq.live.share for seq in super()._queue())}
            order = [share for share in active if share in able]
        if not order:
            return
        behind = self._behind(order)
        self._let(behind)
        if self._lacks_room_for_first():
            return
        may_start = self._plan_let_in(may_start=True)
        for share in order:
            if self._step.rows:
                break
            if share in behind:
                continue
            # the others lack memory, or what is left of them is in the step in flight
            self._let([share])
            self._spares_others = True  # those let in before would take their blocks back
            if may_start and self._but_background and self._lacks_room_for_first():
                return
            may_start = self._plan_let_in(may_start=may_start)
        if not self._step.rows and self._lacked_blocks and self._may_preempt:
            self._is_by_rank = True
            self._let(order)
            self._plan_all_running(self._able.copy())
        if self._step.rows:
            computed = {seq.live.share for seq in self._step.sequences}
            self._step.passed = list(takewhile(lambda share: share not in computed, active))

    def _behind(self, order: list[Share]) -> list[Share]:
        """Return the least holder, and those that it would overtake by a step of its own."""
        first = order[0]
        alone_s = self._part_of(first, is_first=True).price(self._times)
        most = first.counter + alone_s / first.weight
        return [share for share in order if share.counter <= most]

    def _let(self, shares: list[Share]) -> None:
        """Let these holders in, and no others."""
        self._let_in = shares
        own = [seq for share in shares for seq in self._running.get(share, ())]
        self._beside = [seq for seq in own if seq.state is State.RUNNING]
        self._chunk_left = None

    def _part_of(self, share: Share, *, is_first: bool) -> _Part:
        """Return a holder's part of what is left of the step. The first holder may have more than
        that of prompts alone."""
        decodes, prompts, wanted = [], [], 0
        for seq in self._running.get(share, ()):
            if seq.state is State.RUNNING:
                missing = seq.num_tokens - seq.num_computed
                if missing == 1:
                    decodes.append(seq)
                else:
                    prompts.append(seq)
                    wanted += missing
        wanted += sum([seq.num_tokens for seq in self._waiting_of(share)])
        used = self._num_decodes + self._num_prompt + self._step.image_cost
        left, room = self._positions - used, self._ledger.config.max_num_batched_tokens - used
        if is_first:
            left = max(1, left) if decodes else max(left, self._times.short_prompts())
        left = min(left, room)
        # each decode has its token before prompts have more than their part
        num_prompt = min(wanted, left * TOKENS_EACH // (TOKENS_EACH + 1))
        num_decodes = min(len(decodes), left - num_prompt)
        if num_decodes < len(decodes):
            turn = bisect(decodes, share.turn, key=lambda seq: seq.rank)
            decodes = [*decodes[turn:], *decodes[:turn]]
        return _Part(prompts, decodes, num_decodes, left - num_decodes, wanted)

    def _plan_let_in(self, *, may_start: bool) -> bool:
        """Plan the rows of the holders that are let in, as long as there are positions. Return
        whether other holders may start sequences: not if one cannot for want of memory, which they
        would take as it becomes free."""
        for share in self._let_in:
            is_first = share is self._let_in[0] or not self._step.rows
            num_prompt = self._num_prompt + self._step.image_cost
            if not is_first and self._num_decodes + num_prompt >= self._positions:
                break
            part = self._part_of(share, is_first=is_first)
            if not is_first and part.num_decodes < len(part.decodes):
                break  # a few of its decodes alone would cost it nearly as much as all
            limit = self._prompt_limit(self._num_decodes + part.num_decodes)
            if not is_first and num_prompt > limit:
                break  # beside decodes a step has fewer prompt tokens
            self._chunk_left = max(0, min(part.num_prompt, limit - num_prompt))
            may_start = self._plan_part(share, part, may_start=may_start)
        return may_start

    def _plan_part(self, share: Share, part: _Part, *, may_start: bool) -> bool:
        """Plan a holder's rows, and return what `_plan_let_in` does."""
        rows, planned, cost = self._step.rows, len(self._step.rows), self._step.image_cost
        first, decodes = part.decodes[: part.num_decodes], part.decodes[part.num_decodes :]
        self._plan_all_running(sorted([*first, *part.prompts], key=lambda seq: seq.rank))
        if may_start and self._ledger.waiting.items:
            self._share = share
            may_start = self._start_waiting()
        most = part.num_decodes + part.num_prompt - (self._step.image_cost - cost)
        # Where prompts or some decodes cannot be computed, others have their positions.
        while decodes and (free := most - sum([row.count for row in rows[planned:]])) > 0:
            first, decodes = decodes[:free], decodes[free:]
            self._plan_all_running(first)
        if decodes:
            self._step.turns[share] = first[-1].rank
        self._note_planned(planned)
        return may_start

    def _note_planned(self, first: int) -> None:
        """Count the positions of the rows from a ``first`` on."""
        counts = [row.count for row in self._step.rows[first:]]
        num_decodes = counts.count(1)
        self._num_decodes += num_decodes
        self._num_prompt += sum(counts) - num_decodes

    def _lacks_room_for_first(self) -> bool:
        """Preempt sequences so that the first waiting sequence of the holders that are let in can
        start, and start it before any other row takes what they gave up. Return whether that has to
        wait until no step is in flight."""
        for index, share in enumerate(self._let_in):
            self._share = share
            if self._first_waiting() is None:
                continue
            if not self._may_preempt:
                self._lacked_blocks = bool(self._victims_for_first())
            elif self._make_room_for_first() and (first := self._first_waiting()) is not None:
                limit = self._prompt_limit(count_decodes(self._beside))
                most = min(self._part_of(share, is_first=not index).num_prompt, limit)
                # one position is left to the first holder, whoever starts
                self._chunk_left = min(most, self._ledger.config.max_num_batched_tokens - 1)
                self._start(first, admission.match(self._ledger, first))
                self._note_planned(0)
            return self._lacked_blocks
        return False

    # ---- what is a holder's

    def _queue(self) -> list[Sequence]:
        return [] if self._share is None else self._waiting_of(self._share)

    def _waiting_of(self, share: Share) -> list[Sequence]:
        if self._waiting is None:
            self._waiting = _by_holder(super()._queue())
        # Some have started or were parked since.
        return [seq for seq in self._waiting.get(share, ()) if seq.state is State.WAITING]

    def _chunk_of(self, seq: Sequence, remaining: int) -> int:
        return super()._chunk_of(seq, remaining) if self._chunk_room() else 0

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        self._waiting = None

    def _victims_for_first(self) -> list[Sequence]:
        if (first := self._first_waiting()) is None:
            return []
        limit = self._prompt_limit(count_decodes(self._beside))
        victims = admission.victims_for_first(self._ledger, first, self._now, limit, self._let_in)
        if self._spares_others and not all(victim.is_background for victim in victims):
            return []
        return victims

    def _victims_for_running(self, seq: Sequence, count: int) -> list[Sequence]:
        if self._is_by_rank:
            return super()._victims_for_running(seq, count)
        return admission.victims_by_share(self._ledger, seq, count)


def _by_holder(sequences: Iterable[Sequence]) -> dict[Share, list[Sequence]]:
    found: dict[Share, list[Sequence]] = {}
    for seq in sequences:
        found.setdefault(seq.live.share, []).append(seq)
    return found
