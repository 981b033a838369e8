"""The calls between files of the product while a server works for a client, as `sys.setprofile`
sees them.

A server of a fake model runs in this process, and a client in one of its threads. Every call of the
server's thread is seen.
"""

from __future__ import annotations

import dis
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import trio

from engine.config import EngineConfig, ModelConfig
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.app.application import serve
from grpc_service.app.server_config import ServerConfig
from grpc_service.client import stubs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    Profiler = Callable[[FrameType, str, Any], None]

ROOT = Path(__file__).parent.parent
PRODUCT = ("engine", "grpc_service")


@cache
def file_of(code: CodeType) -> str:
    """Return the file of a function of the product, relative to the root; "" for all others."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    name = path.relative_to(ROOT)
    return name.as_posix() if name.parts[0] in PRODUCT and "_generated" not in name.parts else ""


def callers_of(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames of the product's functions that led to this frame, the innermost first."""
    caller = frame.f_back
    while caller is not None:
        if file_of(caller.f_code):
            yield caller
        caller = caller.f_back


def current_task() -> object:
    """Return Trio's current task; None between two tasks."""
    try:
        return trio.lowlevel.current_task()
    except RuntimeError:
        return None


def is_resumed(frame: FrameType) -> bool:
    """Return whether a coroutine or generator goes on, instead of being called."""
    return frame.f_lasti > _begin(frame.f_code)


@cache
def _begin(code: CodeType) -> int:
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def watch(profiler: Profiler, ask: Callable[[stubs.InferenceStub], None], step_s: float) -> None:
    """Let a client ask a server whose steps take ``step_s`` seconds, while ``profiler`` gets the
    events of the server's thread."""
    trio.run(_watch, profiler, ask, step_s)


async def _watch(
    profiler: Profiler, ask: Callable[[stubs.InferenceStub], None], step_s: float
) -> None:
    def make_runner(model: ModelConfig, config: EngineConfig) -> FakeRunner:
        return FakeRunner(script=FakeScript(step_s=step_s))

    def call(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask(stubs.InferenceStub(channel))

    engine_config = EngineConfig(models=(ModelConfig("fake", "fake"),), check_level=0)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(serve, make_runner=make_runner), engine_config, ServerConfig(port=0)
        )
        sys.setprofile(profiler)
        try:
            await trio.to_thread.run_sync(call, server.port)
        finally:
            sys.setprofile(None)
        nursery.cancel_scope.cancel()
