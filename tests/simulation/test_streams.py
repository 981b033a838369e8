"""Streams of a Trio program: who may read them, which task a token wakes, and how they end."""

from collections import Counter
from functools import partial

import pytest
import trio

from engine.config import ModelConfig
from engine.core.common.types import EndReason
from engine.core.text.types import Tokens
from engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ReaderStalled,
    RequestAborted,
    RequestCancelled,
)
from engine.requests.encode.values import EmbedRequest
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.bodies import run_by
from tests.support.core_driver import expected_tokens
from tests.support.virtual_engine import fake_engine

STEP_S = 0.01


@pytest.mark.parametrize("seed", range(4))
@run_by(run_deterministically)
async def test_a_prompt_in_and_its_text_out(*, seed):
    async with fake_engine(FakeScript(step_s=STEP_S)) as engine:
        want = "".join(f"<{token}>" for token in expected_tokens((98, 99), count=5))
        assert await engine.complete("ab", max_tokens=5) == want
        request = GenerateRequest(text="ab", sampling={"max_tokens": 5})
        assert await engine.complete(request) == want
        async with engine.generate("ab") as stream:
            assert (await anext(stream)).prompt_tokens == 2
        with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
            await engine.complete("ab", top_p=7)
        with pytest.raises(ModelNotFound):
            await engine.complete(GenerateRequest(text="ab", model="nobody"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lived_s", [0.0, STEP_S / 2, 3.5 * STEP_S, 30 * STEP_S])
def test_a_reader_that_reads_on_after_the_block_gets_the_end(seed, lived_s):
    heard = []

    async def main():
        request = GenerateRequest(text="x", sampling=SamplingParams(max_tokens=20))
        async with (
            fake_engine(FakeScript(step_s=STEP_S), waits=False) as engine,
            trio.open_nursery() as nursery,
        ):

            async def read(stream):
                try:
                    async for _event in stream:
                        pass
                except RequestCancelled as error:
                    heard.append(error)

            async with engine.generate(request) as stream:
                nursery.start_soon(read, stream)
                await trio.sleep(lived_s)
            await read(stream)

    run_deterministically(main, seed)
    assert len(heard) == (1 if lived_s == 30 * STEP_S else 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("encodes", [False, True], ids=["text", "encoder"])
@run_by(run_deterministically)
async def test_a_reader_that_stalls_is_ended_however_busy_the_model_is(*, seed, encodes):
    """Red if the loop looks for stalled readers only when it waits: a busy model's never does."""
    capability = Capability.TEXT_EMBEDDING if encodes else Capability.TEXT_TO_TEXT
    model = ModelConfig("fake", capability=capability)
    config = {"models": (model,), "stall_timeout_s": 1.0, "max_num_seqs": 4}
    make = FakeEncoder if encodes else FakeRunner

    def request(count):
        if encodes:
            return EmbedRequest(inputs=((1, 2),) * count)
        return GenerateRequest(token_ids=(1, 2), sampling=SamplingParams(max_tokens=count))

    async with fake_engine(FakeScript(step_s=STEP_S), make, **config) as engine:
        stalled = engine.submit(request(500), buffer=2)
        with trio.move_on_after(2.0):
            while True:  # another request always has something to compute
                busy = engine.submit(request(20), buffer=500)
                await trio.sleep(5 * STEP_S)
        assert not busy.is_closed or busy.error is None
        assert isinstance(stalled.error, ReaderStalled)


def run(body, seed=0, *, instruments=(), **settings):
    """Run ``body(engine)`` in an engine with a fake model that is ready."""

    async def main():
        for instrument in instruments:
            trio.lowlevel.add_instrument(instrument)
        async with fake_engine(FakeScript(step_s=STEP_S), **settings) as engine:
            await body(engine)

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


def asked(max_tokens=20, **fields):
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(token_ids=(1, 2), sampling=sampling, **fields)


@in_engine()
async def test_a_stream_is_for_one_request_and_is_read_inside_its_block(engine):
    stream = engine.generate(asked(3))
    with pytest.raises(RuntimeError, match="inside its block"):
        await anext(stream)
    async with stream:
        with pytest.raises(RuntimeError, match="entered once"):
            await stream.__aenter__()
        assert len([event async for event in stream]) == 5
    with pytest.raises(RuntimeError, match="entered once"):
        await stream.__aenter__()
    assert engine.statistics().totals.requests_total.finished == 1


@pytest.mark.parametrize("seed", range(6))
def test_tasks_that_share_a_stream_get_each_event_once_and_all_of_them_the_end(seed):
    """Several tasks may read a stream (docs/decisions.md, departure j)."""
    ids, num_ended = [], 0

    async def body(engine):
        async def read(stream):
            nonlocal num_ended
            async for event in stream:
                if isinstance(event, Tokens):
                    ids.extend(event.token_ids)
            num_ended += 1

        async with engine.generate(asked(60)) as stream, trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read, stream)

    run(body, seed, in_process_buffer=4)
    assert ids == expected_tokens((1, 2), count=60)
    assert num_ended == 3


class TaskSteps(trio.abc.Instrument):
    """Counts how often each task ran, by its name."""

    def __init__(self):
        self.counts = Counter()

    def before_task_step(self, task):
        self.counts[task.name] += 1


@pytest.mark.parametrize("seed", range(4))
def test_a_token_wakes_its_own_reader_alone(seed):
    """The engine has one seat, for which the other reader's request waits."""
    steps = TaskSteps()

    async def read(engine):
        async with engine.generate(asked(40)) as stream:
            async for _event in stream:
                pass

    async def body(engine):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, engine, name="speaks")
            await trio.sleep(0.5 * STEP_S)
            nursery.start_soon(read, engine, name="waits")
            await trio.sleep(5 * STEP_S)
            before = steps.counts.copy()
            await trio.sleep(20 * STEP_S)
            assert steps.counts["speaks"] - before["speaks"] >= 20
            assert steps.counts["waits"] == before["waits"]

    run(body, seed, instruments=[steps], max_num_seqs=1)


@in_engine()
async def test_what_is_ready_is_taken_without_waiting(engine):
    """A reader takes all events of a request that is over without letting time pass."""
    stream = engine.submit(asked(20), buffer=99)
    await stream.wait_closed()
    await trio.sleep(1.0)
    now = trio.current_time()
    for _ in range(22):
        await stream.receive()
    assert trio.current_time() == now


ENDS = {
    EndReason.CANCELLED: RequestCancelled,
    EndReason.ABORTED: RequestAborted,
    EndReason.DEADLINE: DeadlineExceeded,
    EndReason.STALLED: ReaderStalled,
}


@pytest.mark.parametrize("later", ENDS)
@pytest.mark.parametrize("first", ENDS)
@in_engine()
async def test_the_first_reason_for_an_end_decides_its_error_and_its_count(engine, *, first, later):
    stream = engine.submit(asked(1000), buffer=2000)
    await trio.sleep(3.5 * STEP_S)
    stream.cancel(first)
    stream.cancel(later)
    await stream.wait_closed()
    assert type(stream.error) is ENDS[first]
    await engine.wait_idle()
    ends = engine.statistics().totals.requests_total
    counted = {name: getattr(ends, name) for name in ends.__slots__}
    assert {name for name, count in counted.items() if count} == {first.value}
    assert sum(counted.values()) == 1
