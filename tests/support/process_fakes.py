"""The test's side of worker processes whose runners are fakes (`tests.support.worker_fakes`)."""

import contextlib
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from engine.core.text.plan import AdmittedSequence, BlockDelta, Logits, Row, StepPlan
from engine.core.text.types import Sampling, Stops
from engine.worker.interface import RunnerSpec
from engine.worker.process.runner import ProcessRunner
from tests.support.core_driver import Driver, make_request
from tests.support.wire import wait_until
from tests.support.worker_fakes import BLOCK_SIZE, NUM_BLOCKS

MAKE = "tests.support.worker_fakes:make"


def spec_of(**asked):
    """Return the spec of a fake runner that behaves as ``asked`` (`tests.support.worker_fakes`)."""
    return RunnerSpec(model=json.dumps(asked))


def process_runner(**asked):
    """Return an unloaded runner whose process has this behaviour."""
    return ProcessRunner(MAKE, spec_of(**asked))


def group_runner(folder, *, size=2, patience_s=30.0, **asked):
    """Return an unloaded runner of a group of processes with this behaviour. The ranks meet in
    ``folder``; ``ranks`` says what single ranks do besides, by number as text."""
    spec = replace(spec_of(folder=str(folder), **asked), tp=size)
    return ProcessRunner(MAKE, spec, patience_s=patience_s)


@contextlib.contextmanager
def loaded(**asked):
    """Yield a loaded runner whose process has this behaviour, and close it at the end."""
    with closing(process_runner(**asked)) as runner:
        runner.load(lambda progress: None)
        yield runner


def wait_for(path, timeout_s=30.0):
    """Wait until a file exists."""
    wait_until(path.exists, timeout_s, f"{path.name}")


def is_gone(pid):
    """Return whether the process is gone, or is dead and waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


# ---- plans


def a_plan(number=0, sequence=None):
    """Return a step that admits a sequence and gives it its first token."""
    sequence = number if sequence is None else sequence
    admitted = AdmittedSequence(sequence, (1, 2, 3), Sampling(temperature=0.0), Stops(8))
    row = Row(sequence, 0, 3, BlockDelta(0, (sequence % NUM_BLOCKS,)), Logits.LAST)
    return StepPlan(number, (row,), admitted=(admitted,))


def empty_plan(number=0):
    """Return a step without rows."""
    return StepPlan(number, ())


class Recorder:
    """A loaded runner that keeps every plan that it executes, with the result."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []

    def load(self, progress):
        """Do nothing: the runner is loaded."""

    def execute(self, plan):
        """Execute the plan, and keep it with its result."""
        result = self._runner.execute(plan)
        self.steps.append((plan, result))
        return result


def drive(runner, *, constraint=None):
    """Run varied requests through a scheduler and a loaded runner; return plans with results.

    Some requests follow ``constraint``, which the runner compiles.
    """
    recorder = Recorder(runner)
    driver = Driver(
        runner=recorder,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=40,
    )
    if constraint is not None:
        runner.compile(constraint)
    for number in range(12):
        sampling = Sampling(
            temperature=0.7 if number % 5 else 0.0,
            seed=number if number % 2 else None,
            logprobs=number % 3 or None,
            prompt_logprobs=2 if number % 4 == 0 else None,
        )
        prompt = range(5 + number, 30 + 7 * number)
        asked = {"constraint": constraint} if number % 3 == 1 else {}
        driver.submit(
            make_request(
                f"r{number}", prompt, max_tokens=9, n=1 + number % 3, sampling=sampling, **asked
            )
        )
    driver.run()
    return recorder.steps
