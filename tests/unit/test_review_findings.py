"""What a review with fresh eyes broke, each by the test that would have found it."""

from __future__ import annotations

import pytest
import trio

import engine
from engine.core.events import Pause, PauseMode, Resume
from engine.core.plan import RowResult
from engine.core.types import EndReason
from engine.model.fake import FakeRunner, FakeScript, FakeTokenizer
from tests.support.core_driver import Driver, make_request


def test_under_wait_a_running_request_that_lost_its_blocks_still_finishes():
    driver = Driver(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=4)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(1, 9), max_tokens=12, bypass_prefix_cache=True))
    driver.step()
    driver.apply(Pause(PauseMode.WAIT))
    driver.submit(make_request("c", range(1, 5)))
    driver.run()
    assert driver.scheduler.statistics().preemptions > 0
    assert driver.finished["a", 0].reason is EndReason.LENGTH
    assert driver.finished["b", 0].reason is EndReason.LENGTH
    assert driver.refused["c"].error.reason == "PAUSED"
    driver.check_tokens()
    driver.check_idle()


def test_under_wait_what_has_not_begun_waits_for_the_resume():
    driver = Driver(max_num_seqs=1)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(1, 9)))
    driver.step()
    driver.apply(Pause(PauseMode.WAIT))
    driver.run()
    assert ("a", 0) in driver.finished
    assert ("b", 0) not in driver.finished
    driver.apply(Resume())
    driver.run()
    assert ("b", 0) in driver.finished


def test_a_device_with_little_memory_does_not_run_out_at_every_other_step():
    def too_many(plan):
        return MemoryError("device") if plan.num_tokens > 16 else None

    runner = FakeRunner(num_blocks=64, max_model_len=512, script=FakeScript(plan_fault=too_many))
    driver = Driver(runner=runner, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    driver.submit(make_request("a", range(1, 321), max_tokens=4))
    driver.run()
    # 20 chunks of 16, and a try at 32 after every 16 clean steps
    assert runner.steps <= 20 + 4 + 6
    driver.check_tokens()


class BrokenRunner(FakeRunner):
    """Answers for a sequence that is not in the plan: a bug that ends the loop."""

    def execute(self, plan):
        result = super().execute(plan)
        return result.__class__(result.plan_id, (RowResult(99),))


class SlowTokenizer(FakeTokenizer):
    def __init__(self, entered, go_on):
        super().__init__()
        self._entered, self._go_on = entered, go_on

    def encode(self, text, *, add_special_tokens=True):
        if len(text) > 5000:
            trio.from_thread.run_sync(self._entered.set)
            trio.from_thread.run(self._go_on.wait)
        return super().encode(text)[:20]


async def ends_of(stream):
    with pytest.raises(engine.TrioletError) as caught:
        async for _event in stream:
            pass
    return caught.value


async def test_a_request_that_still_tokenises_when_its_loop_dies_hears_of_it():
    entered, go_on = trio.Event(), trio.Event()

    class Runner(BrokenRunner):
        tokenizer = SlowTokenizer(entered, go_on)

    config = engine.EngineConfig(models=(engine.ModelConfig("fake"),))
    with trio.fail_after(20):
        async with (
            engine.open_engine(config, make_runner=lambda *_: Runner()) as eng,
            eng.generate(engine.GenerateRequest(text="x" * 6000)) as slow,
        ):
            await entered.wait()
            async with eng.generate(engine.GenerateRequest(text="short")) as short:
                assert (await ends_of(short)).reason == "ENGINE_BUG"
            go_on.set()
            assert (await ends_of(slow)).reason == "ENGINE_BUG"


async def test_an_id_used_again_is_the_same_in_every_event():
    config = engine.EngineConfig(models=(engine.ModelConfig("fake"),))
    request = engine.GenerateRequest(
        text="x", request_id="again", sampling=engine.SamplingParams(max_tokens=3)
    )
    with trio.fail_after(20):
        async with engine.open_engine(config, make_runner=lambda *_: FakeRunner()) as eng:
            for _ in range(2):
                async with eng.generate(request) as stream:
                    assert {event.request_id async for event in stream} == {"again"}


async def test_min_tokens_that_no_token_can_reach_is_the_clients_mistake():
    config = engine.EngineConfig(models=(engine.ModelConfig("fake"),))
    sampling = engine.SamplingParams(min_tokens=2, stop_token_ids=tuple(range(1000)))
    request = engine.GenerateRequest(text="x", sampling=sampling)
    with trio.fail_after(20):
        async with (
            engine.open_engine(config, make_runner=lambda *_: FakeRunner()) as eng,
            eng.generate(request) as stream,
        ):
            assert "sampling.min_tokens" in str(await ends_of(stream))
