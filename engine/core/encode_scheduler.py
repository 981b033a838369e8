"""An encoder's scheduler: which inputs are encoded together, and who gets what came of it.

Rule 1: the two verbs of `engine.core.scheduler.Scheduler`, with its inputs and its events: `apply`
takes everything that happens, `plan` hands out the next step, which must come back exactly once.
Rule 2: time comes as ``now``, never from a clock; no decision depends on anything else unseen.
Rule 3: requests go on in the line's order, and the first in it is in the next step whatever its
length: nobody starves. Rule 4: an input in a step has a message slot of its request's credit; a
request without free slots is parked, and no other one waits for it.
Rule 5: each accepted request emits one `Encoded` per input at most, and exactly one `Finished`.

Source: design D14, D17, D18, D19; R199.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from engine.core.encode_line import Line, LiveEncode
from engine.core.encode_types import (
    Encoded,
    EncodePlan,
    EncodeRequest,
    EncodeResult,
    EncodeRow,
)
from engine.core.events import (
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
from engine.core.plan import FailureKind, RowFailure
from engine.core.policy import retry_after
from engine.core.types import (
    EndReason,
    Explanation,
    PlanId,
    RequestId,
    SequenceId,
    Timings,
    Usage,
)
from engine.errors import DuplicateRequest, EngineBug, Overloaded, Paused, RequestTooLarge

if TYPE_CHECKING:
    from engine.config import EncoderConfig
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import StepFailure
    from engine.errors import TrioletError

CLEAN_STEPS = 16  # guess: steps without running out of memory before the budget doubles
RATE_SMOOTHING = 0.2  # guess: the last five steps weigh two thirds in the queue estimate


@dataclass(frozen=True, slots=True)
class EncodeStatistics:
    """A snapshot. The first four count inputs: in the step, left of requests in the line, left of
    parked ones, and in the step for requests that have ended. The others count since start."""

    running: int
    waiting: int
    parked: int
    ending: int
    step_count: int
    step_rows_total: int
    prompt_tokens_total: int
    late_results: int
    queued_tokens: int


@dataclass(slots=True)
class _Step:
    """The step in flight: whose input each row of the plan is."""

    plan: EncodePlan
    rows: list[tuple[LiveEncode, int]]
    started_at: float


class EncodeScheduler:
    """One encoder's scheduler. Synchronous, not thread-safe, and never waits."""

    def __init__(self, config: EncoderConfig) -> None:
        self.config = config
        self._requests: dict[RequestId, LiveEncode] = {}
        self._line = Line(config.aging_s)
        self._parked: dict[RequestId, LiveEncode] = {}
        self._step: _Step | None = None
        self._pause: PauseMode | None = None
        self._suspects: deque[tuple[LiveEncode, int]] = deque()
        self._events: list[OutputEvent] = []
        self._ties, self._plan_ids, self._sequence_ids = count(), count(1), count(1)
        self._budget = config.max_num_batched_tokens
        self._clean_steps = 0
        self._queued_tokens = 0  # left of the requests in the line
        self._tokens_per_s = 0.0
        self._steps = self._rows = self._tokens = self._late = 0

    def __repr__(self) -> str:
        in_step = 0 if self._step is None else len(self._step.rows)
        return (
            f"<EncodeScheduler {in_step} inputs in the step, {len(self._line)} requests in line, "
            f"{len(self._parked)} parked>"
        )

    # ---- the two verbs

    def apply(self, event: InputEvent, now: float) -> list[OutputEvent]:
        """Take one input; what it caused, in order.

        Raises:
            EngineBug: a result for a plan that is not in flight; nothing changed.
        """
        match event:
            case StepDone():
                assert isinstance(event.result, EncodeResult)
                self._commit(event.result, now)
            case StepFailed():
                self._step_failed(event.failure, now)
            case Submit():
                self._submit(event, now)
            case Cancel():
                live = self._requests.get(event.request_id)
                if live is not None:
                    self._end(live, event.reason, now, event.detail)
            case ReaderDrained():
                self._reader_drained(event, now)
            case Tick():
                self._end_stalled(now)
            case Pause():
                self._pause_with(event.mode, now)
            case Resume():
                self._pause = None
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> tuple[EncodePlan | None, list[OutputEvent]]:
        """The next step to execute, or None if there is nothing to compute. Planning causes no
        events; the empty list is the loop's interface.

        Raises:
            EngineBug: a plan is in flight already.
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
        self._step = _Step(plan, chosen, now)
        self._steps += 1
        self._rows += len(rows)
        return plan, []

    def prepare(self, now: float) -> None:
        """Nothing: an encoder's plan takes microseconds a row, and its steps have no successors."""

    def next_wakeup(self, now: float) -> float | None:
        """When `Tick` will have something to do, if nothing else happens before: the first
        stall timeout. None: never."""
        first = min((live.parked_since or 0.0 for live in self._parked.values()), default=None)
        return None if first is None else max(now, first + self.config.stall_timeout_s)

    @property
    def is_idle(self) -> bool:
        """No live request and no step in flight."""
        return not self._requests and self._step is None

    # ---- choosing

    def _choose(self, now: float) -> list[tuple[LiveEncode, int]]:
        """Inputs for a step, each with its slot reserved: a row of a failed step alone, else what
        the line's first requests have left, within the budget."""
        suspect = self._take_suspect(now)
        if suspect is not None:
            return [suspect]
        chosen: list[tuple[LiveEncode, int]] = []
        starved: list[LiveEncode] = []
        longest = 0
        for live in self._line.in_order(now):
            if not self._may_go_on(live, now):
                continue
            while live.left and self._fits(chosen, max(longest, live.length(live.left[0]))):
                index = live.left[0]
                if not live.credit.try_reserve():
                    if live.credit.filled:  # else all its slots are this step's
                        starved.append(live)
                    break
                longest = max(longest, live.length(index))
                self._take(live, index, now)
                chosen.append((live, index))
            else:
                if live.left:
                    break  # the budget is spent
        for live in starved:
            self._park(live, now)
        for live in dict.fromkeys(live for live, _ in chosen):
            if not live.left and live.parked_since is None:
                self._line.remove(live)
        return chosen

    def _may_go_on(self, live: LiveEncode, now: float) -> bool:
        """Not past its deadline and, under a pause that waits, begun before it."""
        is_begun = self._pause is None or live.started_at is not None
        return is_begun and not live.is_late(now)

    def _fits(self, chosen: list[tuple[LiveEncode, int]], longest: int) -> bool:
        """Whether one more row fits beside those chosen, all padded to ``longest``. The first
        always does."""
        if not chosen:
            return True
        count = len(chosen) + 1
        return count <= self.config.max_num_seqs and count * longest <= self._budget

    def _take(self, live: LiveEncode, index: int, now: float) -> None:
        live.take(index, now)
        if live.parked_since is None:
            self._queued_tokens -= live.length(index)

    def _take_suspect(self, now: float) -> tuple[LiveEncode, int] | None:
        """The next row of a failed step that can be run alone. One whose reader has no room is
        left to a later batch."""
        while self._suspects:
            live, index = self._suspects.popleft()
            if live.is_ended or index not in live.left or live.is_late(now):
                continue
            if not live.credit.try_reserve():
                continue
            self._take(live, index, now)
            if not live.left and live.parked_since is None:
                self._line.remove(live)
            return live, index
        return None

    # ---- requests

    def _submit(self, event: Submit, now: float) -> None:
        request = event.request
        assert isinstance(request, EncodeRequest)
        error = self._refusal(request)
        if error is not None:
            self._events.append(Refused(request.request_id, error))
            return
        live = LiveEncode(request, event.credit, now, next(self._ties))
        self._requests[request.request_id] = live
        self._enter_line(live)
        self._tokens += live.num_tokens
        self._events.append(Admitted(request.request_id, live.num_tokens))

    def _refusal(self, request: EncodeRequest) -> TrioletError | None:
        """Why a request is not accepted; None: it is."""
        config, length = self.config, request.num_tokens
        if request.request_id in self._requests:
            return DuplicateRequest(f"request_id {request.request_id!r} is in use")
        if self._pause in (PauseMode.ABORT, PauseMode.WAIT):
            return Paused("the engine is paused and takes no new requests", retry_after_s=5.0)
        for index, one in enumerate(request.inputs):
            if len(one.token_ids) > config.max_model_len:
                return RequestTooLarge.of(
                    f"inputs[{index}]",
                    f"has {len(one.token_ids)} tokens, of at most {config.max_model_len}",
                )
        is_full = len(self._line) >= config.max_queued_requests
        if is_full or self._queued_tokens + length > max(config.max_queued_tokens, length):
            bound = (
                f"{config.max_queued_requests} requests"
                if is_full
                else f"{config.max_queued_tokens} tokens"
            )
            wait = retry_after(self._queued_tokens, self._tokens_per_s)
            return Overloaded(f"the queue holds its {bound}", retry_after_s=wait)
        return None

    def _enter_line(self, live: LiveEncode) -> None:
        self._line.add(live)
        self._queued_tokens += live.tokens_left

    def _leave_line(self, live: LiveEncode) -> None:
        self._line.remove(live)
        self._queued_tokens -= live.tokens_left

    def _end(self, live: LiveEncode, reason: EndReason, now: float, detail: str = "") -> None:
        """The one end of a request; rows of it in a step leave at the commit."""
        phase = live.phase
        if live.parked_since is not None:
            del self._parked[live.request.request_id]
            live.unpark(now)
        elif live.left:
            self._leave_line(live)
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
        """Out of the line until the reader has taken something."""
        self._leave_line(live)
        live.park(now)
        live.credit.mark_starved()
        self._parked[live.request.request_id] = live

    def _reader_drained(self, event: ReaderDrained, now: float) -> None:
        """Back into the line once there is room for a batch worth its step: half the stream, or
        all that is left. A reader that takes anything is not stalled. With nothing left to read
        it goes back at once: if the step fails that has its slots, no reader will tell again."""
        live = self._parked.get(event.request_id)
        if live is None:
            return
        credit = live.credit
        live.unpark(now)
        if credit.filled and credit.free < min(len(live.left), (credit.capacity + 1) // 2):
            credit.mark_starved()
            live.park(now)
            return
        del self._parked[event.request_id]
        self._enter_line(live)

    def _end_stalled(self, now: float) -> None:
        limit = self.config.stall_timeout_s
        for live in list(self._parked.values()):
            if live.parked_since is not None and now >= live.parked_since + limit:
                self._end(live, EndReason.STALLED, now)

    def _pause_with(self, mode: PauseMode, now: float) -> None:
        self._pause = mode
        if mode is PauseMode.ABORT:
            for live in list(self._requests.values()):
                self._end(live, EndReason.ABORTED, now, "paused")

    # ---- steps

    def _take_step(self, plan_id: int) -> _Step:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        return step

    def _commit(self, result: EncodeResult, now: float) -> None:
        step = self._take_step(result.plan_id)
        self._recover_budget()
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
            tokens = len(row.input.token_ids)
            self._events.append(Encoded(live.request.request_id, index, got.values, tokens))
            if live.num_done == len(live.request.inputs):
                self._end(live, EndReason.STOP, now)
        if now > step.started_at:
            rate = step.plan.num_tokens / (now - step.started_at)
            self._tokens_per_s += RATE_SMOOTHING * (rate - self._tokens_per_s)

    def _recover_budget(self) -> None:
        """Give the budget back slowly: at once, every other step would run out again."""
        full = self.config.max_num_batched_tokens
        self._clean_steps += 1
        if self._budget < full and self._clean_steps >= CLEAN_STEPS:
            self._clean_steps = 0
            self._budget = min(full, 2 * self._budget)

    def _step_failed(self, failure: StepFailure, now: float) -> None:
        """Nothing of the step counts. Its rows run again: after running out of memory in batches
        of half the size, else each alone; what was alone fails, and its request with it."""
        step = self._take_step(failure.plan_id)
        live_rows = [(live, index) for live, index in step.rows if not live.is_ended]
        for live, index in step.rows:
            live.credit.cancel()
            if live.is_ended:
                live.in_step -= 1
            else:
                self._put_back(live, index)
        is_memory = failure.kind is FailureKind.OUT_OF_MEMORY
        if is_memory:
            self._clean_steps = 0
            self._budget = max(1, min(self._budget, step.plan.num_tokens) // 2)
        if len(step.rows) == 1:
            for live, _ in live_rows:
                what = "memory: " if is_memory else ""
                self._end(live, EndReason.FAILED, now, f"{what}{failure.detail}")
        elif not is_memory:
            self._suspects.extend(live_rows)

    def _put_back(self, live: LiveEncode, index: int) -> None:
        was_in_line = bool(live.left) and live.parked_since is None
        live.put_back(index)
        if live.parked_since is not None:
            return
        if was_in_line:
            self._queued_tokens += live.length(index)
        else:
            self._enter_line(live)

    # ---- views

    def is_live(self, request_id: RequestId) -> bool:
        """Is the request in the line, parked, or part of a step?"""
        return request_id in self._requests

    def phase_of(self, request_id: RequestId) -> str | None:
        """Where a live request is: queued, encode or parked; None: it is not live."""
        live = self._requests.get(request_id)
        return None if live is None else live.phase

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Why a live request is where it is; None: it is not live. Bounded by the line's length;
        an encoder holds no blocks, and its inputs leave no KV values behind."""
        live = self._requests.get(request_id)
        if live is None:
            return None
        if live.parked_since is not None:
            since = live.parked_s + now - live.parked_since
            reason = "reader: it has not read what was sent"
            return Explanation("PARKED", reason, parked_s=since)
        begun, pausing = live.started_at is not None, ""
        if self._pause is not None and (self._pause is PauseMode.KEEP or not begun):
            pausing = f"resume: the model is paused ({self._pause.value})"
        if begun:
            left_out = bool(live.left) and not live.in_step
            reason = pausing or ("token budget: the next steps have others" if left_out else "")
            return Explanation("RUNNING", reason, parked_s=live.parked_s)
        position = ahead = 0
        for other in self._line.in_order(now):
            position += 1
            if other is live:
                break
            ahead += other.tokens_left
        may_tell = not pausing and self._tokens_per_s > 0
        reason = "token budget: the next steps compute what is ahead" if ahead else "a step"
        return Explanation(
            "WAITING",
            pausing or reason,
            position,
            ahead / self._tokens_per_s if may_tell else None,
        )

    def statistics(self) -> EncodeStatistics:
        """The counters as they stand; constant time but for the live requests and the step."""
        rows = [] if self._step is None else self._step.rows
        ending = sum(live.is_ended for live, _ in rows)
        left = sum(len(live.left) for live in self._requests.values())
        parked = sum(len(live.left) for live in self._parked.values())
        return EncodeStatistics(
            running=len(rows) - ending,
            waiting=left - parked,
            parked=parked,
            ending=ending,
            step_count=self._steps,
            step_rows_total=self._rows,
            prompt_tokens_total=self._tokens,
            late_results=self._late,
            queued_tokens=self._queued_tokens,
        )

    def check(self) -> None:
        """Balance the books; raises AssertionError."""
        self._line.check()
        in_line = list(self._line.in_order(0.0))
        assert self._queued_tokens == sum(live.tokens_left for live in in_line)
        rows = [] if self._step is None else self._step.rows
        for live in self._requests.values():
            assert not live.is_ended
            is_parked = live.request.request_id in self._parked
            assert is_parked == (live.parked_since is not None), f"{live}: parked or not?"
            assert live.left or not is_parked, f"{live} is parked for nothing"
            places = in_line.count(live)
            assert places == (1 if live.left and not is_parked else 0), f"{live} is lost"
            assert live.in_step + len(live.left) + live.num_done == len(live.request.inputs)
            assert live.tokens_left == sum(map(live.length, live.left))
            lengths = [live.length(index) for index in live.left]
            assert lengths == sorted(lengths, reverse=True), f"{live}: not longest first"
        assert len(in_line) + len(self._parked) <= len(self._requests)
        for live in {*self._requests.values(), *(live for live, _ in rows)}:
            own = sum(1 for one, _ in rows if one is live)
            assert live.in_step == own, f"{live} has {own} rows in the step"
            assert live.credit.reserved == own, f"{live}: slots leaked"
