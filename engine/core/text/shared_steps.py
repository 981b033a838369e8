"""What the next step computes while several holders have requests.

Rule 1: the holders that are behind come first, and those far ahead are left out
(`engine.core.common.shares`). Within a holder the order is that of `StepBuilder`: rank for what
runs, and the queue for what waits. Rule 2: a holder that cannot be computed holds up nobody, and a
step is empty only if there is nothing to compute. Rule 3: memory goes from a holder to another only
if it then still has at least as much for its weight (`admission.victims_by_share`), so that they
never take it from each other in turn. If every holder lacks memory, the oldest sequence goes on,
whoever's it is (I10).
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from engine.core.text import admission
from engine.core.text.lifecycle import State
from engine.core.text.prices import price_alone
from engine.core.text.step_builder import StepBuilder, count_decodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core.common.shares import Share
    from engine.core.text.ledger import Ledger
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes


class SharedStepBuilder(StepBuilder):
    """Builds one step, in which holders share. ``times`` has what steps cost; the others are as for
    `StepBuilder`."""

    __slots__ = (
        "_able",
        "_is_by_rank",
        "_let_in",
        "_running",
        "_share",
        "_times",
        "_waiting",
    )

    def __init__(
        self,
        ledger: Ledger,
        now: float,
        times: StepTimes,
        prompt_limit: Callable[[int], int],
        on_preempt: Callable[[Sequence], None],
        *,
        only_begun: bool = False,
        but_background: bool = False,
    ) -> None:
        super().__init__(
            ledger,
            now,
            prompt_limit,
            on_preempt,
            only_begun=only_begun,
            but_background=but_background,
        )
        self._times = times
        self._let_in: list[Share] = []
        self._able = self._beside  # the running sequences of all holders that the step may have
        self._share: Share | None = None  # of the holder whose sequences may start now
        self._is_by_rank = False  # whether the oldest takes memory from anybody
        # Each holder's sequences in their order, so that a holder's turn costs no look at others'.
        self._running = _by_holder(self._able)
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
        active = order = ledger.shares.in_order()
        if self._but_background:
            able = {*self._running, *(seq.live.share for seq in super()._queue())}
            order = [share for share in active if share in able]
        if not order:
            return
        self._let(self._behind(order))
        if self._lacks_room_for_first():
            return
        may_start = self._plan_let_in(may_start=True)
        for share in order[len(self._let_in) :]:
            if self._step.rows:
                break
            # the others lack memory, or what is left of them is in the step in flight
            self._let([share])
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
        running = self._running.get(first, [])
        waiting = [seq for seq in self._ledger.waiting.items if seq.live.share is first]
        if self._but_background:
            waiting = [seq for seq in waiting if not seq.is_background]
        room = self._prompt_limit(count_decodes(running))
        alone_s = price_alone(self._times, [*running, *waiting], room)
        most = first.counter + alone_s / first.weight
        return [share for share in order if share.counter <= most]

    def _let(self, shares: list[Share]) -> None:
        """Let these holders in, and no others."""
        self._let_in = shares
        own = [seq for share in shares for seq in self._running.get(share, ())]
        self._beside = [seq for seq in own if seq.state is State.RUNNING]
        self._chunk_left = None

    def _plan_let_in(self, *, may_start: bool) -> bool:
        """Plan the rows of the holders that are let in, each one's running sequences before those
        that start. Return whether other holders may start sequences: not if one cannot for want of
        memory, which they would take as it becomes free."""
        ledger = self._ledger
        for share in self._let_in:
            self._plan_all_running(self._running.get(share, []))
            if may_start and ledger.waiting.items:
                self._share = share
                may_start = self._start_waiting()
        return may_start

    def _lacks_room_for_first(self) -> bool:
        """Preempt sequences so that the first waiting sequence of the holders that are let in can
        start. Return whether that has to wait until no step is in flight."""
        for share in self._let_in:
            self._share = share
            if self._first_waiting() is None:
                continue
            if self._may_preempt:
                self._make_room_for_first()
            elif self._victims_for_first():
                self._lacked_blocks = True
                return True
            return False
        return False

    # ---- what is a holder's

    def _queue(self) -> list[Sequence]:
        if self._waiting is None:
            self._waiting = _by_holder(super()._queue())
        if self._share is None:
            return []
        # Some have started or were parked since.
        own = self._waiting.get(self._share, ())
        return [seq for seq in own if seq.state is State.WAITING]

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        self._waiting = None

    def _victims_for_first(self) -> list[Sequence]:
        if (first := self._first_waiting()) is None:
            return []
        limit = self._prompt_limit(count_decodes(self._beside))
        return admission.victims_for_first(self._ledger, first, self._now, limit, self._let_in)

    def _victims_for_running(self, seq: Sequence, count: int) -> list[Sequence]:
        if self._is_by_rank:
            return super()._victims_for_running(seq, count)
        return admission.victims_by_share(self._ledger, seq, count)


def _by_holder(sequences: Iterable[Sequence]) -> dict[Share, list[Sequence]]:
    found: dict[Share, list[Sequence]] = {}
    for seq in sequences:
        found.setdefault(seq.live.share, []).append(seq)
    return found
