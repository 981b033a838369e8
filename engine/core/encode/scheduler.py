"""An encoder's scheduler: which inputs are encoded together, and which request gets which result.

Rule 1: two methods drive it, as in `engine.core.common.core.Core`: `apply` takes everything that
happens, `plan` returns the next step, whose `StepDone` or `StepFailed` must be applied before the
next `plan`. Rule 2: time comes as ``now``, never from a clock, and decisions depend only on the
inputs. Rule 3: requests go on in the queue's order (`engine.core.encode.batch`); a request without
free message slots is parked, and no other request waits for it. Rule 4: each accepted request emits
at most one `Encoded` for each input, and exactly one `Finished`.

Source: design D14, D17, D18, D19; R199.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from engine.core.common import refusals
from engine.core.common.core import CoreStatistics
from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    Pause,
    PauseMode,
    ReaderDrained,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.rate import RecentRate
from engine.core.common.stalls import next_stall, stalled
from engine.core.common.step_budget import StepBudget
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import (
    EndReason,
    Explanation,
    PlanId,
    RequestId,
    SequenceId,
    Timings,
    Usage,
)
from engine.core.encode.batch import BatchBuilder
from engine.core.encode.explain import explain
from engine.core.encode.live_request import LiveEncode
from engine.core.encode.types import Encoded, EncodeInput, EncodePlan, EncodeRow
from engine.core.encode.waiting_queue import WaitingQueue
from engine.errors import EngineBug, RequestTooLarge

if TYPE_CHECKING:
    from engine.config import EncoderConfig
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.common.phases import Phase
    from engine.core.common.steps import StepFailure
    from engine.core.encode.types import EncodeRequest, EncodeResult, InputKind
    from engine.errors import TrioletError


@dataclass(slots=True)
class _Step:
    """The step in flight: each row's request and the index of its input."""

    plan: EncodePlan
    rows: list[tuple[LiveEncode, int]]
    started_at: float


class EncodeScheduler:
    """One encoder's scheduler. Synchronous, not thread-safe, and never waits."""

    def __init__(self, config: EncoderConfig) -> None:
        self.config = config
        self._requests: dict[RequestId, LiveEncode] = {}
        self._queue = WaitingQueue(config.aging_s)
        self._parked: dict[RequestId, LiveEncode] = {}
        self._step: _Step | None = None
        self._last_kind: InputKind | None = None  # of the inputs of the last step
        self._pause: PauseMode | None = None
        self._suspects: deque[tuple[LiveEncode, int]] = deque()  # rows of a failed step, run alone
        self._events: list[OutputEvent] = []
        self._ties, self._plan_ids, self._sequence_ids = count(), count(1), count(1)
        self._budget = StepBudget(config.max_num_batched_tokens)
        self._rate = RecentRate()
        self._steps = self._rows = self._tokens = self._late = 0

    def __repr__(self) -> str:
        in_step = 0 if self._step is None else len(self._step.rows)
        return (
            f"<EncodeScheduler {in_step} inputs in the step, {len(self._queue)} requests queued, "
            f"{len(self._parked)} parked>"
        )

    # ---- the two verbs

    def apply(
        self, event: InputEvent[EncodeRequest, EncodeResult], now: float
    ) -> list[OutputEvent]:
        """Take one input event and return the output events that it caused, in order.

        Raises:
            EngineBug: The result is not of the plan in flight; nothing changed.
        """
        match event:
            case StepDone():
                self._commit(event.result, now)
            case StepFailed():
                self._step_failed(event.failure, now)
            case Submit():
                self._submit(event, now)
            case Cancel():
                if (live := self._requests.get(event.request_id)) is not None:
                    self._end(live, event.reason, now)
            case ReaderDrained():
                self._reader_drained(event, now)
            case Tick():
                timeout_s = self.config.stall_timeout_s
                for live in stalled(self._parked.values(), timeout_s, now):
                    self._end(live, EndReason.STALLED, now)
            case Pause():
                self._pause = event.mode
                if event.mode is PauseMode.ABORT:
                    for live in list(self._requests.values()):
                        self._end(live, EndReason.ABORTED, now, "paused")
            case Resume():
                self._pause = None
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> tuple[EncodePlan | None, list[OutputEvent]]:
        """Return the next step to execute, or None if there is nothing to compute. Planning causes
        no events, so the list is empty.

        Raises:
            EngineBug: A plan is in flight already.
        """
        if self._step is not None:
            raise EngineBug(f"plan {self._step.plan.plan_id} is still in flight")
        chosen = [] if self._pause is PauseMode.KEEP else self._choose(now)
        if not chosen:
            return None, []
        chosen.sort(key=lambda one: one[0].length(one[1]))
        rows = tuple(
            EncodeRow(
                SequenceId(next(self._sequence_ids)),
                live.request.inputs[index],
                live.request.options,
            )
            for live, index in chosen
        )
        plan = EncodePlan(PlanId(next(self._plan_ids)), rows)
        self._last_kind = plan.kind
        self._step = _Step(plan, chosen, now)
        self._steps += 1
        self._rows += len(rows)
        return plan, []

    def prepare(self, now: float) -> None:
        """Do nothing: planning an encoder's step takes microseconds for each row."""

    # ---- choosing

    def _choose(self, now: float) -> list[tuple[LiveEncode, int]]:
        """Return inputs for a step, each with its message slot reserved: one row of a failed step
        alone, or else inputs of the first requests in the queue, within the budget. Park requests
        whose readers have no room."""
        if (suspect := self._next_suspect(now)) is not None:
            return [suspect]
        only_begun = self._pause is not None
        batch = BatchBuilder(
            self._queue,
            self.config,
            now,
            self._budget.tokens,
            only_begun=only_begun,
            after=self._last_kind,
        )
        batch.build()
        for live in batch.starved:
            self._park(live, now)
        return batch.chosen

    def _next_suspect(self, now: float) -> tuple[LiveEncode, int] | None:
        """Return the next row of a failed step that can run alone, with its message slot reserved.
        A row whose reader has no room is left to a later batch."""
        while self._suspects:
            live, index = self._suspects.popleft()
            if live.is_ended or not live.is_left(index) or live.is_late(now):
                continue
            if not live.credit.try_reserve():
                continue
            self._queue.take(live, index, now)
            if not live.left and live.parked_since is None:
                self._queue.remove(live)
            return live, index
        return None

    # ---- requests

    def _submit(self, event: Submit[EncodeRequest], now: float) -> None:
        request = event.request
        refused = self._refusal(request)
        if refused is not None:
            self._events.append(Refused(request.request_id, refused))
            return
        live = LiveEncode(request, event.credit, now, next(self._ties))
        self._requests[request.request_id] = live
        self._queue.add(live)
        self._tokens += live.num_tokens
        self._events.append(Admitted(request.request_id, live.num_tokens))

    def _refusal(self, request: EncodeRequest) -> TrioletError | None:
        """Return why a request is refused, or None if it is accepted."""
        config, queue = self.config, self._queue
        refused = refusals.duplicate_or_paused(request.request_id, self._requests, self._pause)
        if refused is not None:
            return refused
        for index, one in enumerate(request.inputs):
            if isinstance(one, EncodeInput) and len(one.token_ids) > config.max_model_len:
                return RequestTooLarge.of(
                    f"inputs[{index}]",
                    f"has {len(one.token_ids)} tokens, of at most {config.max_model_len}",
                )
        return refusals.queue_full(
            config,
            len(queue),
            request.num_tokens,
            queued_tokens=queue.num_tokens,
            tokens_per_s=self._rate.tokens_per_s,
        )

    def _end(self, live: LiveEncode, reason: EndReason, now: float, detail: str = "") -> None:
        """End a request that has not ended yet. Its rows in a step are dropped at the commit."""
        phase = live.phase
        if live.parked_since is not None:
            del self._parked[live.request.request_id]
            live.unpark(now)
        elif live.is_queued:
            self._queue.remove(live)
        live.is_ended = True
        del self._requests[live.request.request_id]
        started_at = now if live.started_at is None else live.started_at
        timings = Timings(
            queue_s=started_at - live.submitted_at,
            prefill_s=max(0.0, now - started_at - live.parked_s),
            parked_s=live.parked_s,
        )
        usage = Usage(live.num_tokens, 0, 0)
        self._events.append(
            Finished(live.request.request_id, 0, reason, usage, timings, None, phase, detail)
        )

    # ---- readers

    def _park(self, live: LiveEncode, now: float) -> None:
        """Take a request out of the queue until its reader has taken results."""
        self._queue.remove(live)
        live.park(now)
        live.credit.mark_starved()
        self._parked[live.request.request_id] = live

    def _reader_drained(self, event: ReaderDrained, now: float) -> None:
        """Put a parked request back into the queue once its stream has room for a batch that is
        worth a step: for half the stream, or for all inputs that are left. Otherwise only restart
        its stall timeout, because the reader has taken something. A request whose stream holds no
        message goes back at once: if the step that has its slots fails, its reader will not report
        room again."""
        live = self._parked.get(event.request_id)
        if live is None:
            return
        credit = live.credit
        live.unpark(now)
        if credit.filled and credit.free < min(live.num_left, (credit.capacity + 1) // 2):
            credit.mark_starved()
            live.park(now)
            return
        del self._parked[event.request_id]
        self._queue.add(live)

    # ---- steps

    def _take_step(self, plan_id: int) -> _Step:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        return step

    def _commit(self, result: EncodeResult, now: float) -> None:
        """Take the results of a step that succeeded."""
        step = self._take_step(result.plan_id)
        self._budget.note_success()
        for row, (live, index), got in zip(step.plan.rows, step.rows, result.rows, strict=True):
            if got.sequence != row.sequence:
                raise EngineBug(f"a result for {got.sequence} came in the row of {row.sequence}")
            live.in_step -= 1
            if live.is_ended or isinstance(got, RowFailure):
                live.credit.cancel()
                if live.is_ended:
                    self._late += 1
                elif isinstance(got, RowFailure):
                    self._end(live, EndReason.FAILED, now, f"{got.phase}: {got.detail}")
                continue
            live.credit.fill()
            live.num_done += 1
            tokens = row.input.num_tokens
            self._events.append(Encoded(live.request.request_id, index, got.values, tokens))
            if live.num_done == len(live.request.inputs):
                self._end(live, EndReason.STOP, now)
        if now > step.started_at:
            self._rate.note(step.plan.num_tokens, now - step.started_at)

    def _step_failed(self, failure: StepFailure, now: float) -> None:
        """Put the inputs of a failed step back. They run again: after running out of memory in
        batches of half the size, otherwise each alone. A row that was alone fails, and its request
        with it."""
        step = self._take_step(failure.plan_id)
        live_rows = [(live, index) for live, index in step.rows if not live.is_ended]
        for live, index in step.rows:
            live.credit.cancel()
            if live.is_ended:
                live.in_step -= 1
            else:
                self._queue.put_back(live, index)
        is_memory = failure.kind is FailureKind.OUT_OF_MEMORY
        if is_memory:
            self._budget.halve(step.plan.num_tokens)
        if len(step.rows) == 1:
            for live, _ in live_rows:
                what = "memory: " if is_memory else ""
                self._end(live, EndReason.FAILED, now, f"{what}{failure.detail}")
        elif not is_memory:
            self._suspects.extend(live_rows)

    # ---- views

    def next_wakeup(self, now: float) -> float | None:
        """Return the time at which a `Tick` will have something to do if nothing else happens
        before: the first stall timeout. None if nothing is parked."""
        return next_stall(self._parked.values(), self.config.stall_timeout_s, now)

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        return not self._requests and self._step is None

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether the request is queued, parked, or part of a step."""
        return request_id in self._requests

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a live request: QUEUED, ENCODE or PARKED; None if it is not live."""
        live = self._requests.get(request_id)
        return None if live is None else live.phase

    def has_begun(self, request_id: RequestId) -> bool:
        """Return whether a row of a live request has been in a step."""
        live = self._requests.get(request_id)
        return live is not None and live.started_at is not None

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Return what a live request does and waits for, or None if it is not live."""
        live = self._requests.get(request_id)
        if live is None:
            return None
        rate = self._rate.tokens_per_s
        return explain(live, self._queue, now, pause=self._pause, tokens_per_s=rate)

    def prefix_keys(self, request: EncodeRequest) -> list[bytes]:
        """Return no keys: an encoder has no prefix cache."""
        return []

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return 0: an encoder has no prefix cache."""
        return 0

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand. The time grows with the number of parked requests and
        of rows in the step.

        ``running``, ``waiting``, ``parked`` and ``ending`` count inputs: those in the step, those
        left of requests in the queue, those left of parked requests, and those in the step whose
        requests have ended.
        """
        rows = [] if self._step is None else self._step.rows
        ending = sum(live.is_ended for live, _ in rows)
        parked = sum(live.num_left for live in self._parked.values())
        return CoreStatistics(
            running=len(rows) - ending,
            waiting=self._queue.num_inputs,
            parked=parked,
            ending=ending,
            queued_tokens=self._queue.num_tokens,
            peak_waiting=self._queue.peak_inputs,
            step_count=self._steps,
            step_rows_total=self._rows,
            prompt_tokens_total=self._tokens,
            late_results=self._late,
        )

    def check(self) -> None:
        """Check that each input is in one place, and that every count agrees with the places.

        Raises:
            AssertionError: It names the first request for which this does not hold.
        """
        self._queue.check()
        queued = list(self._queue.in_order(0.0))
        rows = [] if self._step is None else self._step.rows
        for live in self._requests.values():
            assert not live.is_ended
            is_parked = live.request.request_id in self._parked
            assert is_parked == (live.parked_since is not None), f"{live}: parked or not?"
            assert live.left or not is_parked, f"{live} is parked for nothing"
            places = queued.count(live)
            assert places == (1 if live.left and not is_parked else 0), f"{live} is lost"
            assert live.in_step + live.num_left + live.num_done == len(live.request.inputs)
            tokens_left = 0
            for same in live.left.values():
                lengths = [live.length(index) for index in same]
                assert lengths, f"{live} lists a kind without inputs"
                assert lengths == sorted(lengths, reverse=True), f"{live}: not longest first"
                tokens_left += sum(lengths)
            assert live.tokens_left == tokens_left, f"{live}: its tokens are miscounted"
        assert len(queued) + len(self._parked) <= len(self._requests)
        for live in {*self._requests.values(), *(live for live, _ in rows)}:
            own = sum(1 for one, _ in rows if one is live)
            assert live.in_step == own, f"{live} has {own} rows in the step"
            assert live.credit.reserved == own, f"{live}: slots leaked"
