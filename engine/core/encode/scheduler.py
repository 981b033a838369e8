"""An encoder's scheduler: which inputs are encoded together, and which request gets which result.

Rule 1: requests go on in the queue's order (`engine.core.encode.batch`); a request without free
message slots is parked, and no other request waits for it. Rule 2: each accepted request emits at
most one `Encoded` for each input, and exactly one `Finished`.

Source: design D14, D17, D18, D19.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from engine.core.common.live_requests import Places
from engine.core.common.one_choice import OneChoiceCore
from engine.core.common.step_budget import StepBudget
from engine.core.common.steps import FailureKind
from engine.core.common.types import SequenceId
from engine.core.encode.batch import BatchBuilder
from engine.core.encode.live_request import LiveEncode
from engine.core.encode.types import (
    Encoded,
    EncodeInput,
    EncodePlan,
    EncodeRequest,
    EncodeResult,
    EncodeRow,
)
from engine.core.encode.waiting_inputs import WaitingInputs
from engine.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import EncoderConfig
    from engine.core.common.credit import Credit
    from engine.core.common.one_choice import OneChoiceStep, Parts
    from engine.core.common.shares import Share
    from engine.core.common.steps import StepFailure
    from engine.core.common.types import CoreStatistics, PlanId
    from engine.core.encode.types import EncodeRowResult, InputKind
    from engine.errors import TrioletError


class EncodeScheduler(OneChoiceCore[EncodeRequest, EncodePlan, EncodeResult, LiveEncode]):
    """One encoder's scheduler. The parts of a request are the indices of its inputs."""

    config: EncoderConfig
    live_type = LiveEncode
    aging_late_s = 1.0  # seconds; a guess: small beside the 10 s in which a priority rises

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self._inputs = WaitingInputs(self._waiting, self.shares)
        self._last_kind: InputKind | None = None  # the kind of the last step's inputs
        self._charged: dict[Share, float] = {}  # for the step in flight
        self._suspects: deque[tuple[LiveEncode, int]] = deque()  # to run alone
        self._sequence_ids = count(1)
        self._budget = StepBudget(config.max_num_batched_tokens)

    def __repr__(self) -> str:
        in_step = 0 if self._step is None else len(self._step.rows)
        return (
            f"<EncodeScheduler {in_step} inputs in the step, {len(self._waiting)} requests queued, "
            f"{len(self._parked)} parked>"
        )

    # ---- choosing

    def _plan_of(self, plan_id: PlanId, rows: Parts[LiveEncode]) -> EncodePlan:
        made = tuple(
            EncodeRow(
                SequenceId(next(self._sequence_ids)),
                live.request.inputs[index],
                live.request.options,
            )
            for live, index in rows
        )
        plan = EncodePlan(plan_id, made)
        self._last_kind = plan.kind
        self._charged = {}
        if self.shares.is_counted:
            for (live, _), cost in zip(rows, self._costs(rows), strict=True):
                self._charged[live.share] = self._charged.get(live.share, 0.0) + cost
            self.shares.charge(self._charged)
        return plan

    def _costs(self, rows: Parts[LiveEncode]) -> Sequence[float]:
        """Return what each of a step's rows costs, the shortest first: as much as the longest, to
        which it is padded, and the first row with a query that, too."""
        longest, paid = rows[-1][0].length(rows[-1][1]), set[EncodeInput]()
        costs: list[float] = []
        for live, index in rows:
            added = [query for query in live.queries_of(index) if query not in paid]
            paid.update(added)
            costs.append(longest + sum(query.num_tokens for query in added))
        return costs

    def _choose(self, now: float) -> list[tuple[LiveEncode, int]]:
        """Return inputs for a step, each with its message slot reserved: one row of a failed step
        alone, or else inputs of the first requests in the queue, within the budget, the shortest
        first. Park requests whose streams have no slot."""
        if (suspect := self._next_suspect(now)) is not None:
            return [suspect]
        only_begun = self._pause is not None
        batch = BatchBuilder(
            self._inputs,
            self.config,
            now,
            self._budget.tokens,
            only_begun=only_begun,
            after=self._last_kind,
        )
        batch.build()
        for live in batch.starved:
            self._park(live, now)
        if self.shares.is_contested and batch.chosen:
            self.shares.pass_over_kind([live.share for live, _ in batch.chosen])
        return sorted(batch.chosen, key=lambda row: row[0].length(row[1]))

    def _next_suspect(self, now: float) -> tuple[LiveEncode, int] | None:
        """Return the next row of a failed step that can run alone, with its message slot reserved.
        A row whose stream has no slot is left to a later batch."""
        others, _ = self._inputs.by_class(now)
        for _ in range(len(self._suspects)):
            live, index = self._suspects.popleft()
            if others and live.is_background:
                self._suspects.append((live, index))
                continue
            if live.is_ended or not live.is_left(index) or live.is_late(now):
                continue
            if not live.credit.try_reserve():
                continue
            self._inputs.take(live, index)
            if not live.left and live.parked_since is None:
                self._inputs.remove(live)
            return live, index
        return None

    # ---- requests

    def _misfit(self, request: EncodeRequest, credit: Credit) -> TrioletError | None:
        most = self.config.max_model_len
        for index, input_ in enumerate(request.inputs):
            if isinstance(input_, EncodeInput) and len(input_.token_ids) > most:
                what = f"has {len(input_.token_ids)} tokens, of at most {most}"
                return RequestTooLarge.of(f"inputs[{index}]", what)
        return None

    def _enqueue(self, live: LiveEncode, now: float) -> None:
        live.share = self.shares.enter(live.request.holder, live.request.weight)
        self._inputs.add(live, now)

    def _leave(self, live: LiveEncode) -> None:
        if live.is_queued:
            self._inputs.remove(live)
        self.shares.leave(live.share)

    # ---- readers

    def _park(self, live: LiveEncode, now: float) -> None:
        """Take a request out of the queue until its reader has taken results."""
        self._inputs.remove(live)
        super()._park(live, now)

    def _reader_drained(self, live: LiveEncode, now: float) -> None:
        """Put a parked request back into the queue once its stream has room for a batch that is
        worth a step: for half the stream, or for all inputs that are left. Otherwise only restart
        its stall timeout, because the reader has taken something. A request whose stream holds no
        message goes back at once: if the step that has its slots fails, its reader will not report
        room."""
        credit = live.credit
        live.unpark(now)
        if credit.filled and credit.free < min(live.num_left, (credit.capacity + 1) // 2):
            credit.mark_starved()
            live.park(now)
            return
        del self._parked[live.request.request_id]
        self._inputs.add(live, now)

    # ---- steps

    def _commit(self, step: OneChoiceStep, result: EncodeResult, now: float) -> None:
        self._budget.note_success()
        super()._commit(step, result, now)

    def _take_result(self, live: LiveEncode, part: int, got: EncodeRowResult, now: float) -> None:
        name, num_tokens = live.request.request_id, live.length(part)
        self._events.append(Encoded(name, part, got, num_tokens))

    def _step_failed(self, step: OneChoiceStep, failure: StepFailure, now: float) -> None:
        """Put the inputs of a failed step back. They run again: after running out of memory in
        batches of half the size, otherwise each alone. A row alone fails with its request."""
        if len(step.rows) > 1:
            self.shares.refund(self._charged)  # they run again
        super()._step_failed(step, failure, now)
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            self._budget.halve(step.plan.num_tokens)
        elif len(step.rows) > 1:
            self._suspects += [row for row in step.rows if not row[0].is_ended]

    def _put_back(self, live: LiveEncode, part: int, now: float) -> None:
        self._inputs.put_back(live, part, now)

    # ---- views

    def _why_left_out(self, live: LiveEncode) -> str:
        is_left_out = bool(live.left) and not live.in_step
        return "token budget: the next steps have others" if is_left_out else ""

    def _why_waiting(self, ahead: int) -> str:
        return "token budget: the next steps compute what is ahead" if ahead else "a step"

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand. The time grows with the number of parked requests and
        of rows in the step."""
        return replace(super().statistics(), peak_waiting=self._inputs.peak)

    def _places(self) -> Places:
        """Count inputs: those in the step, those left of requests in the queue, those left of
        parked requests, and those in the step whose requests have ended."""
        rows = [] if self._step is None else self._step.rows
        ending = sum(live.is_ended for live, _ in rows)
        parked = sum(live.num_left for live in self._parked.values())
        return Places(len(rows) - ending, self._inputs.num, parked, ending)

    def check(self) -> None:
        """Check that each input is in one place, and that every count agrees with the places.

        Raises:
            AssertionError: It names the first request for which this does not hold.
        """
        super().check()
        self._inputs.check()
        queued = self._waiting.items
        for live in self._requests.values():
            is_parked = live.parked_since is not None
            assert live.left or not is_parked, f"{live} is parked for nothing"
            places = queued.count(live)
            assert places == (1 if live.left and not is_parked else 0), f"{live} is lost"
            assert live.in_step + live.num_left + live.num_done == live.num_parts
            tokens_left = 0
            for same in live.left.values():
                lengths = [live.length(index) for index in same]
                assert lengths, f"{live} lists a kind without inputs"
                assert lengths == sorted(lengths, reverse=True), f"{live}: not longest first"
                tokens_left += sum(lengths)
            assert live.tokens_left == tokens_left, f"{live}: its tokens are miscounted"
        assert len(queued) + len(self._parked) <= len(self._requests)
        active = Counter(live.request.holder for live in queued)
        self.shares.check(active, Counter(x.request.holder for x in self._requests.values()))
