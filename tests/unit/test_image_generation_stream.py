"""Drawings in process: a stream's events, its end, and the façades (Trio, asyncio, threads)."""

import asyncio
import math
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trio.testing

from engine import DrawingFinished, DrawingStarted, DrawRequest, GeneratedImage, Progress, blocking
from engine import aio as engine_aio
from engine.api import portal
from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ReaderStalled,
    RequestNotFound,
    RequestTooLarge,
    WorkerLost,
)
from engine.requests.image_generation import stream as image_generation_stream
from engine.status import Capability
from engine.worker.fakes.image_generation import FAKE_INFO, FakeImageGenerationRunner, image_of
from engine.worker.fakes.text import FakeScript
from tests.support.image_generation_wire import drawing_of, pixels_of

ASKED = DrawRequest(prompt="a cat", seed=5, n=2)
LIMIT_S = 20


def config(**fields):
    artist = ModelConfig("artist", capability=Capability.TEXT_TO_IMAGE)
    return EngineConfig(models=(artist,), check_level=2, **fields)


@asynccontextmanager
async def opened(runner=None, limit_s=LIMIT_S, **fields):
    runner = runner or FakeImageGenerationRunner()
    with trio.fail_after(limit_s):
        async with open_engine(config(**fields), make_runner=lambda *_: runner) as engine:
            yield engine


async def drawn(engine, asked):
    async with engine.draw(asked) as stream:
        return [event async for event in stream]


def check(events, asked=ASKED):
    """Check that a stream's events are those of a complete drawing, with the right pixels."""
    started, *_, finished = events
    assert isinstance(started, DrawingStarted)
    assert isinstance(finished, DrawingFinished)
    steps = [event.step for event in events if isinstance(event, Progress)]
    assert steps == list(range(1, started.steps + 1))
    images = [event for event in events if isinstance(event, GeneratedImage)]
    assert [one.index for one in images] == list(range(asked.num_images))
    wanted = replace(drawing_of(ProtoLike(asked), started), num_images=asked.num_images)
    for one in images:
        assert pixels_of(one.data) == image_of(wanted, started.steps, one.index).pixels
    usage = finished.usage
    assert (usage.steps, usage.images) == (started.steps, asked.num_images)
    assert usage.prompt_tokens == len(asked.prompt)


class ProtoLike:
    """A DrawRequest with the names of fields that `drawing_of` reads from the proto message."""

    def __init__(self, asked):
        self._asked = asked

    def __getattr__(self, name):
        return getattr(self._asked, name)

    def HasField(self, name):
        return getattr(self._asked, name) is not None


async def test_a_stream_has_everything_in_order():
    async with opened() as engine:
        check(await drawn(engine, ASKED))
    assert engine.statistics().totals.requests_total.finished == 1


async def test_a_text_is_a_prompt():
    async with opened() as engine:
        events = await drawn(engine, "a dog")
    assert events[0].seed < 2**32
    assert isinstance(events[-1], DrawingFinished)
    with pytest.raises(TypeError, match=r"draw takes a text or an engine\.DrawRequest, not 3"):
        engine.draw(3)


def test_asyncio_programs_and_threads_get_the_same(monkeypatch):
    """Red if a drawing's end waits for `RELEASE_AFTER_S`, after which readers give credit back:
    that cost each drawing 0.1 s, a tenth of its time (`python -m tools.lab.bench drawing`)."""
    monkeypatch.setattr(portal, "RELEASE_AFTER_S", 1e9)
    asked = config(stall_timeout_s=2.0)

    async def in_asyncio():
        runner = FakeImageGenerationRunner()
        async with engine_aio.open_engine(asked, make_runner=lambda *_: runner) as engine:
            return [event async for event in engine.draw(ASKED)]

    check(asyncio.run(in_asyncio()))
    with blocking.open_engine(asked, make_runner=lambda *_: FakeImageGenerationRunner()) as engine:
        check(list(engine.draw(ASKED)))


async def test_leaving_the_block_ends_the_drawing_within_a_step():
    runner = FakeImageGenerationRunner(script=FakeScript(step_s=0.02))
    async with opened(runner) as engine:
        async with engine.draw(replace(ASKED, steps=100)) as stream:
            async for event in stream:
                if isinstance(event, Progress) and event.step == 3:
                    break
        before = runner.steps
        await engine.wait_idle()
        assert runner.steps <= before + 1


async def test_time_in_which_files_are_made_is_not_the_readers(monkeypatch, mock_clock):
    """Red if the time that the engine takes to encode previews counts as the reader's stall."""
    real = image_generation_stream.encode

    def slow(*given):
        trio.from_thread.run_sync(mock_clock.jump, 3)
        return real(*given)

    monkeypatch.setattr(image_generation_stream, "encode", slow)
    async with opened(stall_timeout_s=2, in_process_buffer=1) as engine:
        asked = replace(ASKED, preview_every=1, n=1)
        check(await drawn(engine, asked), asked)


async def end_late(engine, clock):
    """Jump the clock once the steps of the request "late" are done, until the request has ended."""
    while "has not taken" not in engine.explain("late").waiting_for:
        await trio.lowlevel.checkpoint()
    with suppress(RequestNotFound):
        while engine.explain("late"):
            clock.jump(1)
            await trio.testing.wait_all_tasks_blocked()


LATE = replace(ASKED, request_id="late")


async def test_a_reader_that_takes_no_image_is_ended(mock_clock):
    settings = {"limit_s": math.inf, "stall_timeout_s": 2}
    async with opened(**settings) as engine, engine.draw(LATE) as stream:
        await end_late(engine, mock_clock)
        with pytest.raises(ReaderStalled, match="after 4 of 4 steps"):
            async for _ in stream:
                pass


async def test_a_deadline_counts_until_the_images_are_taken(mock_clock):
    asked = replace(LATE, timeout_s=2)
    async with opened(limit_s=math.inf) as engine, engine.draw(asked) as stream:
        await end_late(engine, mock_clock)
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in stream:
                pass
    assert caught.value.phase == "write"


async def test_a_workers_death_spares_the_drawing_that_it_is_done_with():
    """Red if the worker's death ends a request whose steps are done and whose images wait for their
    reader."""
    runner = FakeImageGenerationRunner()
    async with opened(runner) as engine, engine.draw(replace(ASKED, request_id="done")) as done:
        assert isinstance(await anext(done), DrawingStarted)
        while "has not taken" not in engine.explain("done").waiting_for:  # noqa: ASYNC110
            await trio.sleep(0.01)
        runner.script.image_fault = lambda plan: WorkerLost("planted")
        with pytest.raises(WorkerLost):
            await drawn(engine, ASKED)
        events = [event async for event in done]
    assert isinstance(events[-1], DrawingFinished)


async def test_steps_that_a_scheduler_does_not_take_are_refused():
    info = replace(FAKE_INFO, steps_max=(("ddim", 3),))
    async with opened(FakeImageGenerationRunner(info)) as engine:
        with pytest.raises(InvalidRequest, match="the scheduler ddim takes at most 3"):
            await drawn(engine, ASKED)
        with pytest.raises(RequestTooLarge, match="pixels"):
            await drawn(engine, replace(ASKED, width=1024, height=512, steps=2))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": 3}, "prompt takes a text"),
        ({"width": "12"}, "width takes a whole number"),
        ({"guidance": "a"}, "guidance takes a number"),
        ({"source": "a.png"}, "source takes bytes"),
    ],
)
def test_values_of_wrong_types_are_refused_by_name(fields, error):
    with pytest.raises(TypeError, match=error):
        DrawRequest(**{"prompt": "a", **fields})
