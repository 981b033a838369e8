"""Count a token's way through the files, from the core's commit to the socket's send.

    python -m tools.count_hops            prints the hops
    python -m tools.count_hops --check    exits 1 if engine/README.md shows other ones
    python -m tools.count_hops --write    writes them into engine/README.md

A server of a fake model runs in this process, and a client in one of its threads reads a stream.
`sys.setprofile` sees every call of the server's thread. **A hop** is a call of a function of ours
from another file of ours, or a change to another task. The way shown is the one that most tokens
went, once the stream is steady.

Between the commit and the send the core and the loop also do work for the step as a whole and not
for a token: they account for the blocks that the step filled, decide the next step, and take times.
These calls (`BESIDE`) are counted separately, with everything below them.
"""

from __future__ import annotations

import dis
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import trio

from engine.config import EngineConfig, ModelConfig
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.app.application import serve
from grpc_service.app.server_config import ServerConfig
from grpc_service.client import messages, stubs
from tools.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType


ROOT = Path(__file__).parent.parent
PRODUCT = ("engine", "grpc_service")
COMMIT = ("engine/core/text/commit.py", "Committer.commit")  # the way of a token begins here
BESIDE = {  # a function, or any function of a file
    "Scheduler.plan": "decide the next step",
    "Scheduler.prepare": "decide the next step",
    "Scheduler.next_wakeup": "look for deadlines",
    "engine/core/text/planned_step.py": "keep the step's blocks",
    "engine/core/text/speeds.py": "note how fast the step was",
    "engine/core/text/best_rate.py": "note how fast the step was",
    "engine/core/text/decode_pace.py": "note how fast the step was",
    "engine/core/text/draft_lengths.py": "note how fast the step was",
    "engine/core/text/blocks.py": "account for the step's blocks",
    "engine/core/text/plan.py": "account for the step's blocks",
    "engine/core/common/rate.py": "measure the step's rate",
    "engine/replica/telemetry.py": "take times",
    "engine/replica/watchdog.py": "watch for steps that hang",
    "engine/replica/threads.py": "start the next step",
}
STEP_S = 0.003  # long enough for the client to read the message before the next one comes
TOKENS_BEFORE = 20  # until the stream is steady
TOKENS_SEEN = 40
MAX_TOKENS = 2 * (TOKENS_BEFORE + TOKENS_SEEN)


@dataclass(frozen=True)
class Hop:
    """A call out of the file ``source`` into ``function`` of the file ``target``."""

    source: str
    target: str
    function: str
    depth: int  # functions of ours that are under way, the called one not counted


@dataclass(frozen=True)
class Way:
    """The hops of one token, and how many hops beside it had which purpose."""

    hops: tuple[Hop, ...]
    start: str = ""
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def files(self) -> list[str]:
        """Return the files in the order in which the token first enters them."""
        files = [self.start, *(name for hop in self.hops for name in (hop.source, hop.target))]
        return list(dict.fromkeys(name for name in files if name))


@dataclass(eq=False)
class Recorder:
    """Takes the profiler's events of one thread and keeps the ways of tokens among them."""

    ways: list[Way] = field(default_factory=list)
    _hops: list[Hop] | None = None  # None: no token is under way
    _beside: Counter[str] = field(default_factory=Counter)
    _task: object = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take one event (`sys.setprofile`)."""
        if event == "call":
            self._take_call(frame)
        elif event == "c_call" and self._hops is not None and _is_send(arg):
            self.ways.append(Way(tuple(self._hops), COMMIT[0], tuple(sorted(self._beside.items()))))
            self._hops = None

    def _take_call(self, frame: FrameType) -> None:
        target = _file_of(frame.f_code)
        if not target:
            return
        if (target, frame.f_code.co_qualname) == COMMIT:
            self._hops, self._beside, self._task = [], Counter(), _task()
            return
        if self._hops is None:
            return
        callers = list(_callers(frame))
        source = _file_of(callers[0]) if callers else ""
        has_changed = _task() is not self._task
        if has_changed:
            self._task = _task()
        elif source == target or not source or _is_resumed(frame):
            return
        if reason := _beside([frame.f_code, *callers]):
            self._beside[reason] += 1
        else:
            name = frame.f_code.co_qualname
            self._hops.append(Hop("" if has_changed else source, target, name, len(callers)))


def _callers(frame: FrameType) -> Iterator[CodeType]:
    """Yield the functions of ours that are under way, the innermost first."""
    caller = frame.f_back
    while caller is not None:
        if _file_of(caller.f_code):
            yield caller.f_code
        caller = caller.f_back


@cache
def _file_of(code: CodeType) -> str:
    """Return the file of a function of the product, relative to the root; "" for all others."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    name = path.relative_to(ROOT)
    return name.as_posix() if name.parts[0] in PRODUCT and "_generated" not in name.parts else ""


def _beside(codes: list[CodeType]) -> str:
    for code in codes:
        if reason := BESIDE.get(code.co_qualname) or BESIDE.get(_file_of(code)):
            return reason
    return ""


def _task() -> object:
    try:
        return trio.lowlevel.current_task()
    except RuntimeError:  # Trio itself runs, between two tasks
        return None


def _is_resumed(frame: FrameType) -> bool:
    """Return whether a coroutine or generator goes on, instead of being called."""
    return frame.f_lasti > _begin(frame.f_code)


@cache
def _begin(code: CodeType) -> int:
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def _is_send(function: Any) -> bool:
    is_socket = isinstance(getattr(function, "__self__", None), socket.socket)
    return is_socket and function.__name__ in ("send", "sendmsg")


# ---- the server and its client


def _read(port: int) -> None:
    """Read one stream as a client, in a thread."""
    request = messages.GenerateRequest(text="a", sampling={"max_tokens": MAX_TOKENS})
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in stubs.InferenceStub(channel).Generate(request):
            pass


def _make_runner(model: ModelConfig, config: EngineConfig) -> FakeRunner:
    return FakeRunner(script=FakeScript(step_s=STEP_S))


async def _record(recorder: Recorder) -> None:
    """Serve one stream while the recorder watches."""
    engine_config = EngineConfig(models=(ModelConfig("fake", "fake"),), check_level=0)
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(serve, make_runner=_make_runner), engine_config, ServerConfig(port=0)
        )
        sys.setprofile(recorder)
        try:
            await trio.to_thread.run_sync(_read, server.port)
        finally:
            sys.setprofile(None)
        nursery.cancel_scope.cancel()


def count() -> Way:
    """Return the way that most tokens of a steady stream go."""
    recorder = Recorder()
    trio.run(_record, recorder)
    seen = recorder.ways[TOKENS_BEFORE:][:TOKENS_SEEN]
    [(way, _)] = Counter(seen).most_common(1)
    return way


def describe(way: Way) -> str:
    """Return a line for each hop, indented by the depth of the calls, and the totals."""
    shallowest = min(hop.depth for hop in way.hops)
    lines = [f"   {start}" for start in (way.start, way.hops[0].source) if start]
    for number, hop in enumerate(way.hops, start=1):
        indent = "  " * (hop.depth - shallowest)
        change = "" if hop.source else "(another task) "
        lines.append(f"{number:2} {indent}→ {change}{hop.target} {hop.function}")
    lines.append(f"{len(way.hops)} hops, {len(way.files)} files")
    lines += [f"beside it, to {reason}: {number}" for reason, number in way.beside]
    return "\n".join(lines)


def draw() -> str:
    """Return the part of the README."""
    return describe(count())


SHOWN = Shown(
    "way of a token", "tools.count_hops", draw, str(__doc__).splitlines()[0], fence="text"
)

if __name__ == "__main__":
    sys.exit(SHOWN.main())
