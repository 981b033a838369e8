"""The processes of a divided model: they live, fail and die as one worker (D29).

Fakes compute in them, whose collectives are files (`tests.support.worker_fakes.FakeRank`); the
conformance tests run real ranks. Every test ends with as many descriptors, threads and children as
it began with.
"""

import os
import random
import select
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, ShuttingDown, WorkerLost
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import ModelState
from engine.worker.fakes.text import FakeRunner
from engine.worker.process.answers import GRACE_S
from engine.worker.process.messages import WorkerProcessError
from tests.service.test_process_worker import Call, check_left, inventory, load
from tests.support.core_driver import expected_tokens
from tests.support.process_fakes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    a_plan,
    drive,
    empty_plan,
    group_runner,
    is_gone,
    wait_for,
)
from tests.support.wire import wait_until

SOON_S = 1.0  # seconds from a rank's death to the error
LATE_S = 10.0  # seconds from the end of the patience to the error, on a busy machine
PATIENCE_S = 1.5  # of tests with silent ranks, in place of --step-timeout
HANG_S = 600.0
PHASES = ("load", "step", "idle")


@pytest.fixture(autouse=True)
def _leaves_nothing():
    before = inventory()
    yield
    check_left(before)


def pids_of(runner):
    """Return the processes of a runner's ranks."""
    return [rank.pid for rank in runner.process.ranks]


def all_gone(runner):
    """Return whether no rank is left."""
    return all(is_gone(pid) for pid in pids_of(runner))


# ---- what a group computes ---------------------------------------------------------------------


def test_a_group_gives_every_row_of_many_plans_as_one_process_does(tmp_path):
    here = FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512)
    load(here)
    own = drive(here)
    with closing(group_runner(tmp_path)) as runner:
        info = load(runner)
        assert info.tp == 2
        apart = drive(runner)
    assert [plan for plan, _ in apart] == [plan for plan, _ in own]
    assert repr([result.rows for _, result in apart]) == repr([result.rows for _, result in own])


def test_an_estimate_and_a_loaded_groups_memory_are_those_of_all_ranks(tmp_path):
    single = FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512)
    with closing(group_runner(tmp_path, size=3)) as runner:
        estimate, one = runner.estimate(), single.estimate()
        processes = estimate.num_bytes - 3 * one.num_bytes
        assert 3 << 20 < processes < 3000 << 20
        assert estimate.others == ()
        info = load(runner)
        assert abs(info.memory_bytes - estimate.num_bytes) < 3 << 20
        assert runner.rss_bytes() > 3 << 20
        assert len(set(pids_of(runner))) == 3
    assert all_gone(runner)


def test_ranks_on_devices_of_their_own_need_memory_of_each():
    from engine.worker.interface import MemoryEstimate
    from engine.worker.process.group import _joined_estimates
    from engine.worker.process.messages import Estimated

    each = [Estimated(MemoryEstimate(10 + n, f"cuda:{n % 2}", 99), 7) for n in range(4)]
    joined = _joined_estimates(each)
    assert joined.process_bytes == 0
    assert [(one.device, one.num_bytes, one.limit) for one in joined.estimate.by_device] == [
        ("cuda:0", 22, 99),
        ("cuda:1", 24, 99),
    ]


def test_only_the_ranks_have_the_file_that_they_meet_in(tmp_path):
    with closing(group_runner(tmp_path)) as runner:
        load(runner)
        meeting = runner.process.meeting
        assert os.readlink(f"/proc/self/fd/{meeting}").startswith("/memfd:")
        for pid in pids_of(runner):
            assert os.readlink(f"/proc/{pid}/fd/{meeting}").startswith("/memfd:")


# ---- refusals and failures ---------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("phase", ["estimate_fault", "load_fault"])
def test_a_rank_that_refuses_ends_the_group_with_its_reason(tmp_path, rank, phase):
    """The other rank waits in a collective for the rank that refuses."""
    runner = group_runner(tmp_path, ranks={rank: {phase: "refused"}})
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="model: is not liked"):
        load(runner) if phase == "load_fault" else runner.estimate()
    assert time.monotonic() - began < 30
    assert all_gone(runner)
    with pytest.raises(ShuttingDown):
        load(runner)


def test_a_step_that_fails_on_all_ranks_alike_fails_alone(tmp_path):
    with closing(group_runner(tmp_path, late="memory", at=1)) as runner:
        load(runner)
        for number in range(4):
            if number == 1:
                with pytest.raises(MemoryError):
                    runner.execute(a_plan(number))
            else:
                assert runner.execute(a_plan(number)).plan_id == number
        assert runner.is_alive


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("moment", ["alone", "late"])
def test_a_step_that_fails_on_one_rank_ends_the_group(tmp_path, rank, moment):
    """One rank fails before a collective, in which the other waits, or when the other is done."""
    with closing(group_runner(tmp_path, ranks={rank: {moment: "error", "at": 1}})) as runner:
        load(runner)
        runner.execute(a_plan(0))
        began = time.monotonic()
        with pytest.raises(WorkerLost, match=f"rank {rank} failed in a step .*a detail") as lost:
            runner.execute(a_plan(1))
        assert time.monotonic() - began < GRACE_S + SOON_S
        assert "killed" in str(lost.value)
        wait_until(lambda: all_gone(runner), SOON_S, "their end")
        with pytest.raises(WorkerLost):
            runner.execute(empty_plan(2))


def test_an_error_on_all_ranks_arrives_with_its_type(tmp_path):
    with closing(group_runner(tmp_path, alone="error")) as runner:
        load(runner)
        with pytest.raises(WorkerProcessError, match="LookupError: a detail"):
            runner.execute(empty_plan())
        assert runner.is_alive


# ---- deaths and hangs --------------------------------------------------------------------------


def ended_by(folder, phase, rank, number, *, patience_s=30.0, delay_s=0.0):
    """End a rank of a new group by a signal in a phase; return the runner, its error, and how many
    seconds after the signal the error came. A rank that hangs is killed after ``patience_s``: in a
    step as by the watchdog, in a load by the group, which gets this patience after the signal."""
    folder.mkdir(exist_ok=True)
    slow = {"load": {"load_s": HANG_S}, "step": {"step_s": HANG_S}}.get(phase, {})
    runner = group_runner(folder, **slow)
    call = Call(load, runner)
    if phase == "load":
        for one in "01":
            wait_for(folder / f"loading{one}")
    else:
        assert call.outcome() is None
        if phase == "step":
            call = Call(runner.execute, a_plan())
            wait_for(folder / f"executing{rank}")
    time.sleep(delay_s)
    os.kill(pids_of(runner)[rank], number)
    began = time.monotonic()
    if phase == "load" and number == signal.SIGSTOP:
        channel, other = runner.process.channel, 1 - rank
        wait_until(  # until the other rank has shown that it is alive, and the stopped one has not
            lambda: channel._heard[other] > max(began, channel._heard[rank]), 30.0, "a sign of life"
        )
        channel._patience_s = patience_s
        began = max(channel._heard[rank], time.monotonic() - patience_s)
    if phase == "idle" and number == signal.SIGKILL:
        look = select.poll()
        look.register(runner.sentinel, select.POLLIN)
        assert look.poll(1000 * SOON_S)
        error = runner.lost()
    else:
        if phase == "idle":
            call = Call(runner.execute, a_plan())
        watchdog = threading.Timer(patience_s, runner.kill, ["took too long for a step"])
        if phase != "load":
            watchdog.start()
        error = call.outcome()
        watchdog.cancel()
        watchdog.join() if phase != "load" else None
    return runner, error, time.monotonic() - began


def check_lost(runner, error, took_s, limit_s, text):
    """Check that a group ended as it should, and that nothing of it is left."""
    with closing(runner):
        assert isinstance(error, WorkerLost)
        assert text in str(error)
        assert took_s < limit_s
        wait_until(lambda: all_gone(runner), SOON_S, "their end")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_the_death_of_a_rank_ends_the_group_within_a_second(tmp_path, phase, rank):
    runner, error, took_s = ended_by(tmp_path / "one", phase, rank, signal.SIGKILL)
    check_lost(runner, error, took_s, SOON_S, f"of rank {rank} was killed by signal 9")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_stopped_ends_the_group_when_the_step_timeout_is_over(tmp_path, phase, rank):
    runner, error, took_s = ended_by(
        tmp_path / "one", phase, rank, signal.SIGSTOP, patience_s=PATIENCE_S
    )
    text = f"of rank {rank} said nothing for 1.5 s" if phase == "load" else "took too long"
    check_lost(runner, error, took_s, PATIENCE_S + LATE_S, text)
    assert took_s >= PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.full)])
def test_after_kills_at_random_instants_nothing_is_left(tmp_path, count):
    before = inventory()
    for number in range(count):
        rng = random.Random(f"group {number}")
        phase, rank = rng.choice(PHASES), rng.randrange(2)
        runner, error, took_s = ended_by(
            tmp_path / str(number), phase, rank, signal.SIGKILL, delay_s=rng.uniform(0, 0.05)
        )
        check_lost(runner, error, took_s, SOON_S, "was killed by signal 9")
        check_left(before, f"kill {number} of rank {rank} in {phase}:")
    (tmp_path / "last").mkdir()
    with closing(group_runner(tmp_path / "last")) as runner:
        load(runner)
        assert runner.execute(a_plan(7)).plan_id == 7


def test_a_close_during_a_load_and_during_a_step_ends_every_rank(tmp_path):
    for phase, slow in (("loading", {"load_s": HANG_S}), ("executing", {"step_s": HANG_S})):
        folder = tmp_path / phase
        folder.mkdir()
        runner = group_runner(folder, **slow)
        call = Call(load, runner)
        if phase == "executing":
            assert call.outcome() is None
            call = Call(runner.execute, a_plan())
        for rank in "01":
            wait_for(folder / f"{phase}{rank}")
        runner.close()
        assert isinstance(call.outcome(), ShuttingDown)
        assert all_gone(runner)


def test_a_group_that_dies_during_its_server_leaves_no_rank(tmp_path):
    """The kernel kills each rank when the server's end of its pipe is closed."""
    pid = os.fork()
    if pid == 0:
        try:
            runner = group_runner(tmp_path)
            load(runner)
            (tmp_path / "pids").write_text(" ".join(map(str, pids_of(runner))))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: all(is_gone(one) for one in pids), 5, "their end")


# ---- in an engine ------------------------------------------------------------------------------


def request_of(number, max_tokens=8):
    """Return a request with a seed, whose tokens can be checked."""
    prompt = tuple(range(5 + number, 40 + 3 * number))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.5, seed=number, ignore_eos=True)
    return GenerateRequest(token_ids=prompt, sampling=sampling)


async def run_one(engine, number):
    """Run a request and check its tokens."""
    request = request_of(number)
    async with engine.generate(request) as stream:
        tokens = [one.token_ids async for one in stream if isinstance(one, Tokens)]
    found = [token for step in tokens for token in step]
    assert found == expected_tokens(request.token_ids, count=8, seed=number)


def maker(tmp_path, **first):
    """Return a function that makes an engine's groups, the first one with the fields ``first``, and
    the list of groups made."""
    runners = []

    def make(model, config):
        folder = tmp_path / str(len(runners))
        folder.mkdir()
        runners.append(group_runner(folder, **({} if runners else first)))
        return runners[-1]

    return make, runners


def engine_config(**fields):
    """Return the configuration of an engine with one divided model."""
    return EngineConfig(
        models=(ModelConfig("fake", tp=2),), check_level=2, prefix_cache=False, **fields
    )


async def test_an_engine_serves_from_a_group_shows_it_and_loads_it_again(tmp_path):
    """Pause, unload, load and ListModels treat the group as one replica."""
    make, runners = maker(tmp_path)
    async with open_engine(engine_config(), make_runner=make) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(run_one, engine, number)
        [status] = engine.list_models()
        assert [replica.tp for replica in status.replicas] == [2]
        os.kill(pids_of(runners[0])[1], signal.SIGKILL)
        await trio.to_thread.run_sync(wait_until, lambda: len(runners) == 2, 30, "its restart")
        await run_one(engine, 3)
        [status] = engine.list_models()
        assert [replica.restarts for replica in status.replicas] == [1]
        await engine.unload_model("fake", 5.0)
        assert engine.list_models()[0].state is ModelState.UNLOADED
        assert all(all_gone(runner) for runner in runners)
        assert engine.statistics().totals.memory_reserved == 0
        await engine.load_model("fake")
        await run_one(engine, 4)
    assert all(all_gone(runner) for runner in runners)


async def test_requests_of_a_group_that_hangs_end_and_the_next_ones_are_served(tmp_path):
    make, runners = maker(tmp_path, ranks={"1": {"alone": "hang", "at": 2}})
    config = replace(engine_config(), step_timeout_s=1.0)
    async with open_engine(config, make_runner=make) as engine:
        with pytest.raises(WorkerLost, match="took more than 1 s for a step"):
            await run_one(engine, 1)
        assert all_gone(runners[0])
        with trio.fail_after(30):
            await run_one(engine, 2)
