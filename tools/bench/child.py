"""What a step costs more when its runner lives in another process: plan there, result back.

A runner that computes nothing answers a plan of decoding rows, in this process and in its own; the
difference is the hop: packing, the pipe, unpacking, and the waking of two processes. Beside it what
packing alone takes, with the plan and the result taken apart as they are, and pickled as they come;
and asking beside a step, which is what a constraint that is already compiled would cost.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

from engine.core.plan import (
    BlockDelta,
    Logits,
    RowResult,
    RunnerSpec,
    StepPlan,
    StepResult,
)
from engine.core.plan import Row as PlanRow
from engine.core.types import Alternative, BlockId, Constraint, PlanId, SequenceId, TokenLogprob
from engine.model import frames
from engine.model.child import ChildRunner
from engine.model.fake import FakeRunner
from tools.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTS = (1, 64, 256)
STEPS = 300
ALTERNATIVES = 20
BLOCK_SIZE = 16
FORM = Constraint("json_object", "{}")


class Idle(FakeRunner):
    """Answers every row with a token at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        rows = tuple([RowResult(row.sequence, (7,), " word") for row in plan.rows])
        return StepResult(plan.plan_id, rows)


def make(spec: RunnerSpec, capability: object) -> Idle:
    """The factory that the process calls."""
    return Idle()


def plan_of(count: int) -> StepPlan:
    """Rows that decode; one in sixteen begins a new block."""
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
    """One call's, of `STEPS` in a row."""
    started = time.perf_counter()
    for _ in range(STEPS):
        call()
    return 1e6 * (time.perf_counter() - started) / STEPS


def pack(plan: StepPlan, result: StepResult) -> None:
    """All of a step's packing and unpacking, both sides'."""
    dump, load = pickle.dumps, pickle.loads
    frames.plan_of(load(dump(frames.plain_plan(plan), frames.PROTOCOL)))
    frames.result_of(load(dump(frames.plain_result(result), frames.PROTOCOL)))


def pickle_alone(plan: StepPlan, result: StepResult) -> None:
    """The same without taking anything apart."""
    for value in (plan, result):
        pickle.loads(pickle.dumps(value, frames.PROTOCOL))


def with_logprobs(count: int) -> StepResult:
    """Rows that ask for as many alternatives as may be asked for."""

    def scored(row: int) -> TokenLogprob:
        others = [Alternative(i, f" w{i}", -(i + row) / 7, i) for i in range(ALTERNATIVES)]
        return TokenLogprob(7, " word", -row / 3, tuple(others))

    rows = [RowResult(SequenceId(row), (7,), " word", (scored(row),)) for row in range(count)]
    return StepResult(PlanId(1), tuple(rows))


def measures(own: Idle, apart: ChildRunner, count: int) -> list[Callable[[], float]]:
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
    own = Idle()
    apart = ChildRunner("tools.bench.child:make", RunnerSpec("idle"))
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
