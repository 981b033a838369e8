"""An engine of a fake model in virtual time (`tests.simulator.determinism`)."""

from contextlib import asynccontextmanager

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import VirtualThreads


@asynccontextmanager
async def fake_engine(
    script=None, make=FakeRunner, *, threads=None, waits=True, on_event=None, batch=None, **config
):
    """Yield an engine; with ``waits`` its model is ready. ``make(script=script)`` returns the
    runner of each load, and ``config`` has fields of `EngineConfig`."""
    threads, script = threads or VirtualThreads(), script or FakeScript()
    script.sleep = threads.note_sleep
    async with open_engine(
        EngineConfig(**{"models": (ModelConfig("fake"),), "check_level": 2} | config),
        make_runner=lambda *_: make(script=script),
        threads=threads,
        on_event=on_event,
        batch=batch,
    ) as engine:
        if waits:
            await engine.wait_ready()
        yield engine


class SilentReader:
    """A reader that takes nothing."""

    def push(self, event):
        pass

    def end(self, error):
        pass


async def read_all(stream):
    """Return the events of a request that has been submitted."""
    events = []
    while True:
        try:
            events.append(await stream.receive())
        except trio.EndOfChannel:
            return events
