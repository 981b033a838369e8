"""Watchers of an encoder's core, which record every input from outside.

Rule: nothing here knows how `engine.core.encode.scheduler` decides. A watcher judges by what went
in, what was planned and what came out, and by the credit that came with each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor
from typing import TYPE_CHECKING, TypeAlias

from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    Pause,
    PauseMode,
    Refused,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import EndReason
from engine.core.encode.types import (
    Encoded,
    EncodeRequest,
    EncodeResult,
    EncodeRow,
    InputKind,
)

if TYPE_CHECKING:
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.encode.scheduler import EncodeScheduler
    from engine.core.encode.types import EncodePlan

_Results: TypeAlias = dict[tuple[str, int], Encoded]


@dataclass(eq=False)
class _Live:
    """An accepted request. ``left`` are indices of inputs neither in the step nor done."""

    submit: Submit
    request: EncodeRequest
    left: set[int]
    num_done: int = 0
    has_begun: bool = False
    has_ended: bool = False


@dataclass
class EncodeWatch:
    """Watch one scheduler. Each method returns what is wrong with its arguments, or ""."""

    scheduler: EncodeScheduler
    pause: PauseMode | None = None
    live: dict[str, _Live] = field(default_factory=dict)
    step: list[tuple[_Live, int, EncodeRow]] = field(default_factory=list)
    suspects: set[tuple[str, int]] = field(default_factory=set)  # inputs that must run alone
    has_failed: bool = False  # the last planned step failed, and had several rows
    room: int | None = None  # tokens of the step after one that ran out of memory
    owners: dict[int, tuple[_Live, int]] = field(default_factory=dict)  # by an input's identity
    kind: InputKind | None = None  # of the last step's inputs

    # ---- plans

    def planned(self, plan: EncodePlan | None, now: float) -> str:
        """Judge a plan; None if there was nothing to do."""
        before = [live for live in self.live.values() if self._can_go_on(live, now)]
        free = {live: live.submit.credit.free for live in before}
        rows = () if plan is None else plan.rows
        for row in rows:
            live, index = self.owners[id(row.input)]
            if reason := self._take(live, index, row):
                return reason
            if live in free:
                free[live] += 1  # this slot was free before the plan reserved it
        if rows and (reason := self._judge_size(rows)):
            return reason
        for live in before:
            held = sum(one is live for one, _, _ in self.step)
            if live.submit.credit.reserved != held:
                return f"{live.request.request_id} has {live.submit.credit.reserved} slots promised"
        return self._judge_order(before, free, now)

    def _take(self, live: _Live, index: int, row: EncodeRow) -> str:
        name = f"{live.request.request_id}/{index}"
        if live.has_ended:
            return f"{name} is computed after its end"
        if index not in live.left:
            return f"{name} is computed twice"
        if row.options != live.request.options:
            return f"{name} is computed by another's options"
        if self.pause is PauseMode.KEEP or (self.pause is not None and not live.has_begun):
            return f"{name} is computed while the engine is paused"
        live.left.discard(index)
        self.step.append((live, index, row))
        return ""

    def _judge_size(self, rows: tuple[EncodeRow, ...]) -> str:
        config = self.scheduler.config
        lengths = [row.input.num_tokens for row in rows]
        if len({row.input.kind for row in rows}) > 1:
            return "texts and images in one step"
        if len(rows) > config.max_num_seqs:
            return f"{len(rows)} inputs of at most {config.max_num_seqs}"
        if len(rows) > 1 and len(rows) * max(lengths) > config.max_num_batched_tokens:
            return f"{len(rows)} × {max(lengths)} tokens, of {config.max_num_batched_tokens}"
        if lengths != sorted(lengths):
            return "the rows are not sorted by length"
        room, self.room = self.room, None
        if room is not None and len(rows) > 1 and len(rows) * max(lengths) > room:
            return f"{len(rows)} × {max(lengths)} tokens, just out of memory, of at most {room}"
        return ""

    def _can_go_on(self, live: _Live, now: float) -> bool:
        """Return whether only other requests can keep this one from the next step."""
        deadline = live.request.deadline
        is_late = deadline is not None and deadline <= now
        is_held = self.pause is PauseMode.KEEP or (self.pause is not None and not live.has_begun)
        return bool(live.left) and not is_late and not is_held

    def _judge_order(self, before: list[_Live], free: dict[_Live, int], now: float) -> str:
        """Check that nobody starves.

        Of the requests whose readers have room and that have inputs of the step's kind, the first
        is in the step, unless the step is one row of a failed step that is run alone. No kind has
        two steps in turn while such a request has inputs of another.
        """
        last = self.kind
        self.kind = self.step[0][2].input.kind if self.step else last
        taken = {live for live, _, _ in self.step}
        places = [(live.request.request_id, index) for live, index, _ in self.step]
        for live in taken:
            live.has_begun = True
        if len(places) == 1 and places[0] in self.suspects:
            self.suspects.discard(places[0])
            self.has_failed = False
            return ""
        if self.has_failed and any(
            (live.request.request_id, index) in self.suspects
            for live in before
            if free[live]
            for index in live.left | {at for one, at, _ in self.step if one is live}
        ):
            return "after a failure, no row of it is run alone"
        self.has_failed = self.has_failed and self.pause is PauseMode.KEEP
        aging_s = self.scheduler.config.aging_s

        def key(live: _Live) -> tuple[float, float]:
            waited = max(0.0, now - live.request.arrival)
            return live.request.priority - floor(waited / aging_s), live.request.arrival

        # the plan may have parked a request whose row it has
        able = [live for live in before if free[live] and (live in taken or self._is_free(live))]
        others = [live for live in able if self._kinds_of(live) - {self.kind}]
        if self.step and self.kind is last and others:
            return f"{others[0].request.request_id} waits for a second step of another kind"
        able = [live for live in able if live in taken or self.kind in self._kinds_of(live)]
        first = min(map(key, able), default=None)
        if first is None or any(key(live) == first for live in taken):
            return ""
        return f"the first of the queue, since {first[1]:.4f}, is passed over"

    def _kinds_of(self, live: _Live) -> set[InputKind]:
        return {live.request.inputs[index].kind for index in live.left}

    def _is_free(self, live: _Live) -> bool:
        phase = self.scheduler.phase_of(live.request.request_id)
        return phase is None or phase.name != "parked"

    # ---- inputs and their results

    def applied(self, event: InputEvent, events: list[OutputEvent]) -> str:
        """Judge the results of an input."""
        answers = [one for one in events if isinstance(one, Admitted | Refused)]
        if len(answers) != isinstance(event, Submit):
            return f"{len(answers)} answers to it"
        results, must_end = self._expect(event)
        for output in events:
            match output:
                case Encoded():
                    reason = self._judge_result(output, results)
                case Finished():
                    reason = self._judge_end(output, event)
                case Refused(request_id):
                    reason = "" if self.live.pop(request_id, None) else "refused twice"
                case _:
                    reason = ""
            if reason:
                return reason
        lost = [f"{name}/{index}" for name, index in results]
        if lost:
            return f"the results of {', '.join(lost)} are lost"
        alive = [live.request.request_id for live in must_end if not live.has_ended]
        return f"{', '.join(alive)} must have ended" if alive else ""

    def _expect(self, event: InputEvent) -> tuple[_Results, list[_Live]]:
        """Return the results that an input must lead to, and the requests that it must end."""
        match event:
            case StepDone(EncodeResult() as result):
                return self._commit(result)
            case StepFailed(failure):
                return {}, self._take_back(failure.kind)
            case Submit(EncodeRequest() as request):
                live = _Live(event, request, set(range(len(request.inputs))))
                self.owners |= {id(one): (live, at) for at, one in enumerate(request.inputs)}
                self.live[request.request_id] = live
            case Cancel(request_id) if request_id in self.live:
                return {}, [self.live[request_id]]
            case Pause(mode):
                self.pause = mode
                return {}, list(self.live.values()) if mode is PauseMode.ABORT else []
            case Resume():
                self.pause = None
        return {}, []

    def _commit(self, result: EncodeResult) -> tuple[_Results, list[_Live]]:
        step, self.step = self.step, []
        results: _Results = {}
        ending: list[_Live] = []
        for (live, index, row), got in zip(step, result.rows, strict=True):
            if live.has_ended or live in ending:
                continue
            if isinstance(got, RowFailure):
                ending.append(live)
                continue
            live.num_done += 1
            name = live.request.request_id
            results[name, index] = Encoded(name, index, got.values, row.input.num_tokens)
            if live.num_done == len(live.request.inputs):
                ending.append(live)
        return results, ending

    def _take_back(self, kind: FailureKind) -> list[_Live]:
        """Let a failed step's inputs wait again; return the request of a single input."""
        step, self.step = self.step, []
        for live, index, _ in step:
            live.left.add(index)
        if len(step) == 1:
            return [live for live, _, _ in step if not live.has_ended]
        if kind is FailureKind.OUT_OF_MEMORY:
            longest = max(row.input.num_tokens for _, _, row in step)
            self.room = len(step) * longest // 2
        else:
            self.has_failed = True
            self.suspects |= {(live.request.request_id, index) for live, index, _ in step}
        return []

    def _judge_result(self, output: Encoded, results: _Results) -> str:
        name = f"{output.request_id}/{output.index}"
        expected = results.pop((output.request_id, output.index), None)
        if expected is None:
            return f"a result for {name}, which has none to get"
        return "" if output == expected else f"{name} got another's result"

    def _judge_end(self, output: Finished, event: InputEvent) -> str:
        live = self.live.pop(output.request_id, None)
        if live is None:
            return f"{output.request_id} ends, and does not live"
        live.has_ended = True
        is_whole = live.num_done == len(live.request.inputs)
        seconds = output.timings
        if min(seconds.queue_s, seconds.prefill_s, seconds.decode_s, seconds.parked_s) < 0:
            return f"negative seconds: {seconds}"
        match event:
            case StepDone():
                fits = output.reason is (EndReason.STOP if is_whole else EndReason.FAILED)
            case StepFailed():
                fits = output.reason is EndReason.FAILED
            case Cancel():
                fits = output.reason is event.reason
            case Pause():
                fits = output.reason is EndReason.ABORTED
            case _:
                fits = isinstance(event, Tick) and output.reason is EndReason.STALLED
        return "" if fits else f"{output.request_id} ends by {output.reason}"
