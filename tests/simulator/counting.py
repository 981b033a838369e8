"""A kind of work that the product does not have: to count down to 1, one number in each step."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.core.common.phases import Phase
from engine.core.common.turns import InTurn, TurnsCore
from engine.core.encode.types import EncodeResult
from engine.errors import InvalidRequest
from engine.kinds import ImageGenerationKind
from engine.requests.prepared import Prepared
from engine.requests.stream import RequestStream
from engine.settings import QueueLimits
from engine.worker.fakes.image_generation import FakeImageGenerationRunner
from tests.simulator.kind_watch import TurnsWatch
from tests.simulator.watch import WATCHES
from tests.support.step_driver import OneChoiceDriver

FAULT = MODEL = "counter"
[COUNTING] = ImageGenerationKind.capabilities  # worlds that count have no image model


@dataclass(frozen=True)
class Count:
    """A request to count, as the client sends it and as the core gets it."""

    start: int
    request_id: str = ""
    model: str = MODEL
    priority: int = 0
    timeout_s: float | None = None
    arrival: float = 0.0
    deadline: float | None = None
    capability, image_bytes, num_choices, prompt_tokens = COUNTING, 0, 1, 1
    holder, weight = "", 1
    num_tokens = num_tokens_ahead = property(lambda self: self.start)

    def validate(self):
        if self.start < 1:
            raise InvalidRequest.of("start", "must be at least 1")

    def expected(self):
        return [*range(self.start, 0, -1)]

    def journal_line(self):
        return f"{self.request_id} {self.start}"


class Counted(NamedTuple):
    request_id: str
    sequence: int
    value: int

    def journal_line(self):
        return f"  counted {self.request_id} {self.value}"


class CountPlan(NamedTuple):
    plan_id: int
    row: Counted
    num_tokens = 1
    rows = property(lambda self: (self.row,))

    def journal_line(self):
        return f"plan {self.plan_id}:{self.row.journal_line()}"


class LiveCount(InTurn):
    running_phase = Phase.DECODE
    num_parts = property(lambda self: self.request.start)
    part = queued_tokens = property(lambda self: self.request.start - self.num_done)


class CountCore(TurnsCore):
    live_type, plural = LiveCount, "counts"

    def _plan_of(self, plan_id, rows):
        [(live, number)] = rows
        return CountPlan(plan_id, Counted(live.request.request_id, live.sequence, number))

    def _take_result(self, live, part, got, now):
        self._events.append(got)


class CountRunner(FakeImageGenerationRunner):
    def _execute(self, plan):
        self._spend(plan.num_tokens)
        self._fail(plan, self.script.image_fault)
        return EncodeResult(plan.plan_id, (self._row_fault(plan.row.sequence) or plan.row,))


class CountStream(RequestStream):
    def __init__(self, request, options):
        super().__init__(request, options, num_beside=0, credited=(int,))

    def push(self, event):
        if not isinstance(event, Counted):
            return super().push(event)
        self._note_result(Phase.DECODE, self.tokens_done + 1)
        self._reader.push(event.value)


class CountKind(ImageGenerationKind):
    request_types, make_stream = (Count,), CountStream

    def make_core(self, info, config, name):
        return CountCore(config, config.max_drawings)

    def make_preparer(self, tokenizing, tasks):
        return self

    async def prepare(self, assignment):
        own = {"request_id": assignment.core_id, "deadline": assignment.deadline}
        return Prepared(replace(assignment.request, arrival=assignment.arrival, **own))


WATCHES[CountCore] = TurnsWatch
BAD = [({"start": 0}, "INVALID_REQUEST")]


def ask(rng, index, timeout_s):
    return Count(rng.randint(1, 30), f"c{index}", "", rng.choice([0, 0, -1, 2]), timeout_s)


class CountDriver(OneChoiceDriver):
    fault, request = "image_fault", Count

    def __init__(self, max_seats, **limits):
        core = CountCore(QueueLimits(**limits), max_seats)
        super().__init__(core, CountRunner(), TurnsWatch(core))
