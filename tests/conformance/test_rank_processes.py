"""A real model divided among rank processes, as in a server (D29)."""

import os
import signal
import threading
import time
from contextlib import closing

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Constraint
from engine.errors import WorkerLost
from engine.worker.factory import RUNNER_OF, make_process_runner, make_runner, runner_spec
from engine.worker.process.runner import ProcessRunner
from tests.conformance.test_division import tokens_of
from tests.support.process_fakes import a_plan, drive, is_gone
from tests.support.wire import wait_until

STORIES = ModelConfig("demo-stories", threads=1)
DIVIDED = ModelConfig("demo-stories", threads=1, tp=2)
CONFIG = EngineConfig(models=(DIVIDED,), max_model_len=512, kv_cache_memory=8 << 20)
FORM = Constraint("regex", "[a-z ]{1,40}")
SOON_S = 1.0  # the longest time from a rank's death to the error
PATIENCE_S = 10.0  # how long a stopped rank is waited for, in place of --step-timeout


def load(runner):
    return runner.load(lambda progress: None)


def pids_of(runner):
    """Return the processes of a runner's ranks."""
    return [rank.pid for rank in runner.process.ranks]


@pytest.mark.slow
def test_ranks_in_processes_give_the_tokens_of_one_model_and_one_death_ends_both():
    runners = make_runner(STORIES, CONFIG), make_process_runner(DIVIDED, CONFIG)
    with closing(runners[0]) as whole, closing(runners[1]) as parts:
        own, info = load(whole), load(parts)
        assert (info.tp, info.num_blocks, info.threads) == (2, own.num_blocks, 2)
        here, there = (drive(one, constraint=FORM) for one in (whole, parts))
        sure = {
            new.sequence
            for plan, _ in here
            for new in plan.admitted
            if new.sampling.is_greedy or new.sampling.seed is not None
        }
        found, wanted = tokens_of(there), tokens_of(here)
        assert {one: found[one] for one in sure} == {one: wanted[one] for one in sure}
        assert parts.compile(FORM) > 0
        os.kill(pids_of(parts)[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="of rank 1 was killed by signal 9"):
            parts.execute(a_plan(9999, 9999))
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: all(is_gone(pid) for pid in pids_of(parts)), SOON_S, "their end")


class Steps(threading.Thread):
    """A thread that loads a runner and runs steps until one raises."""

    def __init__(self, runner):
        super().__init__()
        self._runner = runner
        self.is_loaded = threading.Event()
        self.error = None
        self.ended_at = 0.0
        self.start()

    def run(self):
        try:
            load(self._runner)
            self.is_loaded.set()
            for number in range(1 << 30):
                self._runner.execute(a_plan(number))
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["start", "load", "step"])
def test_a_rank_that_dies_or_stops_ends_the_group_in_time(phase, number, rank):
    """In an engine the watchdog ends a hung step; here the test calls `kill` in its place."""
    patience_s = PATIENCE_S
    spec = runner_spec(DIVIDED, CONFIG)
    is_stop = number == signal.SIGSTOP
    runner = ProcessRunner(RUNNER_OF, spec, patience_s=patience_s if is_stop else 60.0)
    steps = Steps(runner)
    wait_until(lambda: runner.process is not None, 10)
    if phase == "load":
        time.sleep(2.5)  # by now weights are read, or the ranks connect
    if phase == "step":
        assert steps.is_loaded.wait(120)
        time.sleep(0.2)
    os.kill(pids_of(runner)[rank], number)
    began = time.monotonic()
    limit_s = SOON_S
    if is_stop:
        limit_s += patience_s
        if phase == "step" or steps.is_loaded.is_set():
            time.sleep(patience_s)
            runner.kill("took too long for a step")
    steps.join(60)
    with closing(runner):
        assert isinstance(steps.error, WorkerLost)
        assert steps.ended_at - began < limit_s
        wait_until(lambda: all(is_gone(pid) for pid in pids_of(runner)), SOON_S, "their end")
    with closing(make_process_runner(DIVIDED, CONFIG)) as runner:
        load(runner)
        assert runner.execute(a_plan(7)).plan_id == 7
