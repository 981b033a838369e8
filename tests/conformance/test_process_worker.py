"""A real model's runner in a process of its own: equal results, and the death of the process."""

import os
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.core.encode.types import EncodeOptions, EncodePlan, EncodeRow
from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, SpawnFailed, WorkerLost
from engine.worker.factory import make_process_runner, make_runner
from tests.support.process_fakes import drive, empty_plan, is_gone
from tests.support.programs import imported_by
from tests.support.wire import wait_until

STORIES = ModelConfig("demo-stories", threads=1)
CONFIG = EngineConfig(models=(STORIES,), max_model_len=512, kv_cache_memory=8 << 20)
CHAT = [{"role": "user", "content": "Tell me of a fox."}]
FORM = Constraint("regex", "[a-z ]{1,40}")


def load(runner):
    return runner.load(lambda progress: None)


def same_but_for_the_process(own, apart):
    """Return whether two infos differ only by the worker process's own memory, mostly torch's."""
    process_bytes = apart.memory_bytes - own.memory_bytes
    assert 20 << 20 < process_bytes < 1000 << 20
    return replace(apart, memory_bytes=own.memory_bytes) == own


@pytest.fixture(scope="module")
def both():
    """Load the same model in this process and in another, and return both runners."""
    runners = make_runner(STORIES, CONFIG), make_process_runner(STORIES, CONFIG)
    try:
        estimate, more = (one.estimate() for one in runners)
        assert (more.device, more.limit) == (estimate.device, estimate.limit)
        assert 20 << 20 < more.num_bytes - estimate.num_bytes < 1000 << 20
        infos = [load(one) for one in runners]
        assert same_but_for_the_process(*infos)
        yield runners
    finally:
        for one in runners:
            one.close()


@pytest.mark.slow
def test_every_row_is_the_same_to_the_last_bit_in_both_processes(both):
    for constraint in (None, FORM):
        own, apart = (drive(one, constraint=constraint) for one in both)
        assert [plan for plan, _ in own] == [plan for plan, _ in apart]
        rows = [repr([result.rows for _, result in steps]) for steps in (own, apart)]
        assert rows[0] == rows[1]
        assert "TokenLogprob" in rows[0]
        assert "RowFailure" not in rows[0]


@pytest.mark.slow
def test_the_tokenizer_is_the_same_in_both_processes(both):
    own, apart = (one.tokenizer for one in both)
    text = "Once upon a time, thère was a fox. <|end|> 🦊"
    assert apart.encode(text) == own.encode(text)
    assert apart.encode_spans(text) == own.encode_spans(text)
    assert apart.decode(own.encode(text)) == own.decode(own.encode(text))
    assert apart.render_chat(CHAT) == own.render_chat(CHAT)
    assert apart.chat_template(has_tools=True) == own.chat_template(has_tools=True)


@pytest.mark.slow
def test_a_constraint_that_cannot_be_followed_is_refused_by_its_field(both):
    _, apart = both
    with pytest.raises(InvalidRequest) as refused:
        apart.compile(Constraint("regex", "("))
    assert [one.field for one in refused.value.violations] == ["constraint.regex"]
    assert apart.compile(FORM) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["demo-embed", pytest.param("demo-rerank", marks=pytest.mark.full)]
)
def test_an_encoders_numbers_are_the_same_to_the_last_bit(name):
    model = ModelConfig(name)
    config = EngineConfig(models=(model,))
    runners = make_runner(model, config), make_process_runner(model, config)
    with closing(runners[0]) as own, closing(runners[1]) as apart:
        assert same_but_for_the_process(load(own), load(apart))
        texts = ["a fox", "the small fox ran home", "nobody saw the whale in the rain"]
        if name == "demo-rerank":
            made = own.encoder_tokenizer.encode_pairs("who ran?", texts)
            assert apart.encoder_tokenizer.encode_pairs("who ran?", texts) == made
        else:
            made = own.encoder_tokenizer.encode_texts(texts, "")
            assert apart.encoder_tokenizer.encode_texts(texts, "") == made
        inputs = sorted((one.input for one in made), key=lambda one: len(one.token_ids))
        rows = tuple(EncodeRow(n, one, EncodeOptions()) for n, one in enumerate(inputs))
        plan = EncodePlan(1, rows)
        assert repr(apart.execute(plan).rows) == repr(own.execute(plan).rows)


@pytest.mark.full
def test_a_missing_model_is_refused_by_the_same_sentence(tmp_path):
    model = ModelConfig(str(tmp_path))
    said = []
    for make in (make_runner, make_process_runner):
        with pytest.raises(SpawnFailed) as failed:
            load(make(model, EngineConfig(models=(model,))))
        said.append((str(failed.value), failed.value.log_detail))
    assert said[0] == said[1]


@pytest.mark.slow
def test_a_server_of_processes_never_imports_torch_and_a_killed_workers_processes_end():
    code = "from tests.conformance.test_process_worker import use_and_kill_a_worker\n"
    assert "torch" not in imported_by(f"{code}use_and_kill_a_worker()")


def use_and_kill_a_worker():
    """Use a worker as a server does, kill it, and check that all its processes end.

    The processes that try out constraints end when their pipe to the worker is closed.
    """
    with closing(make_process_runner(STORIES, CONFIG)) as runner:
        assert load(runner).memory_bytes > 0
        runner.tokenizer.encode(runner.tokenizer.render_chat(CHAT))
        runner.compile(FORM)
        assert runner.rss_bytes() > 100 << 20
        tasks = Path(f"/proc/{runner.process.pid}/task").iterdir()
        pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
        assert pids
        os.kill(runner.process.pid, signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), 5, "their end")


def load_and_step(runner, caught):
    """Load the runner and run steps until an error is raised."""
    try:
        load(runner)
        while True:
            runner.execute(empty_plan())
    except Exception as error:
        caught.append(error)


@pytest.mark.full
def test_killed_workers_are_reported_and_the_next_one_works():
    """Each worker is killed at an instant of its load, or of its steps."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(5):
        rng = random.Random(f"demo {number}")
        runner, caught = make_process_runner(STORIES, CONFIG), []
        worker = threading.Thread(target=load_and_step, args=(runner, caught))
        worker.start()
        wait_until(lambda runner=runner: runner.process is not None, 10)
        if number % 2:
            wait_until(lambda runner=runner: runner._loaded is not None, 120)
        time.sleep(rng.uniform(0, 1))
        os.kill(runner.process.pid, signal.SIGKILL)
        worker.join(30)
        [error] = caught
        assert isinstance(error, WorkerLost if number % 2 else SpawnFailed), number
        assert "killed by signal 9" in str(error)
        runner.close()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    with closing(make_process_runner(STORIES, CONFIG)) as runner:
        load(runner)
        assert runner.execute(empty_plan(7)).plan_id == 7
