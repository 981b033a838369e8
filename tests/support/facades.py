"""Shared by the tests of both façades (`engine.blocking`, `engine.aio`).

Here are a fake model, its requests, and separate interpreters for tests of what happens at exit.
"""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import trio

from engine.api import aio
from engine.api._generated import blocking
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.bodies import run_by
from tests.support.programs import ROOT
from tools.regen_faces import without_waiting

LIMIT_S = 60  # only bounds a hang
STEP_S = 0.002
ENDLESS = SamplingParams(max_tokens=2000)
SHORT = SamplingParams(max_tokens=5)


def open_fake(facade, *, script=None, **config):
    """Open an engine with one fake model through ``facade.open_engine``, and return what this
    returns.
    """
    script = script or FakeScript(step_s=STEP_S)
    config = EngineConfig(models=(ModelConfig("fake"),), check_level=2, **config)
    return facade.open_engine(config, make_runner=lambda *_: FakeRunner(script=script))


def broken_config():
    """Return a configuration with which no engine starts."""
    config = EngineConfig(models=(ModelConfig("fake"),))
    object.__setattr__(config, "models", (None,))
    return config


def request(prompt=(1, 2, 3), sampling=ENDLESS, **fields):
    """Return a text request for the fake model."""
    return GenerateRequest(token_ids=tuple(prompt), sampling=sampling, **fields)


def ids_of(events):
    """Return the token ids of a stream's events."""
    return [i for event in events if isinstance(event, Tokens) for i in event.token_ids]


def wait_until(condition):
    """Poll until ``condition()`` is true."""
    limit = time.monotonic() + LIMIT_S / 2
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def engine_threads():
    """Return the threads that an engine has started."""
    return [t for t in threading.enumerate() if t.name.startswith("triolet")]


def wait_no_engine_threads():
    """Wait until no engine thread lives. The watchdog's thread ends a moment after the engine."""
    wait_until(lambda: not engine_threads())


def run_loop(main):
    """Run ``main`` by `asyncio.run`, and fail if the loop's exception handler is called."""
    complaints = []

    async def heard():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        try:
            return await main()
        finally:
            gc.collect()

    result = asyncio.run(heard(), debug=True)
    gc.collect()
    assert complaints == []
    return result


class InThreads:
    """Wraps an object of the blocking façade: its methods run in threads, and can be awaited."""

    AT_ONCE = frozenset({"generate", "embed", "rerank", "chat", "encoder", "cross_encoder", "ask"})

    def __init__(self, one):
        self._one = one

    async def __aenter__(self):
        self._one.__enter__()
        return self

    async def __aexit__(self, *failure):
        await asyncio.to_thread(self._one.__exit__, *failure)

    def __aiter__(self):
        return self

    async def __anext__(self):
        event = await asyncio.to_thread(next, self._one, None)
        if event is None:
            raise StopAsyncIteration
        return event

    def __getattr__(self, name):
        value, one = getattr(self._one, name), self._one
        if name == "_caller":
            return InThreads(value)
        if name.startswith("_") or not callable(value):
            return value
        if name == "stop" or (name == "close" and isinstance(one, blocking.Stream)):
            return value
        if name in self.AT_ONCE and not isinstance(one, blocking.Encoder | blocking.CrossEncoder):
            if not isinstance(one, blocking.Engine | blocking.Chat):  # the `_caller` of a handle
                return lambda *args: asyncio.to_thread(value, *args)
            return lambda *args, **fields: InThreads(value(*args, **fields))
        return lambda *args, **fields: asyncio.to_thread(value, *args, **fields)


async def in_asyncio(open_one):
    """Open an engine in asyncio."""
    return await open_one(aio)


async def in_threads(open_one):
    """Open an engine in a thread."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    return InThreads(await asyncio.to_thread(open_one, blocking))


async def opened(facade, **config):
    """Open an engine with one fake model."""
    return await facade(lambda module: open_fake(module, **config))


def run(body, facade, **config):
    """Run ``body(eng)`` in a loop of its own, and close the engine after it."""

    async def main():
        async with asyncio.timeout(LIMIT_S / 2), await opened(facade, **config) as eng:
            await body(eng)

    run_loop(main)


in_engine = partial(run_by, run)


async def until(condition):
    """Wait until ``await condition()`` is true."""
    while not await condition():  # noqa: ASYNC110 the engine's states have no event of a loop
        await asyncio.sleep(0.002)


async def has(is_true):
    """Return ``is_true``. This makes an awaitable condition for `until` of a plain value."""
    return is_true


async def messages(chat):
    """Return a chat's messages."""
    found = chat.messages
    return await found() if callable(found) else found


async def totals(eng):
    """Return the totals of the engine's statistics."""
    return (await eng.statistics()).totals


async def one_waits(eng):
    """Return whether one request is in the queue."""
    return (await totals(eng)).waiting == 1


async def one_is_parked(eng):
    """Return whether one request is parked."""
    return (await totals(eng)).parked == 1


async def read(stream):
    """Return all events of a stream."""
    return [event async for event in stream]


async def until_token(stream):
    """Read until the first token."""
    async for event in stream:
        if isinstance(event, Tokens):
            return


async def ended(eng, **counts):
    """Wait until no request is live, and ``counts`` requests have ended by each reason."""

    async def holds():
        now = await totals(eng)
        is_idle = now.running == now.waiting == now.parked == now.ending == 0
        return is_idle and all(getattr(now.requests_total, k) == v for k, v in counts.items())

    await until(holds)
    now = await totals(eng)
    assert now.free_blocks + now.cached_blocks >= now.total_blocks


async def park(eng):
    """Return a stream that nobody reads, once its buffer is full. No more events wait anywhere."""
    stream = eng.generate(request())
    await until(lambda: one_is_parked(eng))
    feed = stream._feed
    num_waiting = feed.queue.qsize() if hasattr(feed, "queue") else len(feed.items)
    assert num_waiting == 1 + eng.config.in_process_buffer  # Started, Tokens…
    return stream


async def fake_embed(model, texts):
    """An `EmbedFunction`: it refuses the text "bad", fails on "broken", and hangs on "slow"."""
    await trio.lowlevel.checkpoint()
    if "bad" in texts:
        raise InvalidRequest.of("inputs[0].text", "is bad")
    if "broken" in texts:
        raise ValueError("broken")
    if "slow" in texts:
        await trio.sleep_forever()
    return [(float(len(text)),) for text in texts]


async def fake_rank(model, query, documents):
    """A `RankFunction` with a score for each document."""
    return [vector[0] for vector in await fake_embed(model, documents)]


def inner(one):
    """Return the engine, handle or stream that an `InThreads` wraps, or ``one`` if none does."""
    return one._one if isinstance(one, InThreads) else one


def script_for(facade, text):
    """Return a script for asyncio as one for ``facade``: for threads without async and await."""
    if facade is in_asyncio:
        return text
    return without_waiting(text.replace("asyncio.run(", "(").replace("aio", "blocking"))


PRELUDE = """
import asyncio, atexit, logging, os, signal, sys, threading, time
# asyncio's debug mode names each task that took 0.1 s, as any may on a busy machine.
is_other = lambda record: not record.getMessage().startswith("Executing")
logging.getLogger("asyncio").addFilter(is_other)
atexit.register(time.sleep, 0.1)  # registered first, runs last: whoever is woken may complain
import engine
from engine import aio, blocking
from engine.api import portal
from engine.core.common.events import PauseMode
from engine.worker.fakes.text import FakeRunner, FakeScript

def open_fake(facade=blocking, **script):
    config = engine.EngineConfig(models=(engine.ModelConfig("fake"),), in_process_buffer=2)
    make_runner = lambda *_: FakeRunner(script=FakeScript(**script))
    return facade.open_engine(config, make_runner=make_runner)

def request(max_tokens=2000):
    sampling = engine.SamplingParams(max_tokens=max_tokens)
    return engine.GenerateRequest(token_ids=(1, 2), sampling=sampling)
"""


def run_script(text, *, sends=None, options=("-X", "dev", "-W", "error"), limit_s=LIMIT_S / 2):
    """Run ``text`` in an interpreter of its own, to its exit.

    ``sends`` is a signal that is sent to the interpreter once it prints "ready".
    """
    command = [sys.executable, *options, "-c", PRELUDE + text]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            if sends is not None:
                assert process.stdout.readline() == "ready\n"
                process.send_signal(sends)
            out, err = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err
