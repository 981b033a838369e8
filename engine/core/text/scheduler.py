"""The scheduler of a text model: one synchronous state machine.

Rule 1: two methods drive it. `apply(event, now)` takes everything that happens and returns the
events that it caused, in order; `plan(now)` returns the next step, whose `StepDone` or `StepFailed`
must be applied before the next `plan` (design D2, D4). Rule 2: time comes as ``now``, never from a
clock. Rule 3: each accepted choice emits exactly one `Finished`.

The scheduler decides what comes after what; its parts do the work: `Intake` accepts requests,
`StepBuilder` plans a step, `Committer` takes its results, `Recovery` follows a failed one,
`Endings` ends sequences, and the `Ledger` keeps where each sequence is and what it holds.

Source: etcd raft's Ready/Advance for the shape; design D4–D7, D17–D19 for the contents.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from engine.core.common.core import CoreStatistics
from engine.core.common.events import (
    Admitted,
    Cancel,
    ClientCame,
    ClientLeft,
    ObservePrefixes,
    OutputEvent,
    Pause,
    PauseMode,
    ReaderDrained,
    Refused,
    ResetPrefixCache,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.stalls import next_stall
from engine.core.common.step_budget import StepBudget
from engine.core.common.types import EndReason, Explanation, PlanId, RequestId
from engine.core.text.commit import Committer
from engine.core.text.drafts import Drafts
from engine.core.text.endings import Endings
from engine.core.text.explain import Explainer
from engine.core.text.guests import Guests
from engine.core.text.intake import Intake
from engine.core.text.ledger import Ledger
from engine.core.text.lifecycle import State
from engine.core.text.recovery import Recovery
from engine.core.text.speeds import Speeds
from engine.core.text.step_builder import StepBuilder
from engine.core.text.types import Preempted
from engine.errors import EngineBug

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.common.events import InputEvent
    from engine.core.common.phases import Phase
    from engine.core.text.plan import StepPlan, StepResult
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import LiveRequest, Sequence
    from engine.core.text.types import Request


class Scheduler:
    """One text model replica's scheduler. Synchronous, not thread-safe, and never waits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._events: list[OutputEvent] = []  # of the call in progress; all parts append to it
        self._ledger = Ledger(config)
        self._guests = Guests(self._ledger)
        self._budget = StepBudget(config.max_num_batched_tokens)
        self._speeds = Speeds(config)
        self._intake = Intake(self._ledger, self._speeds, self._guests)
        self._endings = Endings(self._ledger, self._events)
        self._drafts = Drafts(self._ledger, self._speeds)
        self._committer = Committer(self._ledger, self._endings, self._drafts, self._events)
        self._recovery = Recovery(self._ledger, self._budget, self._endings, self._note_preemption)
        self._step: PlannedStep | None = None
        self._prepared: PlannedStep | None = None
        self._pause: PauseMode | None = None
        self._steps = self._rows = self._preemptions = self._discarded = self._prompt_tokens = 0

    def __repr__(self) -> str:
        ledger = self._ledger
        return (
            f"<Scheduler {len(ledger.running)} running, {len(ledger.waiting)} waiting, "
            f"{len(ledger.parked)} parked, {ledger.pool.num_free} blocks free>"
        )

    # ---- the two verbs

    def apply(self, event: InputEvent[Request, StepResult], now: float) -> list[OutputEvent]:
        """Take one input event and return the output events that it caused, in order.

        Raises:
            EngineBug: The result is not of the plan in flight; nothing changed.
        """
        match event:
            case StepDone():
                self._commit(event.result, now)
            case Submit():
                self._submit(event, now)
            case Cancel():
                if (live := self._ledger.requests.get(event.request_id)) is not None:
                    self._endings.end_request(live, event.reason, now)
            case ReaderDrained():
                if (live := self._ledger.parked.unread.get(event.request_id)) is not None:
                    self._ledger.unpark(live, now)
            case ClientLeft():
                self._guests.leave(event.request_id)
            case ClientCame():
                self._guests.come_back(event.request_id, now)
            case StepFailed():
                step = self._take_step(event.failure.plan_id)
                self._discard_prepared(now)
                step.undo(now)
                self._recovery.step_failed(step, event.failure, now)
            case Tick():
                self._endings.end_stalled(now)
            case Pause():
                self._pause = event.mode
                if event.mode is PauseMode.ABORT:
                    self._endings.end_all(EndReason.ABORTED, now, "paused")
            case Resume():
                self._pause = None
            case ResetPrefixCache():
                self._ledger.reset_cache()
            case ObservePrefixes():
                self._ledger.cache.observer = event.observer
        return self._take_events()

    def plan(self, now: float) -> tuple[StepPlan | None, list[OutputEvent]]:
        """Return the next step to execute, or None if there is nothing to compute; and an event for
        each preemption that planning required.

        Raises:
            EngineBug: A plan is in flight already.
        """
        if self._step is not None:
            raise EngineBug(f"plan {self._step.plan.plan_id} is still in flight")
        step = self._use_prepared(now)
        if step is None and self._pause is not PauseMode.KEEP:
            step = self._build(now)
        self._drafts.widen(step, is_allowed=not self._recovery.is_under_way)
        self._step = step
        if step is None:
            return None, self._take_events()
        self._steps += 1
        self._rows += len(step.rows)
        return step.seal(PlanId(self._steps), now), self._take_events()

    def prepare(self, now: float) -> None:
        """Make the next plan while a step runs, so that `plan` only has to return it (D9). Do
        nothing if no step is in flight, or if what comes next is too uncertain."""
        if self._step is None or self._prepared is not None or not self.config.prepared_plans:
            return
        if self._guests.must_settle():
            return
        # How many tokens a row with drafts makes is not known before it is computed.
        if self._pause is None and not self._recovery.is_under_way and not self._step.num_drafts:
            self._prepared = self._builder(now).build_ahead(self._step)

    def _take_events(self) -> list[OutputEvent]:
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    # ---- planning

    def _use_prepared(self, now: float) -> PlannedStep | None:
        """Return what is left of the prepared step, now that the step before it is over."""
        if self._prepared is not None and (
            self._pause is not None
            or self._recovery.suspects
            or (self._prepared.started and any(seq.is_late(now) for seq in self._prepared.started))
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
        # Under WAIT, a sequence that has begun goes on to its end, even after a preemption.
        return self._builder(now, only_begun=self._pause is PauseMode.WAIT).build()

    def _builder(self, now: float, *, only_begun: bool = False) -> StepBuilder:
        """Return a builder for one step. The budget of its prompt tokens is halved by running out
        of memory (D17)."""
        limit_beside = partial(self._speeds.prompt_tokens, self._ledger, self._budget.tokens)
        return StepBuilder(
            self._ledger, now, limit_beside, self._note_preemption, only_begun=only_begun
        )

    def _note_preemption(self, seq: Sequence) -> None:
        self._preemptions += 1
        self._events.append(Preempted(seq.request_id, seq.sequence_id, seq.choice))

    # ---- requests and results

    def _submit(self, event: Submit[Request], now: float) -> None:
        request = event.request
        refused = self._intake.refusal(request, event.credit.capacity, self._pause, now)
        if refused is not None:
            self._events.append(Refused(request.request_id, refused))
            return
        live = self._ledger.admit(request, event.credit, now)
        if self._ledger.running and live.parent.rank < self._ledger.running[-1].rank:
            self._discard_prepared(now)  # the request outranks a running row (D9)
        self._prompt_tokens += len(request.prompt)
        self._events.append(Admitted(request.request_id, len(request.prompt)))

    def _take_step(self, plan_id: int) -> PlannedStep:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        return step

    def _commit(self, result: StepResult, now: float) -> None:
        step = self._take_step(result.plan_id)
        self._recovery.step_succeeded()
        self._committer.commit(step, result, now)
        if self._ledger.parked.guests:
            self._guests.note_step(step.sequences, now)
        draft_s = result.timings.draft_s
        if step.num_drafts:
            self._drafts.note_step(step, draft_s)
        self._speeds.note(step, now - step.started_at, draft_s)

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout, or when a guest goes on. None if there will be nothing."""
        # The loop asks in every turn, when mostly nothing is parked.
        unread = self._ledger.parked.unread
        stall = next_stall(unread.values(), self.config.stall_timeout_s, now) if unread else None
        guests = None if self._pause is PauseMode.KEEP else self._guests.next_wakeup(now)
        return guests if stall is None or (guests is not None and guests < stall) else stall

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        return not self._ledger.requests and self._step is None and self._prepared is None

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether the request holds anything: a place in the queue, blocks, a row."""
        return request_id in self._ledger.requests

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a live request: QUEUED, PREFILL, DECODE or PARKED; None if it is not
        live. With n > 1, this is the phase of its first choice that has not ended."""
        live = self._ledger.requests.get(request_id)
        if live is None:
            return None
        going = (seq for seq in live.sequences if seq.state not in (State.FINISHED, State.ENDING))
        return next((seq.phase for seq in going), None)

    def has_begun(self, request_id: RequestId) -> bool:
        """Return whether the worker knows a choice of a live request that has not ended."""
        live = self._ledger.requests.get(request_id)
        if live is None or live.is_over:
            return False
        return any(seq.is_known_to_worker for seq in live.sequences)

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Return what a live request does and waits for (`engine.core.text.explain`), or None if it
        is not live."""
        live = self._ledger.requests.get(request_id)
        if live is None:
            return None
        return Explainer(self._ledger, self._guests).explain(
            live,
            now,
            pause=self._pause,
            tokens_per_s=self._speeds.recent_rate.tokens_per_s,
            run_s=self._endings.run_s,
            steps=self._planned_steps(),
        )

    def prefix_keys(self, request: Request) -> list[bytes]:
        """Return the keys of a prompt's blocks, for `cached_tokens`. The request need not be
        submitted."""
        return self._ledger.keys.of_prompt(request)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return how many tokens of the prefix with these keys need not be computed here."""
        return self._ledger.cached_tokens(keys)

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand. The time grows with the number of live requests."""
        ledger = self._ledger
        ending = sum(1 for seq in ledger.live_sequences() if seq.state is State.ENDING)
        states = ledger.states and ledger.states.pool
        return CoreStatistics(
            running=len(ledger.running),
            waiting=len(ledger.waiting),
            parked=sum(1 for seq in ledger.live_sequences() if seq.state is State.PARKED),
            ending=ending,
            queued_tokens=ledger.waiting.num_tokens,
            peak_waiting=ledger.waiting.peak,
            free_blocks=ledger.pool.num_free,
            total_blocks=ledger.pool.num_blocks,
            cached_blocks=ledger.pool.num_cached,
            free_states=states.num_free if states else 0,
            total_states=states.num_blocks if states else 0,
            cached_states=states.num_cached if states else 0,
            step_count=self._steps,
            step_rows_total=self._rows,
            prompt_tokens_total=self._prompt_tokens,
            completion_tokens_total=self._committer.completion_tokens,
            prefix_queries=ledger.cache.queried_tokens,
            prefix_hits=ledger.cache.hit_tokens,
            preemptions=self._preemptions,
            late_results=self._committer.late_results,
            plans_discarded=self._discarded,
            drafts=self._drafts.counts,
        )

    def _planned_steps(self) -> tuple[PlannedStep, ...]:
        """Return the step in flight and the prepared one."""
        return tuple([step for step in (self._step, self._prepared) if step is not None])

    def check(self) -> None:
        """Check the ledger (`Ledger.check`), and that every count of rows in flight and of promised
        message slots agrees with the planned steps.

        Raises:
            AssertionError: It names what does not agree.
        """
        self._ledger.check()
        steps = self._planned_steps()
        assert self._ledger.pool.num_open == len(steps)
        if (states := self._ledger.states) is not None:
            states.check(self._ledger.live_sequences(), [one.states for one in steps if one.states])
            assert states.pool.num_open == len(steps)
        rows = Counter(seq for step in steps for seq in step.sequences)
        rows.update(seq for step in steps for forks in step.forks.values() for seq in forks)
        for seq in self._ledger.live_sequences():
            assert seq.in_step == rows[seq], f"{seq} is in {rows[seq]} steps, not {seq.in_step}"
        promised: Counter[LiveRequest] = Counter()
        for step in steps:
            for seq, row in zip(step.sequences, step.rows, strict=True):
                forks = step.forks.get(seq.sequence_id, ())
                promised[seq.live] += (1 + len(forks)) if row.logits.samples else 0
        for name, live in self._ledger.requests.items():
            credit = live.credit
            assert credit.reserved == promised[live], f"{name}: {credit} for {promised[live]} rows"
            assert min(credit.free, credit.filled) >= 0, f"{name}: {credit} has too few slots"
