"""Measures what a step costs more if its runner is in another process.

A runner that computes nothing answers a plan of decoding rows, in this process and in its own. The
difference is the cost of the hop: packing, the pipe, unpacking, and waking two processes. Further
rows measure packing alone, with plan and result as plain tuples and pickled directly, and a request
beside a step, which is the cost of a constraint that is already compiled.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import BlockDelta, Logits, RowResult, StepPlan, StepResult
from engine.core.text.plan import Row as PlanRow
from engine.core.text.types import Alternative, Constraint, TokenLogprob
from engine.processes.channel import PROTOCOL
from engine.worker.fakes.text import FakeRunner
from engine.worker.interface import RunnerSpec
from engine.worker.process import messages
from engine.worker.process.runner import ProcessRunner
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("engine/core/text/plan.py", "engine/worker/process")

COUNTS = (1, 64, 256)
STEPS = 300
ALTERNATIVES = 20
BLOCK_SIZE = 16
FORM = Constraint("json_object", "{}")


class Idle(FakeRunner):
    """A runner that computes nothing and answers every row with a token."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Answer every row at once."""
        rows = tuple([RowResult(row.sequence, (7,), " word") for row in plan.rows])
        return StepResult(plan.plan_id, rows)


def make(spec: RunnerSpec, capability: object) -> Idle:
    """Make the runner in its own process."""
    return Idle()


def plan_of(count: int) -> StepPlan:
    """Return a plan of decoding rows. One row in sixteen begins a new block."""
    rows = [
        PlanRow(
            SequenceId(index),
            100 + index,
            1,
            BlockDelta(6, (BlockId(index),)) if index % BLOCK_SIZE == 0 else None,
            Logits.LAST,
        )
        for index in range(count)
    ]
    return StepPlan(PlanId(1), tuple(rows))


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean time of a call, over `STEPS` calls."""
    started = time.perf_counter()
    for _ in range(STEPS):
        call()
    return 1e6 * (time.perf_counter() - started) / STEPS


def pack(plan: StepPlan, result: StepResult) -> None:
    """Pack and unpack a step's plan and result, as both processes together do."""
    dump, load = pickle.dumps, pickle.loads
    messages.plan_of(load(dump(messages.plain_plan(plan), PROTOCOL)))
    messages.result_of(load(dump(messages.plain_result(result), PROTOCOL)))


def pickle_alone(plan: StepPlan, result: StepResult) -> None:
    """Pickle and unpickle plan and result without turning them into plain tuples."""
    for value in (plan, result):
        pickle.loads(pickle.dumps(value, PROTOCOL))


def with_logprobs(count: int) -> StepResult:
    """Return a result whose rows have the most alternatives that a request may ask for."""

    def scored(row: int) -> TokenLogprob:
        others = [Alternative(i, f" w{i}", -(i + row) / 7, i) for i in range(ALTERNATIVES)]
        return TokenLogprob(7, " word", -row / 3, tuple(others))

    rows = [RowResult(SequenceId(row), (7,), " word", (scored(row),)) for row in range(count)]
    return StepResult(PlanId(1), tuple(rows))


def measures(own: Idle, apart: ProcessRunner, count: int) -> list[Callable[[], float]]:
    """Return the measurements of a step of ``count`` rows."""
    plan = plan_of(count)
    result = own.execute(plan)
    assert apart.execute(plan) == result
    return [
        lambda: microseconds(lambda: apart.execute(plan)),
        lambda: microseconds(lambda: own.execute(plan)),
        lambda: microseconds(lambda: pack(plan, result)),
        lambda: microseconds(lambda: pickle_alone(plan, result)),
    ]


def run() -> list[Row]:
    """Return the bench's rows."""
    own = Idle()
    apart = ProcessRunner("tools.lab.bench.process:make", RunnerSpec("idle"))
    rows: list[Row] = []
    try:
        own.load(lambda progress: None)
        apart.load(lambda progress: None)
        for count in COUNTS:
            there, here, packed, pickled = repeat_in_turn(measures(own, apart, count))
            hops = [a - b for a, b in zip(there, here, strict=True)]
            rows += [
                row_of(f"a step of {count} rows, in its own process", there, "µs"),
                row_of(f"a step of {count} rows, in this process", here, "µs"),
                row_of(f"the hop, {count} rows", hops, "µs"),
                row_of(f"packing alone, {count} rows", packed, "µs", note="of the hop"),
                row_of(f"by pickle alone, {count} rows", pickled, "µs", note="rejected"),
            ]
        plan, scored = plan_of(64), with_logprobs(64)
        packed, pickled = repeat_in_turn(
            [
                lambda: microseconds(lambda: pack(plan, scored)),
                lambda: microseconds(lambda: pickle_alone(plan, scored)),
            ]
        )
        what = f"64 rows of {ALTERNATIVES} log-probabilities"
        rows += [
            row_of(f"packing alone, {what}", packed, "µs"),
            row_of(f"by pickle alone, {what}", pickled, "µs", note="rejected"),
        ]
        [asked] = repeat_in_turn([lambda: microseconds(lambda: apart.compile(FORM))])
        rows.append(row_of("asking beside the steps", asked, "µs"))
    finally:
        apart.close()
    return rows
