"""A third kind of work, plugged in from outside: count down from n, one number in each step.

No part of the engine knows this kind. This file has all that a kind needs: the client's request,
the core's request (which is its plan and its result too), a core, a runner, a stream, and the kind
that joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from engine.config import EngineConfig
from engine.core.common.events import Admitted, Cancel, Finished, StepDone, StepFailed, Submit
from engine.core.common.phases import Phase
from engine.core.common.types import CoreStatistics, EndReason, Timings, Usage
from engine.errors import InvalidRequest
from engine.requests.prepared import Prepared
from engine.requests.stream import RequestStream
from engine.status import Capability
from engine.worker.interface import MemoryEstimate

COUNTING = Capability.TEXT_TO_IMAGE  # its engine has no other kind


@dataclass(frozen=True)
class CountRequest:
    start: int
    request_id: str = ""
    model: str = "counter"
    timeout_s: float | None = None
    capability, image_bytes = COUNTING, 0

    def validate(self):
        if self.start < 1:
            raise InvalidRequest.of("start", "must be at least 1")


@dataclass(frozen=True)
class Count:
    """A request in the core, a plan of one row, its result, and the event for its reader."""

    request_id: str
    left: int
    credit: object = None
    plan_id: int = 0
    num_tokens = num_tokens_ahead = num_choices = 1
    arrival = priority = 0
    deadline = None
    rows = (None,)


class CountCore:
    """In each step, the first request whose reader has room counts down by one."""

    config = EngineConfig()

    def __init__(self):
        self.live, self.step, self.steps = {}, None, 0

    def apply(self, event, now):
        match event:
            case Submit():
                request = replace(event.request, credit=event.credit)
                self.live[request.request_id] = request
                return [Admitted(request.request_id, 1)]
            case Cancel() if event.request_id in self.live:
                return self.end(event.request_id, event.reason)
            case StepDone() | StepFailed():
                done, self.step = self.step, None
                if isinstance(event, StepFailed) or done.request_id not in self.live:
                    done.credit.cancel()
                    is_live = done.request_id in self.live
                    return self.end(done.request_id, EndReason.FAILED) if is_live else []
                done.credit.fill()
                self.live[done.request_id] = replace(done, left=done.left - 1)
                is_last = done.left == 1
                return [done, *(self.end(done.request_id, EndReason.STOP) if is_last else ())]
        return []

    def end(self, name, reason):
        del self.live[name]
        return [Finished(name, 0, reason, Usage(1, 0, 0), Timings())]

    def plan(self, now):
        for request in self.live.values():
            if request.credit.try_reserve():
                self.steps += 1
                self.step = replace(request, plan_id=self.steps)
                return self.step, []
            request.credit.mark_starved()
        return None, []

    def __getattr__(self, name):  # the other methods of `Core` have nothing to do here
        return {
            "is_idle": not self.live and self.step is None,
            "is_live": self.live.__contains__,
            "phase_of": lambda name: Phase.DECODE if name in self.live else None,
            "statistics": lambda: CoreStatistics(running=len(self.live), step_count=self.steps),
        }.get(name, lambda *_: None)


class CountRunner:
    tokenizer = None

    def estimate(self):
        return MemoryEstimate(1)

    def load(self, progress):
        info = dict.fromkeys(("memory_bytes", "threads", "max_model_len", "full_sequences"), 1)
        info |= dict.fromkeys(("architecture", "dtype", "device", "is_demo"), "")
        return SimpleNamespace(**info, context_note="", quantization="", capability=COUNTING)

    def execute(self, plan):
        if plan.left == 13:
            raise RuntimeError("planted")
        return plan

    def close(self):
        pass


class CountStream(RequestStream):
    def __init__(self, request, options):
        self.request = request
        super().__init__(options, num_beside=1, credited=(int,))

    def push(self, event):
        self._reader.push(event.left) if isinstance(event, Count) else super().push(event)

    def _admit(self, event):
        pass

    def _finish(self, event):
        self.close(None)


class CountKind:
    capabilities, request_types = (COUNTING,), (CountRequest,)
    default_threads, token_event = 1, None
    make_core = staticmethod(lambda info, config, name: CountCore())
    make_tools = staticmethod(lambda *_: None)
    make_stream = CountStream

    def make_preparer(self, tokenizing, tasks):
        return self

    async def prepare(self, assignment):
        return Prepared(Count(assignment.core_id, assignment.request.start))
