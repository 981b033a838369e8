"""Count a request's way through the files, from its frames on the socket to its first plan.

    python -m tools.count_way_in

A client sends requests to a running server (`tools.watched_calls`), one after another over one
connection. **A change of file** is a call into another file of ours, or a return to a file that
then calls a further one. A call whose function calls no other file is left out, since it only
returns a value. A call into the core counts once with all that it calls there, because the core
decides for all requests. Calls that are not for a token (`tools.count_hops.BESIDE`) are not for a
request either. The way shown is the shortest one: on a busy machine, the loop reads later frames
before it plans.
"""

from __future__ import annotations

import argparse
import socket
import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from grpc_service.client import messages, stubs
from tools.count_hops import BESIDE
from tools.watched_calls import callers_of, file_of, is_resumed, watch

if TYPE_CHECKING:
    from types import CodeType, FrameType

# A way begins when a request has come, and ends with the first plan of a core that is not empty.
FIRST = ("grpc_service/rpc/connection.py", "Connection._on_stream")
LAST = "plan"
CORE = "engine/core/"
REQUESTS_SEEN = 20
PAUSE_S = 0.02  # before a request, so that the server is done with the last one
STEP_S = 0.001


@dataclass(eq=False)
class Entry:
    """A call of a function in another file. ``is_on_way``: the function called a further file."""

    source: str
    target: str
    function: str
    is_on_way: bool = False


@dataclass(eq=False)
class Recorder:
    """A profiler of one thread (`sys.setprofile`) that keeps the way of each request."""

    ways: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    _entries: dict[FrameType, Entry] = field(default_factory=dict)  # since the last read of bytes
    _is_under_way: bool = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take one event (`sys.setprofile`)."""
        if event == "c_return" and not self._is_under_way and _is_receive(arg):
            self._entries.clear()
        elif event == "call" and file_of(frame.f_code) and not is_resumed(frame):
            self._take_call(frame)
        elif event == "return" and self._is_under_way and _is_plan(frame, arg):
            self.ways.append(_steps_of(list(self._entries.values())))
            self._entries.clear()
            self._is_under_way = False

    def _take_call(self, frame: FrameType) -> None:
        target, function = _name_of(frame)
        self._is_under_way |= (target, function) == FIRST
        callers = list(callers_of(frame))
        source = file_of(callers[0].f_code) if callers else ""
        if source == target:
            return
        for caller in takewhile(lambda one: file_of(one.f_code) == source, callers):
            if (entry := self._entries.get(caller)) is not None:
                entry.is_on_way = True
        codes = [frame.f_code, *(caller.f_code for caller in callers)]
        if not any(file_of(code).startswith(CORE) for code in codes[1:]) and not _is_beside(codes):
            self._entries[frame] = Entry(source, target, function)


def _is_beside(codes: list[CodeType]) -> bool:
    """Return whether a call is, or is below, a call that `BESIDE` lists."""
    names = [name for code in codes for name in (code.co_qualname, file_of(code))]
    return any(name in BESIDE and not name.endswith(f".{LAST}") for name in names)


def _is_plan(frame: FrameType, result: Any) -> bool:
    """Return whether a core has returned a plan."""
    name, function = _name_of(frame)
    is_core = name.startswith(CORE) and function.rpartition(".")[2] == LAST
    return is_core and isinstance(result, tuple) and result[0] is not None


def _name_of(frame: FrameType) -> tuple[str, str]:
    return file_of(frame.f_code), frame.f_code.co_qualname


def _is_receive(function: Any) -> bool:
    is_socket = isinstance(getattr(function, "__self__", None), socket.socket)
    return is_socket and function.__name__.startswith("recv")


def _steps_of(entries: list[Entry]) -> tuple[tuple[str, str], ...]:
    """Return the files of the way in order, each with the called function, or "" for a return."""
    steps: list[tuple[str, str]] = []
    for entry in entries:
        if not entry.is_on_way:
            continue
        for name, function in ((entry.source, ""), (entry.target, entry.function)):
            if name and (not steps or steps[-1][0] != name):
                steps.append((name, function))
    return tuple(steps)


def _ask(stub: stubs.InferenceStub) -> None:
    """Send one request after another as a client, and read each answer to its end."""
    request = messages.GenerateRequest(text="a", sampling={"max_tokens": 2})
    for _ in range(REQUESTS_SEEN):
        for _ in stub.Generate(request):
            pass
        time.sleep(PAUSE_S)


def count() -> tuple[tuple[str, str], ...]:
    """Return the shortest way of a request: its files, and the function called in each."""
    recorder = Recorder()
    watch(recorder, _ask, STEP_S)
    return min(recorder.ways, key=len)


def describe(way: tuple[tuple[str, str], ...]) -> str:
    """Return a line for each file of the way, and the totals."""
    lines = [f"{at:2} {name} {function or '(back)'}" for at, (name, function) in enumerate(way)]
    return "\n".join([*lines, f"{len(way) - 1} changes, {len(dict(way))} files"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser("tools.count_way_in", description=__doc__.splitlines()[0])
    parser.parse_args()
    print(describe(count()))
