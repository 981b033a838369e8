"""Count a token's way through the files, from the core's commit to the socket's send.

    python -m tools.count_hops            prints the hops
    python -m tools.count_hops --check    exits 1 if engine/README.md shows other ones
    python -m tools.count_hops --write    writes them into engine/README.md

A client reads a stream of a running server (`tools.watched_calls`). **A hop** is a call of a
function of ours from another file of ours, or a change to another task. The way shown is the one
that most tokens went, once the stream is steady.

Between the commit and the send, the core and the replica's loop also work for the step as a whole
and not for a token: they account for the blocks that the step filled, decide the next step, and
take times. These calls (`BESIDE`) are counted separately, with all calls that they make.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpc_service.client import messages, stubs
from tools.shown import Shown
from tools.watched_calls import callers_of, current_task, file_of, is_resumed, watch

if TYPE_CHECKING:
    from types import CodeType, FrameType


COMMIT = ("engine/core/text/commit.py", "Committer.commit")  # where a token's way begins
BESIDE = {  # by function or by file
    "Core.plan": "decide the next step",
    "Scheduler.prepare": "decide the next step",
    "Scheduler.next_wakeup": "look for what is due",
    "engine/core/text/planned_step.py": "keep the step's blocks",
    "engine/core/text/step_times.py": "note how fast the step was",
    "engine/core/text/drafting/draft_lengths.py": "note how fast the step was",
    "engine/core/text/drafting/drafts.py": "note how fast the step was",
    "engine/core/text/memory/blocks.py": "account for the step's blocks",
    "engine/core/text/plan.py": "account for the step's blocks",
    "engine/core/common/rate.py": "measure the step's rate",
    "engine/replica/telemetry.py": "take times",
    "engine/replica/watchdog.py": "watch for steps that hang",
    "engine/replica/threads.py": "start the next step",
}
STEP_S = 0.003  # so long that the client reads a message before the next one comes
TOKENS_BEFORE = 20
TOKENS_SEEN = 40
MAX_TOKENS = 2 * (TOKENS_BEFORE + TOKENS_SEEN)


@dataclass(frozen=True)
class Hop:
    """A call out of the file ``source`` into ``function`` of the file ``target``."""

    source: str
    target: str
    function: str
    depth: int  # how many functions of the product are on the stack below the called one


@dataclass(frozen=True)
class Way:
    """The hops of one token, and the number of other hops of its step by their purpose."""

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
    """A profiler of one thread (`sys.setprofile`) that keeps the way of each token."""

    ways: list[Way] = field(default_factory=list)
    _hops: list[Hop] | None = None  # the current token's hops; None before a commit
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
        target = file_of(frame.f_code)
        if not target:
            return
        if (target, frame.f_code.co_qualname) == COMMIT:
            self._hops, self._beside, self._task = [], Counter(), current_task()
            return
        if self._hops is None:
            return
        callers = [caller.f_code for caller in callers_of(frame)]
        source = file_of(callers[0]) if callers else ""
        has_changed = current_task() is not self._task
        if has_changed:
            self._task = current_task()
        elif source == target or not source or is_resumed(frame):
            return
        if reason := _beside([frame.f_code, *callers]):
            self._beside[reason] += 1
        else:
            name = frame.f_code.co_qualname
            self._hops.append(Hop("" if has_changed else source, target, name, len(callers)))


def _beside(codes: list[CodeType]) -> str:
    for code in codes:
        if reason := BESIDE.get(code.co_qualname) or BESIDE.get(file_of(code)):
            return reason
    return ""


def _is_send(function: Any) -> bool:
    is_socket = isinstance(getattr(function, "__self__", None), socket.socket)
    return is_socket and function.__name__ in ("send", "sendmsg")


def _read(stub: stubs.InferenceStub) -> None:
    """Read one stream as a client."""
    request = messages.GenerateRequest(text="a", sampling={"max_tokens": MAX_TOKENS})
    for _ in stub.Generate(request):
        pass


def count() -> Way:
    """Return the way that most tokens of a steady stream go."""
    recorder = Recorder()
    watch(recorder, _read, STEP_S)
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
    """Return the text that engine/README.md shows: a steady token's way."""
    return describe(count())


SHOWN = Shown(
    "way of a token", "tools.count_hops", draw, str(__doc__).splitlines()[0], fence="text"
)

if __name__ == "__main__":
    sys.exit(SHOWN.main())
