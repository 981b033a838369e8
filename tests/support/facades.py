"""Shared by the tests of both façades (`engine.blocking`, `engine.aio`).

Here are a fake model, its requests, and separate interpreters for tests of what happens at exit.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import trio

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest
from engine.requests.text_values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript

ROOT = Path(__file__).resolve().parents[2]
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


PRELUDE = """
import asyncio, atexit, logging, os, signal, sys, threading, time
# asyncio's debug mode names each task that took 0.1 s, as any may on a busy machine.
is_other = lambda record: not record.getMessage().startswith("Executing")
logging.getLogger("asyncio").addFilter(is_other)
atexit.register(time.sleep, 0.1)  # registered first, runs last: whoever is woken may complain
import engine
from engine.api import aio, blocking, portal
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
