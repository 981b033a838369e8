"""The scheduler of a text model: one synchronous state machine.

The base class (`engine.core.common.core`) decides the order of calls; the parts do the work:
`Intake` refuses requests that do not fit, `StepBuilder` plans a step, `Committer` takes its
results, `Recovery` follows a failed one, `Endings` ends sequences, and the `Ledger` keeps where
each sequence is and what it holds.

Source: design D4–D7, D9, D17–D19.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from engine.core.common.core import Core
from engine.core.common.events import PauseMode
from engine.core.common.live_requests import Places
from engine.core.common.step_budget import StepBudget
from engine.core.common.steps import FailureKind
from engine.core.common.waiting_queue import BACKGROUND_FROM
from engine.core.text import admission
from engine.core.text.commit import Committer
from engine.core.text.drafting.drafts import Drafts
from engine.core.text.endings import Endings
from engine.core.text.explain import Explainer
from engine.core.text.guests import Guests
from engine.core.text.intake import Intake
from engine.core.text.ledger import Ledger
from engine.core.text.lifecycle import State
from engine.core.text.outlook import Outlook
from engine.core.text.plan import StepPlan, StepResult
from engine.core.text.planned_step import PlannedStep
from engine.core.text.prices import Metering, charge
from engine.core.text.recovery import Recovery
from engine.core.text.sequence import LiveText, Sequence
from engine.core.text.shared_steps import SharedStepBuilder
from engine.core.text.step_builder import StepBuilder
from engine.core.text.step_times import StepTimes
from engine.core.text.types import (
    ClientCame,
    ClientLeft,
    ObservePrefixes,
    Preempted,
    Request,
    ResetPrefixCache,
    TextStatistics,
)

if TYPE_CHECKING:
    from collections.abc import Set

    from engine.config import SchedulerConfig
    from engine.core.common.credit import Credit
    from engine.core.common.events import InputEvent
    from engine.core.common.shares import Share
    from engine.core.common.steps import StepFailure
    from engine.core.common.types import EndReason, Explanation, PlanId
    from engine.errors import FieldViolation, TrioletError

# Seconds for which steps stay short after another holder's last one: estimate, a reader's pause
# between two requests. A longer time would cost the holder that stays more.
SHARED_S = 5.0


class Scheduler(Core[Request, StepPlan, StepResult, LiveText, PlannedStep]):
    """One text model replica's scheduler."""

    config: SchedulerConfig
    aging_late_s = 1.0  # seconds; estimate: small beside the 10 s in which a priority rises

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ledger = Ledger(config, self.shares, self._requests, self._waiting, self._parked)
        self.prefixes = self._ledger
        self._guests = Guests(self._ledger)
        self._budget = StepBudget(config.max_num_batched_tokens)
        self._times = StepTimes(config)
        self._intake = Intake(self._ledger, self._times)
        self._metering = Metering(self._times)
        self._endings = Endings(self._ledger, self._events, self._metering)
        self._drafts = Drafts(self._ledger, self._times)
        self._committer = Committer(
            self._ledger, self._endings, self._drafts, self._events, self._counters
        )
        self._recovery = Recovery(self._ledger, self._budget, self._endings, self._note_preemption)
        self._prepared: PlannedStep | None = None
        self._charged: dict[Share, float] = {}  # for the step in flight
        self._shared_until = -math.inf  # steps are as short as with several holders
        self._preemptions = self._discarded = 0

    def __repr__(self) -> str:
        ledger = self._ledger
        return (
            f"<Scheduler {len(ledger.running)} running, {len(ledger.waiting)} waiting, "
            f"{len(ledger.parked)} parked, {ledger.pool.num_free} blocks free>"
        )

    def _apply_own(self, event: InputEvent[Request, StepResult], now: float) -> None:
        match event:
            case ClientLeft():
                self._guests.leave(event.request_id)
            case ClientCame():
                self._guests.come_back(event.request_id, now)
            case ResetPrefixCache():
                self._ledger.reset_cache()
            case ObservePrefixes():
                self._ledger.cache.observer = event.observer

    # ---- planning

    def _next_step(self, plan_id: PlanId, now: float) -> PlannedStep | None:
        step = self._use_prepared(now)
        if step is None and self._pause is not PauseMode.KEEP:
            step = self._build(now)
        if self._drafts.offers:
            self._drafts.widen(step, is_allowed=not self._recovery.is_under_way)
        if step is not None:
            step.seal(plan_id, now)
            if step.is_shared:
                for share, rank in step.turns.items():
                    share.turn = rank
                self._charged = {}
                if self.shares.is_counted:
                    self._charged = charge(step, self._times)
                    if self.shares.is_contested:
                        self.shares.pass_over(step.passed, self._charged)
                        self.shares.head_start = self._times.short_step_s()
                        self._shared_until = now + SHARED_S
                    self.shares.charge(self._charged)
        return step

    def prepare(self, now: float) -> None:
        """Make the next plan while a step runs, so that `plan` only has to return it (D9). Do
        nothing if no step is in flight, or if its result decides what the next step computes."""
        if self._step is None or self._prepared is not None or not self.config.prepared_plans:
            return
        if self._guests.must_settle():
            return
        # How many tokens a row with drafts makes is not known before it is computed.
        if self._pause is None and not self._recovery.is_under_way and not self._step.num_drafts:
            self._prepared = self._builder(now).build_ahead(self._step)

    def _use_prepared(self, now: float) -> PlannedStep | None:
        """Return the prepared step without ended sequences, now that the step before it is over."""
        if self._prepared is not None and (
            self._pause is not None
            or self._recovery.suspects
            or (self._prepared.started and any(seq.is_late(now) for seq in self._prepared.started))
            or (
                self._ledger.num_background
                and self._prepared.sequences[0].is_background
                and self._ledger.background_gives_way()
            )
        ):
            self._discard_prepared(now)
        step, self._prepared = self._prepared, None
        return step if step is not None and step.reconcile() else None

    def _discard_prepared(self, now: float) -> None:
        if self._prepared is not None:
            step, self._prepared = self._prepared, None
            step.undo(now)
            self._discarded += 1

    def _build(self, now: float) -> PlannedStep | None:
        """Return a step planned now: one row of a failed step alone, or else all that can go on."""
        self._guests.settle(now)
        while (suspect := self._recovery.next_suspect()) is not None:
            step = self._builder(now).build_alone(suspect)
            if step is not None:
                return step
        step, num_parked = self._builder(now).build(), -1
        # Planning may have parked those that held up others.
        while step is None and num_parked < len(self._parked):
            num_parked = len(self._parked)
            step = self._builder(now).build()
        if step is None and self._ledger.num_background:
            step = self._builder(now, gives_way=False).build()  # nobody else can be computed
        return step

    def _builder(self, now: float, *, gives_way: bool = True) -> StepBuilder:
        """Return a builder for one step. The budget of its prompt tokens is halved by running out
        of memory (D17). Without ``gives_way``, background work runs beside what else there is."""
        ledger, limit, note = self._ledger, self._prompt_limit, self._note_preemption
        builder: StepBuilder
        if self.shares.is_contested or now < self._shared_until:
            builder = SharedStepBuilder(ledger, now, self._times, limit, note)
        else:
            # A single holder pays if other replicas have others, but its steps are not short.
            builder = StepBuilder(ledger, now, limit, note)
            if self.shares.is_counted:
                builder.share()
        if self._pause is not None:  # what has begun goes on to its end, even after a preemption
            builder.only_begun = True
        if self._ledger.num_background and gives_way and self._ledger.background_gives_way():
            builder.leave_out_background()
        return builder

    def _prompt_limit(self, num_decodes: int) -> int:
        """Return how many prompt tokens a step may have beside ``num_decodes`` decodes (D4)."""
        num_sequences = len(self._ledger.running) + len(self._waiting)
        if self._ledger.num_background and self._ledger.background_gives_way():
            num_sequences = len(admission.others_running(self._ledger)) + len(self._waiting)
            num_sequences -= self._waiting.num_background
        num_sequences = min(num_sequences, self.config.max_num_seqs)
        return self._times.prompt_tokens(self._budget.tokens, num_sequences, num_decodes)

    def _note_preemption(self, seq: Sequence) -> None:
        self._preemptions += 1
        self._events.append(Preempted(seq.request_id, seq.sequence_id, seq.choice))

    # ---- requests and results

    def _misfit(self, request: Request, credit: Credit) -> TrioletError | None:
        return self._intake.misfit(request, credit.capacity)

    def _queued(self, request: Request) -> tuple[int, int]:
        is_background = request.priority >= BACKGROUND_FROM
        # guests in the queue, which the next plan may park
        guests = [x for x in self._guests.waiting() if x.is_background == is_background]
        num_waiting, num_tokens = super()._queued(request)
        return num_waiting - len(guests), num_tokens - sum([seq.num_tokens for seq in guests])

    def _infeasible(self, request: Request, now: float) -> TrioletError | None:
        return self._intake.infeasible(request, now)

    def _admit(self, request: Request, credit: Credit, now: float) -> LiveText:
        live, running = self._ledger.admit(request, credit, now), self._ledger.running
        begins = self.shares.is_contested and live.share.num_live == 1
        if begins or (running and live.parent.rank < running[-1].rank):
            self._discard_prepared(now)  # the request outranks a running row (D9), or all of them
        return live

    def _end(
        self,
        live: LiveText,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        self._endings.end_request(live, reason, now, detail, violation)

    def _reader_drained(self, live: LiveText, now: float) -> None:
        self._ledger.unpark(live, now)

    def _commit(self, step: PlannedStep, result: StepResult, now: float) -> None:
        self._recovery.step_succeeded()
        self._committer.commit(step, result, now)
        if self._ledger.parked.guests:
            self._guests.note_step(step.sequences, now)
        draft_s, seconds = result.timings.draft_s, now - step.started_at
        num_tokens = step.num_tokens - step.num_drafts
        self._rate.note(num_tokens, seconds)
        self._drafts.note_step(step, draft_s)
        self._times.note(step, num_tokens, seconds - draft_s)
        if step.is_shared and now < self._shared_until:
            self._times.note_shared(step, num_tokens, seconds - draft_s)

    def _step_failed(self, step: PlannedStep, failure: StepFailure, now: float) -> None:
        self._discard_prepared(now)
        step.undo(now)
        runs_again = len(step.sequences) > 1 or failure.kind is FailureKind.OUT_OF_MEMORY
        if step.is_shared and runs_again:
            self.shares.refund(self._charged)
        self._recovery.step_failed(step, failure, now)

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout, or when a guest goes on. None if there will be nothing."""
        # The loop calls this in every turn, and mostly nothing is parked.
        stall = super().next_wakeup(now) if self._parked else None
        guests = None if self._pause is PauseMode.KEEP else self._guests.next_wakeup(now)
        return guests if stall is None or (guests is not None and guests < stall) else stall

    def _explain(self, live: LiveText, now: float) -> tuple[Explanation, Set[PauseMode]]:
        outlook = Outlook(self._ledger, self._times, self._prompt_limit)
        return Explainer(self._ledger, self._guests, outlook).explain(
            live,
            now,
            tokens_per_s=self._rate.tokens_per_s,
            run_s=self._endings.run_s,
            steps=self._planned_steps(),
        )

    def statistics(self) -> TextStatistics:
        """Return the counters as they stand. The time grows with the number of live requests."""
        ledger = self._ledger
        states = ledger.states and ledger.states.pool
        return TextStatistics(
            **self._counts(),
            free_blocks=ledger.pool.num_free,
            total_blocks=ledger.pool.num_blocks,
            cached_blocks=ledger.pool.num_cached,
            free_states=states.num_free if states else 0,
            total_states=states.num_blocks if states else 0,
            cached_states=states.num_cached if states else 0,
            completion_tokens_total=self._committer.completion_tokens,
            prefix_queries=ledger.cache.queried_tokens,
            prefix_hits=ledger.cache.hit_tokens,
            preemptions=self._preemptions,
            plans_discarded=self._discarded,
            drafts=self._drafts.counts,
        )

    def _places(self) -> Places:
        ledger = self._ledger
        states = Counter(seq.state for seq in ledger.live_sequences())
        running, waiting = len(ledger.running), len(ledger.waiting)
        return Places(running, waiting, states[State.PARKED], states[State.ENDING])

    def _planned_steps(self) -> tuple[PlannedStep, ...]:
        return tuple([step for step in (self._step, self._prepared) if step is not None])

    def check(self) -> None:
        """Check the queue, the ledger (`Ledger.check`), and that every count of rows in flight and
        of promised message slots agrees with the planned steps.

        Raises:
            AssertionError: It names what does not agree.
        """
        super().check()
        self._ledger.check()
        steps = self._planned_steps()
        assert self._ledger.pool.num_open == len(steps)
        if (states := self._ledger.states) is not None:
            states.check(self._ledger.live_sequences(), [s.states for s in steps if s.states])
            assert states.pool.num_open == len(steps)
        rows = Counter(seq for step in steps for seq in step.sequences)
        rows.update(seq for step in steps for forks in step.forks.values() for seq in forks)
        for seq in self._ledger.live_sequences():
            assert seq.in_step == rows[seq], f"{seq} is in {rows[seq]} steps, not {seq.in_step}"
        promised: Counter[LiveText] = Counter()
        for step in steps:
            for seq, row in zip(step.sequences, step.rows, strict=True):
                forks = step.forks.get(seq.sequence_id, ())
                promised[seq.live] += (1 + len(forks)) if row.logits.samples else 0
        for name, live in self._ledger.requests.items():
            credit = live.credit
            assert credit.reserved == promised[live], f"{name}: {credit} for {promised[live]} rows"
