"""A kind of work that is new to the engine (`tests.support.counting`) is served as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import InvalidRequest, RequestCancelled, StepFailed
from tests.support import counting
from tests.support.counting import COUNTING, CountKind, CountRequest, CountRunner


@pytest.fixture
async def engine():
    """Yield an engine that serves the third kind."""
    config = EngineConfig(models=(ModelConfig("counter", capability=COUNTING),))
    kinds = (CountKind(),)
    async with open_engine(config, make_runner=lambda *_: CountRunner(), kinds=kinds) as engine:
        yield engine


async def test_a_third_kind_is_served_with_backpressure_ends_errors_and_cancels(engine):
    stream = engine.submit(CountRequest(5), buffer=2)
    with trio.fail_after(5):
        assert [await stream.receive() for _ in range(5)] == [5, 4, 3, 2, 1]
        await stream.wait_closed()
        failed, refused = (engine.submit(CountRequest(n), buffer=9) for n in (14, 0))
        await failed.wait_closed()
        stalled = engine.submit(CountRequest(99), buffer=3)
        await wait_all_tasks_blocked(0.05)
        assert stalled.credit.filled == 3
        assert engine.statistics().totals.running == 1
        stalled.close_reader()
        await engine.wait_idle()
    assert stream.error is None
    assert isinstance(failed.error, StepFailed)
    assert isinstance(refused.error, InvalidRequest)
    assert isinstance(stalled.error, RequestCancelled)
    assert stalled.credit.reserved == 0


def test_a_third_kind_takes_less_than_150_lines():
    assert len(Path(counting.__file__).read_text().splitlines()) < 150
