"""Measures what a step costs in the scheduler: the time of plan + commit for steadily decoding
rows.

The prefix cache and the cheap checks are on, and garbage is collected as in a server. The runner is
left out: its results are made off the clock. Further rows are the floor (a bare loop that makes a
plan's row and an event for each sequence), 64 rows of long contexts, and 1,024 rows with Python's
own thresholds for garbage collection.

Two of sixteen steps cost more than the others: the one in which 64 rows take their next block, and
the one that makes the keys of full blocks. Most of the time goes into two named tuples a row.
"""

from __future__ import annotations

import gc
import time

from engine.config import SchedulerConfig
from engine.core.common.credit import Credit
from engine.core.common.events import StepDone, Submit
from engine.core.common.types import RequestId, SequenceId
from engine.core.text.plan import Logits, RowResult, StepResult
from engine.core.text.plan import Row as PlanRow
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.gc_tuning import freeze_after_load
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

MEASURES = ("engine/core", "engine/gc_tuning.py")

STEPS = 200
TURNS = 21  # a turn of 64 rows takes 20 ms, and a busy host may disturb all of it
COUNTS = (1, 64, 256, 1024)
SHORT, LONG = 32, 4096  # tokens of each prompt
PYTHONS_THRESHOLDS = gc.get_threshold()
BAR_US_64 = 100.0
BAR_RATIO_1024 = 20.0


def decoding_scheduler(count: int, context: int) -> Scheduler:
    """Return a scheduler with ``count`` sequences that have computed prompts of ``context`` tokens
    and room to decode."""
    config = SchedulerConfig(
        num_blocks=count * (context + 1024) // 16,
        max_model_len=context + 1024,
        max_num_seqs=count,
        max_num_batched_tokens=max(2048, (context + 8) * count),
        step_time_target_s=0.0,
        inter_token_target_s=0.0,
    )
    scheduler = Scheduler(config)
    for index in range(count):
        prompt = tuple(range(index, index + context))
        request = Request(
            RequestId(f"r{index}"), prompt, Sampling(temperature=0.0), Stops(900), float(index)
        )
        scheduler.apply(Submit(request, Credit(100_000)), 0.0)
    step(scheduler, 1.0)
    return scheduler


def step(scheduler: Scheduler, now: float) -> float:
    """Run a step and return the seconds of plan and commit."""
    started = time.perf_counter()
    plan, _ = scheduler.plan(now)
    planned = time.perf_counter()
    assert plan is not None
    rows = tuple(
        RowResult(row.sequence, (7,), "x") if row.logits.samples else RowResult(row.sequence)
        for row in plan.rows
    )
    done = StepDone(StepResult(plan.plan_id, rows))
    committing = time.perf_counter()
    scheduler.apply(done, now)
    return planned - started + time.perf_counter() - committing


def measure(count: int, context: int = SHORT) -> float:
    """Return the time of plan + commit per step of ``count`` rows, in µs."""
    scheduler = decoding_scheduler(count, context)
    step(scheduler, 2.0)
    steps = STEPS if count <= 256 else STEPS // 4
    total = sum(step(scheduler, 3.0 + index) for index in range(steps))
    return 1e6 * total / steps


def floor(count: int) -> float:
    """Return the time of making a row and an event for each of ``count`` sequences, in µs."""
    steps = STEPS
    name = RequestId("r")
    started = time.perf_counter()
    for _ in range(steps):
        rows = []
        events = []
        for index in range(count):
            rows.append(PlanRow(SequenceId(index), index, 1, None, Logits.LAST, ()))
            events.append(Tokens(name, 0, (7,), "x", (), ()))
    return 1e6 * (time.perf_counter() - started) / steps


def measure_unsettled(count: int) -> float:
    """Measure a step as in a process that never called `freeze_after_load`."""
    settled = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(*PYTHONS_THRESHOLDS)
    try:
        return measure(count)
    finally:
        gc.freeze()
        gc.set_threshold(*settled)


def run() -> list[Row]:
    """Return the bench's rows."""
    freeze_after_load()
    measures = [
        *(lambda c=c: measure(c) for c in COUNTS),
        lambda: measure(64, LONG),
        lambda: measure_unsettled(COUNTS[-1]),
        lambda: floor(64),
    ]
    *settled, long, unsettled, floors = repeat_in_turn(measures, TURNS)
    samples = dict(zip(COUNTS, settled, strict=True))
    rows = [
        row_of(
            f"plan + commit, {count} rows",
            samples[count],
            "µs",
            bar=BAR_US_64 if count == 64 else None,
        )
        for count in COUNTS
    ]
    ratios = [large / small for large, small in zip(samples[1024], samples[64], strict=True)]
    rows.append(row_of("1024 rows against 64", ratios, "×", bar=BAR_RATIO_1024))
    rows.append(row_of(f"64 rows of {LONG} tokens each", long, "µs"))
    rows.append(row_of("1024 rows, Python's own garbage thresholds", unsettled, "µs"))
    rows.append(row_of("floor: a row tuple and an event, 64 rows", floors, "µs"))
    return rows
