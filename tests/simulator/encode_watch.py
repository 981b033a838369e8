"""The watcher of an encoder's core (`tests.simulator.kind_watch`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.common.events import OutputEvent, PauseMode, Submit
from engine.core.common.phases import Phase
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.waiting_queue import BACKGROUND_FROM
from engine.core.encode.types import Encoded, EncodePlan, EncodeRow, EncodeRowResult, InputKind
from tests.simulator.kind_watch import KindWatch, Live, holder_of
from tests.simulator.share_watch import Leads


@dataclass(eq=False)
class LiveInputs(Live):
    """An accepted request. ``left`` are indices of inputs neither in the step nor done."""

    left: set[int] = field(default_factory=set)

    def lengths(self, kind: InputKind | None) -> list[int]:
        """Return the tokens of the inputs of a kind that are left."""
        inputs = [self.submit.request.inputs[index] for index in self.left]
        return [one.num_tokens for one in inputs if one.kind is kind]

    @property
    def kinds(self) -> set[InputKind]:
        """The kinds of the inputs that are left."""
        return {self.submit.request.inputs[index].kind for index in self.left}


def is_background(live: LiveInputs) -> bool:
    """Return whether a request is background work."""
    return live.submit.request.priority >= BACKGROUND_FROM


def _cost_of(rows: Sequence[EncodeRow]) -> int:
    """Return the tokens of a step: its rows, padded to the longest, and each of their queries."""
    queries = {getattr(row.input, "query", None) for row in rows} - {None}
    padded = len(rows) * max(row.input.num_tokens for row in rows)
    return padded + sum(len(query.token_ids) for query in queries if query is not None)


class EncodeWatch(KindWatch[LiveInputs]):
    """Watch the scheduler of one encoder."""

    live_type = LiveInputs

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.suspects: set[tuple[str, int]] = set()  # inputs that must run alone
        self.has_failed = False  # the last step of several rows failed
        self.room: int | None = None  # most tokens of a step after one that ran out of memory
        self.owners: dict[int, tuple[LiveInputs, int]] = {}  # by an input's identity
        self.kind: InputKind | None = None  # the kind of the last step's inputs
        self.leads = Leads(scheduler.shares)

    # ---- plans

    def planned(self, plan: EncodePlan | None, events: list[OutputEvent], now: float) -> str:
        """Judge a plan, None if there is nothing to compute."""
        before = [
            live
            for live in self.live.values()
            if live.left and not live.is_late(now) and not self.is_held(live)
        ]
        free = {live: live.submit.credit.free for live in before}
        for row in () if plan is None else plan.rows:
            live, index = self.owners[id(row.input)]
            if reason := self._take(live, index, row):
                return reason
            if live in free:
                free[live] += 1  # this slot was free before the plan reserved it
        if plan is not None and (reason := self._judge_size(plan)):
            return reason
        for live in before:
            held = sum(one is live for one, _, _ in self.step)
            if live.submit.credit.reserved != held:
                return f"{live.name} has {live.submit.credit.reserved} slots promised"
        return self._judge_order(before, free, now)

    def _take(self, live: LiveInputs, index: int, row: EncodeRow) -> str:
        name = f"{live.name}/{index}"
        if live.has_ended:
            return f"{name} is computed after its end"
        if index not in live.left:
            return f"{name} is computed twice"
        if row.options != live.submit.request.options:
            return f"{name} is computed by another's options"
        if self.is_held(live):
            return f"{name} is computed while the engine is paused"
        live.left.discard(index)
        self.step.append((live, index, row))
        return ""

    def _judge_size(self, plan: EncodePlan) -> str:
        rows, config = plan.rows, self.config
        lengths = [row.input.num_tokens for row in rows]
        cost = _cost_of(rows)
        if {row.input.kind for row in rows} != {plan.kind}:
            return "texts and images in one step"
        if len(rows) > config.max_num_seqs:
            return f"{len(rows)} inputs of at most {config.max_num_seqs}"
        if len(rows) > 1 and cost > config.max_num_batched_tokens:
            return f"{len(rows)} inputs of {cost} tokens, of {config.max_num_batched_tokens}"
        if plan.num_tokens != cost:
            return f"{cost} tokens, counted as {plan.num_tokens}"
        if lengths != sorted(lengths):
            return "the rows are not sorted by length"
        room, self.room = self.room, None
        if room is not None and len(rows) > 1 and cost > room:
            return f"{len(rows)} inputs of {cost} tokens, just out of memory, of at most {room}"
        return ""

    def _judge_order(
        self, before: list[LiveInputs], free: dict[LiveInputs, int], now: float
    ) -> str:
        """Check that nobody starves.

        A step takes inputs of one kind, from requests whose readers have room, in the queue's
        order by priority after aging: a request that could have got more rows comes after all that
        got some. The longest inputs of a request go first. No kind of input has two steps in turn
        while another one waits. After a failed step, each of its rows is run alone.
        """
        service = self._service()
        weights = {holder_of(one): one.submit.request.weight for one in self.live.values()}
        self.leads.tell(service, weights)
        last = self.kind
        self.kind = self.step[0][2].input.kind if self.step else last
        taken: dict[LiveInputs, list[int]] = {}
        for live, _, row in self.step:
            live.has_begun = True
            taken.setdefault(live, []).append(row.input.num_tokens)
        places = [(live.name, index) for live, index, _ in self.step]
        if len(places) == 1 and places[0] in self.suspects:
            self.suspects.discard(places[0])
            self.has_failed = False
            self.leads.restart()
            return ""
        if self.has_failed and any(
            (live.name, index) in self.suspects
            for live in before
            if free[live]
            for index in live.left | {at for one, at, _ in self.step if one is live}
        ):
            return "after a failure, no row of it is run alone"
        self.has_failed = self.has_failed and self.pause is PauseMode.KEEP
        # planning may have parked a request that has a row in the plan
        able = [live for live in before if free[live] and (live in taken or self._is_free(live))]
        if others := [live for live in able if not is_background(live)]:
            able = others
            if any(map(is_background, taken)):
                return f"background work goes before {others[0].name}"
        others = [live for live in able if live.kinds - {self.kind}]
        if self.step and self.kind is last and others:
            return f"{others[0].name} waits for a second step of another kind"
        if able and not self.step:
            return f"{able[0].name} could go on, and nobody does"
        behind = [live for live in able if live.lengths(self.kind) and live.submit.credit.free]
        late_s = self.scheduler.aging_late_s
        for live in able:
            rows, left = taken.get(live, []), live.lengths(self.kind)
            own = [one for one in behind if holder_of(one) == holder_of(live)]
            first = min(own, key=lambda one: self.key(one, now - late_s), default=None)
            if rows and first and self.key(live, now) > self.key(first, now - late_s):
                return f"{live.name} overtakes {first.name}"
            if rows and left and max(left) > min(rows):
                return f"{live.name}: an input of {min(rows)} tokens goes before {max(left)}"
        if len(able) <= 1:
            return ""
        largest = max(self.config.max_num_batched_tokens, self.config.max_model_len)
        return self.leads.note(service, weights, map(holder_of, behind), largest)

    def _service(self) -> dict[str, float]:
        """Return the tokens of each holder in the step."""
        longest = max((row.input.num_tokens for _, _, row in self.step), default=0)
        service: dict[str, float] = {}
        for live, _, _ in self.step:
            service[holder_of(live)] = service.get(holder_of(live), 0.0) + longest
        paid = set()  # queries: the first row that has one pays for it
        for live, _, row in self.step:
            query = getattr(row.input, "query", None)
            if query is not None and query not in paid:
                paid.add(query)
                service[holder_of(live)] += len(query.token_ids)
        return service

    def _is_free(self, live: LiveInputs) -> bool:
        return self.phase(live) is not Phase.PARKED

    # ---- inputs and their results

    def accept(self, submit: Submit) -> LiveInputs:
        """Return the record of a request."""
        inputs = submit.request.inputs
        live = LiveInputs(submit, left=set(range(len(inputs))))
        self.owners |= {id(one): (live, index) for index, one in enumerate(inputs)}
        return live

    def number(self, output: Encoded) -> int:
        """Return the index of the message's input, by which a step's messages are told apart."""
        return output.index

    def is_whole(self, live: LiveInputs) -> bool:
        """Return whether all inputs of a request are computed."""
        return live.num_done == len(live.submit.request.inputs)

    def message(self, live: LiveInputs, part: int, row: EncodeRow, got: EncodeRowResult) -> Encoded:
        """Return the event that must follow from a row's result."""
        name = live.submit.request.request_id
        return Encoded(name, part, got, row.input.num_tokens)

    def fail(self, failure: StepFailure) -> list[LiveInputs]:
        """Let a failed step's inputs wait again; a step of one input ends its request."""
        step = self.step
        for live, index, _ in step:
            live.left.add(index)
        if len(step) > 1 and failure.kind is FailureKind.OUT_OF_MEMORY:
            self.room = _cost_of([row for _, _, row in step]) // 2
        elif len(step) > 1:
            self.has_failed = True
            self.suspects |= {(live.name, index) for live, index, _ in step}
        return super().fail(failure)
