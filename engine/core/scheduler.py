"""The scheduler: what happens to requests, step by step, as one synchronous state machine.

Rule 1: two verbs. `apply(event, now)` takes everything that happens and returns what it caused,
in order; `plan(now)` hands out the next step, which must come back as exactly one `StepDone` or
`StepFailed` before the next (design D2, D4). Rule 2: time comes as ``now``, never from a clock.
Rule 3: each accepted choice emits exactly one `Finished`.

Source: etcd raft's Ready/Advance for the shape; design D4–D7, D17–D19 for the contents.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.events import (
    Admitted,
    Cancel,
    Finished,
    InputEvent,
    OutputEvent,
    Pause,
    PauseMode,
    Preempted,
    ReaderDrained,
    Refused,
    ResetPrefixCache,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    Tokens,
)
from engine.core.explain import Explainer
from engine.core.ledger import Ledger
from engine.core.lifecycle import State
from engine.core.plan import FailureKind, RowFailure, RowResult, StepFailure, StepPlan
from engine.core.planner import PlannedStep, Planner
from engine.core.policy import blocks_for, retry_after
from engine.core.rate import BestRate
from engine.core.types import EndReason, Explanation, Request, RequestId
from engine.errors import (
    DeadlineInfeasible,
    DuplicateRequest,
    EngineBug,
    FieldViolation,
    Overloaded,
    Paused,
    RequestTooLarge,
    TrioletError,
)

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.plan import Row, StepResult
    from engine.core.sequence import LiveRequest, Sequence

MAX_OOM_RETRIES = 3  # D17
CLEAN_STEPS = 16  # guess: steps without running out of memory before the chunk budget doubles
RATE_SMOOTHING = 0.2  # guess: the last five steps weigh two thirds in the queue estimate
RUN_SMOOTHING = 0.05  # guess: the last twenty ends weigh two thirds, as many sequences run at once


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot; token counts are since start. ``ending`` sequences wait for a step's end."""

    running: int
    waiting: int
    parked: int
    ending: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    prefix_queries: int
    prefix_hits: int
    step_count: int
    step_rows_total: int
    preemptions: int
    prompt_tokens_total: int
    completion_tokens_total: int
    late_results: int
    queued_tokens: int
    plans_discarded: int


class Scheduler:
    """One model replica's scheduler. Synchronous, not thread-safe, and never waits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._ledger = Ledger(config)
        self._planner = Planner(self._ledger, self._note_preemption)
        self._step: PlannedStep | None = None
        self._prepared: PlannedStep | None = None
        self._pause: PauseMode | None = None
        self._events: list[OutputEvent] = []
        self._suspects: deque[Sequence] = deque()
        self._oom_retries = self._clean_steps = 0
        self._tokens_per_s = self._run_s = 0.0  # of late
        self._best_rate = BestRate(config.max_num_batched_tokens, config.step_time_target_s)
        self._steps = self._rows = self._preemptions = self._discarded = 0
        self._prompt_tokens = self._completion_tokens = self._late = 0

    def __repr__(self) -> str:
        ledger = self._ledger
        return (
            f"<Scheduler {len(ledger.running)} running, {len(ledger.waiting)} waiting, "
            f"{len(ledger.parked)} parked, {ledger.pool.num_free} blocks free>"
        )

    # ---- the two verbs

    def apply(self, event: InputEvent, now: float) -> list[OutputEvent]:
        """Take one input; what it caused, in order.

        Raises:
            EngineBug: a result for a plan that is not in flight; nothing changed.
        """
        match event:
            case StepDone():
                self._commit(event.result, now)  # type: ignore[arg-type]  # a text model's
            case Submit():
                self._submit(event, now)
            case Cancel():
                self._cancel(event, now)
            case ReaderDrained():
                self._reader_drained(event, now)
            case StepFailed():
                self._step_failed(event.failure, now)
            case Tick():
                self._end_stalled(now)
            case Pause():
                self._pause_with(event.mode, now)
            case Resume():
                self._pause = None
            case ResetPrefixCache():
                self._ledger.cache.reset()
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> tuple[StepPlan | None, list[OutputEvent]]:
        """The next step to execute, or None if there is nothing to compute; and the
        preemptions that planning it took.

        Raises:
            EngineBug: a plan is in flight already.
        """
        if self._step is not None:
            raise EngineBug(f"plan {self._step.plan.plan_id} is still in flight")
        step = self._use_prepared(now)
        if step is None and self._pause is not PauseMode.KEEP:
            step = self._build(now)
        self._step = step
        events, self._events = self._events, []
        if step is None:
            return None, events
        self._steps += 1
        self._rows += len(step.rows)
        return self._planner.seal(step, now), events

    def prepare(self, now: float) -> None:
        """Make the next plan while a step runs, so that `plan` only has to hand it out (D9).
        Does nothing if no step is in flight, or when what comes next is too uncertain."""
        is_certain = self._pause is None and not self._suspects and self._oom_retries == 0
        if self._step is None or self._prepared is not None or not is_certain:
            return
        if self.config.prepared_plans:
            self._prepared = self._planner.prepare(now, self._step)

    def _use_prepared(self, now: float) -> PlannedStep | None:
        """What is left of the prepared plan, now that the step before it is over."""
        if self._prepared is not None and (
            self._pause is not None
            or self._suspects
            or any(seq.is_late(now) for seq in self._prepared.started)
        ):
            self._discard_prepared(now)
        step, self._prepared = self._prepared, None
        return step if step is not None and self._planner.reconcile(step, now) else None

    def _discard_prepared(self, now: float) -> None:
        if self._prepared is not None:
            step, self._prepared = self._prepared, None
            self._planner.undo(step, now)
            self._discarded += 1

    def _build(self, now: float) -> PlannedStep | None:
        """A plan made now: the rows of a failed step one by one, else whatever can go on."""
        while (suspect := self._next_suspect()) is not None:
            step = self._planner.build(now, only=suspect)
            if step is not None:
                return step
        # under WAIT what has begun goes on to its end, also after it lost its blocks
        return self._planner.build(now, only_begun=self._pause is PauseMode.WAIT)

    def next_wakeup(self, now: float) -> float | None:
        """When `Tick` will have something to do, if nothing else happens before: the first
        stall timeout. None: never."""
        parked = (live.parked_since for live in self._ledger.parked.values())
        first = min((since for since in parked if since is not None), default=None)
        return None if first is None else max(now, first + self.config.stall_timeout_s)

    @property
    def is_idle(self) -> bool:
        """No live request and no step in flight."""
        return not self._ledger.requests and self._step is None and self._prepared is None

    @property
    def pause_mode(self) -> PauseMode | None:
        return self._pause

    # ---- requests

    def _submit(self, event: Submit, now: float) -> None:
        request = event.request
        assert isinstance(request, Request)
        buffer = event.credit.capacity - event.credit.beside
        error = self._refusal(request, buffer) or self._infeasible(request, now)
        if error is not None:
            self._events.append(Refused(request.request_id, error))
            return
        live = self._ledger.admit(request, event.credit, now)
        if self._ledger.running and live.parent.rank < self._ledger.running[-1].rank:
            self._discard_prepared(now)  # it outranks a running row (D9)
        self._prompt_tokens += len(request.prompt)
        self._events.append(Admitted(request.request_id, len(request.prompt)))

    def _refusal(self, request: Request, buffer: int) -> TrioletError | None:
        """Why a request is not accepted, in constant time; None: it is."""
        ledger, config = self._ledger, self.config
        if request.request_id in ledger.requests:
            return DuplicateRequest(f"request_id {request.request_id!r} is in use")
        if self._pause in (PauseMode.ABORT, PauseMode.WAIT):
            return Paused("the engine is paused and takes no new requests", retry_after_s=5.0)
        for field, description in self._misfits(request, buffer):
            return RequestTooLarge([FieldViolation(field, description)])
        length = len(request.prompt)
        full = len(ledger.waiting) >= config.max_queued_requests
        if full or ledger.queued_tokens + length > max(config.max_queued_tokens, length):
            bound = (
                f"{config.max_queued_requests} request{'s' * (config.max_queued_requests != 1)}"
                if full
                else f"{config.max_queued_tokens} tokens"
            )
            wait = retry_after(ledger.queued_tokens, self._tokens_per_s)
            return Overloaded(f"the queue holds its {bound}", retry_after_s=wait)
        return None

    def _infeasible(self, request: Request, now: float) -> TrioletError | None:
        """Refuse a prompt that cannot be computed by its deadline, whatever else runs (D18). What
        is cached is looked up only where it decides; all else of the prompt has to be computed
        by somebody, as no step is in flight."""
        if request.deadline is None or request.deadline <= now:
            return None  # the latter's own scope is about to end it
        left, length = request.deadline - now, len(request.prompt)
        if self._best_rate.seconds_for(length) <= left:
            return None
        missing = length - self._ledger.cached_tokens(self._ledger.prefix_keys(request))
        seconds = self._best_rate.seconds_for(missing)
        if seconds <= left:
            return None
        self._best_rate.doubt(missing)
        return DeadlineInfeasible(
            f"the prompt takes at least {seconds:.3g} s, of which {left:.3g} s are left",
            phase="queued",
        )

    def _misfits(self, request: Request, buffer: int) -> list[tuple[str, str]]:
        """What of a request can never fit this model."""
        config, length = self.config, len(request.prompt)
        found = []
        if length >= config.max_model_len:
            found.append(
                (
                    "input",
                    f"has {length} tokens, but the model takes at most "
                    f"{config.max_model_len - 1} and one to answer",
                )
            )
        if request.n > min(config.max_num_seqs, buffer):
            found.append(("n", f"is {request.n}, but {min(config.max_num_seqs, buffer)} can run"))
        copies = request.n - 1 if length % config.block_size else 0
        if blocks_for(length, config.block_size) + copies > config.num_blocks:
            found.append(("n", f"is {request.n}, and as many copies of the prompt do not fit"))
        return found

    def _cancel(self, event: Cancel, now: float) -> None:
        live = self._ledger.requests.get(event.request_id)
        if live is not None:
            self._end_request(live, event.reason, now, event.detail)

    def _end_request(
        self,
        live: LiveRequest,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """Every choice that has not ended ends now; blocks in use leave at the commit."""
        for seq in list(live.sequences):
            if seq.state not in (State.FINISHED, State.ENDING):
                self._end(seq, reason, now, detail=detail, violation=violation)

    def _end(
        self,
        seq: Sequence,
        reason: EndReason,
        now: float,
        *,
        matched: str | int | None = None,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        phase, run_s = seq.phase, seq.run_s(now)
        self._ledger.end(seq, now)
        if run_s > 0:
            self._run_s += RUN_SMOOTHING * (run_s - self._run_s) if self._run_s else run_s
        self._events.append(
            Finished(
                seq.request_id,
                seq.choice,
                reason,
                seq.usage(),
                seq.timings(),
                matched,
                phase,
                detail,
                violation,
            )
        )

    def _reader_drained(self, event: ReaderDrained, now: float) -> None:
        live = self._ledger.parked.get(event.request_id)
        if live is not None:
            self._ledger.unpark(live, now)

    def _end_stalled(self, now: float) -> None:
        limit = self.config.stall_timeout_s
        for live in list(self._ledger.parked.values()):
            # the same sum as `next_wakeup`: a difference rounds otherwise, and would spin
            if live.parked_since is not None and now >= live.parked_since + limit:
                self._end_request(live, EndReason.STALLED, now)

    def _pause_with(self, mode: PauseMode, now: float) -> None:
        self._pause = mode
        if mode is PauseMode.ABORT:
            for live in list(self._ledger.requests.values()):
                self._end_request(live, EndReason.ABORTED, now, "paused")

    def _note_preemption(self, seq: Sequence) -> None:
        self._preemptions += 1
        self._events.append(Preempted(seq.request_id, seq.sequence_id, seq.choice))

    # ---- steps

    def _take_step(self, plan_id: int) -> PlannedStep:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        return step

    def _commit(self, result: StepResult, now: float) -> None:
        step = self._take_step(result.plan_id)
        self._planner.keep(step)
        self._recover_from_oom()
        self._commit_rows(step, result, now)
        self._note_rate(step.plan.num_tokens, now - step.started_at)

    def _recover_from_oom(self) -> None:
        """Give the chunk budget back slowly: at once, every other step would run out again."""
        self._oom_retries = 0
        self._clean_steps += 1
        full = self.config.max_num_batched_tokens
        if self._planner.chunk_limit < full and self._clean_steps >= CLEAN_STEPS:
            self._clean_steps = 0
            self._planner.chunk_limit = min(full, 2 * self._planner.chunk_limit)

    def _commit_rows(self, step: PlannedStep, result: StepResult, now: float) -> None:
        """Each row's progress and events. A decode that goes on is the common case and costs
        what it costs (`python -m tools.bench schedule`); it is done here, to the same effect as
        the general way that all else takes."""
        results = iter(result.rows)
        size, is_running, make = self.config.block_size, State.RUNNING, tuple.__new__
        emit, num_sampled = self._events.append, 0
        for seq, row in zip(step.sequences, step.rows, strict=True):
            got = next(results)
            if got.__class__ is RowResult and seq.output and seq.state is is_running:
                name, tokens, text, logprobs, prompt_logprobs, finish, _ = got
                _, start, computed, _, _, _ = row
                if tokens and finish is None and computed == 1 and name == seq.sequence_id:
                    end = start + 1
                    if end % size == 0:
                        self._ledger.publish_computed(seq, end - 1, end)
                    count = len(tokens)
                    seq.output += tokens
                    seq.num_pending -= 1
                    if count > 1:
                        seq.num_tokens += count - 1
                    num_sampled += count
                    seq.credit.reserved -= 1  # `Credit.fill`, without the call
                    event = (seq.request_id, seq.choice, tokens, text, logprobs, prompt_logprobs)
                    emit(make(Tokens, event))
                    continue
            self._commit_row(seq, row, got, now)
            for child in step.forks.get(seq.sequence_id, ()):
                self._take_result(child, next(results), now, has_slot=True)
        self._completion_tokens += num_sampled

    def _commit_row(
        self, seq: Sequence, row: Row, result: RowResult | RowFailure, now: float
    ) -> None:
        if result.sequence != seq.sequence_id:
            raise EngineBug(f"a result for {result.sequence} came in the row of {seq}")
        if not row.logits.samples:
            seq.num_chunks -= 1
        if seq.state is State.RUNNING and isinstance(result, RowResult):
            self._ledger.publish_computed(seq, row.start, row.start + row.count)
        self._take_result(seq, result, now, has_slot=row.logits.samples)

    def _take_result(
        self, seq: Sequence, result: RowResult | RowFailure, now: float, *, has_slot: bool
    ) -> None:
        """Turn a row's result into events and progress, its message slot into a message."""
        if has_slot:
            seq.num_pending -= 1
            seq.num_tokens -= 1
        if seq.state is not State.RUNNING:  # it ended while the step ran (R156)
            if has_slot:
                seq.credit.cancel()
            self._late += 1
            if not seq.in_step:
                self._ledger.finish(seq)
            return
        if isinstance(result, RowFailure):
            if has_slot:
                seq.credit.cancel()
            detail = f"{result.phase}: {result.detail}"
            self._end_request(seq.live, EndReason.FAILED, now, detail, result.violation)
            return
        if not has_slot:
            return
        if not result.tokens:
            raise EngineBug(f"{seq} was to get a token and got none")
        self._take_tokens(seq, result, now)

    def _take_tokens(self, seq: Sequence, result: RowResult, now: float) -> None:
        if not seq.output:
            seq.enter("decode", now)
        seq.output.extend(result.tokens)
        seq.num_tokens += len(result.tokens)
        self._completion_tokens += len(result.tokens)
        seq.credit.fill()
        self._events.append(
            Tokens(
                seq.request_id,
                seq.choice,
                result.tokens,
                result.text,
                result.logprobs,
                result.prompt_logprobs,
            )
        )
        if result.finish is not None:
            self._end(seq, result.finish, now, matched=result.matched)

    def _note_rate(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            self._best_rate.note(num_tokens, seconds)
            self._planner.pace_limit = self._best_rate.prompt_budget
            rate = num_tokens / seconds
            self._tokens_per_s += RATE_SMOOTHING * (rate - self._tokens_per_s)

    # ---- failed steps (D17)

    def _step_failed(self, failure: StepFailure, now: float) -> None:
        step = self._take_step(failure.plan_id)
        self._discard_prepared(now)
        self._planner.undo(step, now)
        live = [seq for seq in step.sequences if seq.state not in (State.FINISHED, State.ENDING)]
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            self._relieve_memory(live, failure, now)
        elif len(step.sequences) == 1:
            for seq in live:
                self._end_request(seq.live, EndReason.FAILED, now, failure.detail)
        else:
            self._suspects.extend(live)

    def _relieve_memory(self, live: list[Sequence], failure: StepFailure, now: float) -> None:
        """Halve the chunk budget and preempt the newest prompt; after three tries the newest
        alone fails."""
        if not live:
            return
        newest = max(live, key=lambda seq: seq.rank)
        self._oom_retries += 1
        if self._oom_retries > MAX_OOM_RETRIES:
            self._oom_retries = 0
            self._end_request(newest.live, EndReason.FAILED, now, f"memory: {failure.detail}")
            return
        self._clean_steps = 0
        self._planner.chunk_limit = max(1, self._planner.chunk_limit // 2)
        if len(live) > 1 and newest.state is State.RUNNING and not newest.output:
            self._ledger.preempt(newest, now)
            self._note_preemption(newest)

    def _next_suspect(self) -> Sequence | None:
        """The next sequence to run alone: a row of a failed step that is still runnable."""
        while self._suspects:
            seq = self._suspects.popleft()
            if seq.state is State.RUNNING or (seq.state is State.WAITING and not seq.is_attached):
                return seq
        return None

    # ---- views

    def prefix_keys(self, request: Request) -> list[bytes]:
        """The keys of a prompt's blocks, for `cached_tokens`; it need not be submitted."""
        return self._ledger.prefix_keys(request)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Tokens of the prefix with these keys that need not be computed here."""
        return self._ledger.cached_tokens(keys)

    def phase_of(self, request_id: RequestId) -> str | None:
        """Where a live request is: queued, prefill, decode or parked; None: it is not live.
        With n > 1, where its first choice that has not ended is."""
        live = self._ledger.requests.get(request_id)
        if live is None:
            return None
        going = (seq for seq in live.sequences if seq.state not in (State.FINISHED, State.ENDING))
        return next((seq.phase for seq in going), None)

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Why a live request is where it is (`engine.core.explain`); None: it is not live."""
        live = self._ledger.requests.get(request_id)
        if live is None:
            return None
        steps = tuple([step for step in (self._step, self._prepared) if step is not None])
        return Explainer(self._ledger, self._planner).explain(
            live,
            now,
            pause=self._pause,
            tokens_per_s=self._tokens_per_s,
            run_s=self._run_s,
            steps=steps,
        )

    def is_live(self, request_id: RequestId) -> bool:
        """Does the request hold anything: a place in the line, blocks, a step in flight?"""
        return request_id in self._ledger.requests

    def statistics(self) -> SchedulerStatistics:
        """The counters as they stand; constant time but for the live requests."""
        ledger = self._ledger
        ending = sum(1 for seq in ledger.live_sequences() if seq.state is State.ENDING)
        return SchedulerStatistics(
            running=len(ledger.running),
            waiting=len(ledger.waiting),
            parked=sum(1 for seq in ledger.live_sequences() if seq.state is State.PARKED),
            ending=ending,
            free_blocks=ledger.pool.num_free,
            total_blocks=ledger.pool.num_blocks,
            cached_blocks=ledger.pool.num_cached,
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._planner.prefix_hits,
            step_count=self._steps,
            step_rows_total=self._rows,
            preemptions=self._preemptions,
            prompt_tokens_total=self._prompt_tokens,
            completion_tokens_total=self._completion_tokens,
            late_results=self._late,
            queued_tokens=ledger.queued_tokens,
            plans_discarded=self._discarded,
        )

    def check(self) -> None:
        """Balance the books (`Ledger.check`); raises AssertionError."""
        self._ledger.check()
        steps = [step for step in (self._step, self._prepared) if step is not None]
        assert self._ledger.pool.num_open == len(steps)
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
            assert min(credit.free, credit.filled) >= 0, f"{name}: {credit} holds what it has not"
