"""Generates the faces for threads that block from those for asyncio, or checks them for drift.

    python tools/regen_faces.py            writes the generated files
    python tools/regen_faces.py --check    writes nothing; exits with 1 and names files that differ

Rule 1: `RULES` hold for every face. A line that ends with ``# asyncio only`` is left out, and with
it the lines below that are indented further; so is a docstring's paragraph about cancellation,
because a thread cannot be cancelled. Rule 2: a face's own `Face.changes` are texts and what they
become. A text that is not in the source is an error, so that no change is forgotten.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = "# Written by tools/regen_faces.py from {}; do not edit.\n"
INIT = '"""Written by tools/regen_faces.py; do not edit."""\n'
ASYNCIO_ONLY = "  # asyncio only"
RULES = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\banext\(", "next("),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    (r'\n\n? *Cancellation[^":]*:[^"]*?(?=\n *"""|\n\n)', ""),
    (r'("""[^"\n]+)\n +"""', r'\1"""'),  # a docstring of one line
)


@dataclass(frozen=True)
class Face:
    """A generated file: its source, and the texts that differ from it beside the `RULES`."""

    source: str
    path: str
    changes: tuple[tuple[str, str], ...]

    def generate(self) -> str:
        """Return the text of the generated file.

        Raises:
            SystemExit: one of the changes is not in the source.
        """
        text = (ROOT / self.source).read_text(encoding="utf-8")
        for before, after in self.changes:
            if before not in text:
                raise SystemExit(f"{self.source} has no {before!r} to be changed for {self.path}")
            text = text.replace(before, after)
        text = "".join(without_asyncio_only(text.splitlines(keepends=True)))
        return HEADER.format(self.source) + without_waiting(text).rstrip("\n") + "\n"


def without_waiting(text: str) -> str:
    """Return a text by `RULES`."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def without_asyncio_only(lines: list[str]) -> list[str]:
    """Return the lines without those marked ``# asyncio only``, and without the blocks of these."""
    kept: list[str] = []
    left_out: int | None = None  # the indentation of the block that is being left out
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if left_out is not None and line.strip() and indentation <= left_out:
            if indentation < left_out:
                kept.append("\n")  # the block that was left out ended its function
            left_out = None
        if line.rstrip().endswith(ASYNCIO_ONLY):
            left_out = indentation
        if left_out is None:
            kept.append(line)
    return kept


FACES = (
    Face(
        "grpc_service/client/aio.py",
        "grpc_service/client/_generated/blocking.py",
        (
            (
                "A client for asyncio programs: `AsyncClient`",
                "A client for threads that block: `Client`",
            ),
            (
                "Rule: the client for threads that block is generated from this file "
                "(`tools/regen_faces.py`).\n",
                "Rule: threads may share a client. One thread reads a stream, and any thread may "
                "cancel it.\n",
            ),
            ("import asyncio\n", "import threading\n"),
            ("open_aio_channel", "open_channel"),
            ("asyncio.Event()", "threading.Event()"),
            (
                "        with suppress(TimeoutError):\n"
                "            async with asyncio.timeout(next_call.delay_s):\n"
                "                await self._is_cancelled.wait()\n",
                "        self._is_cancelled.wait(next_call.delay_s)\n",
            ),
            ("from contextlib import suppress\n", ""),
            (". A task that reads the stream", ", from any thread. A thread that reads the stream"),
            (
                "It is made where an event loop\n    runs, and belongs to that loop.",
                "Threads may share it.",
            ),
        ),
    ),
    Face(
        "engine/api/aio.py",
        "engine/api/_generated/blocking.py",
        (
            (
                "for asyncio programs: web applications, notebooks, actors.",
                "for programs that block: scripts, notebooks, threads.",
            ),
            ("engine.aio.", "engine.blocking."),
            ("engine.api.crossing", "engine.api.waiting"),
            (
                """\
between that thread and event loops; this file is the surface. The surface for threads that block
is generated from it, with `engine.api.waiting` for crossing (`tools/regen_faces.py`).
Rule 2: any number of loops, in any threads, may use one engine; each stream belongs to the loop
that was running when the stream was made.
""",
                """\
between that thread and others; this file is the surface.
Rule 2: any number of threads may use one engine.
""",
            ),
            (
                "import Reply, Stream, Streams, end_silently_at_exit, wait_end",
                "import Reply, Stream, Streams, end_silently_at_exit, wait_end\n"
                "from engine.api.waiting import engine_of, require_waiting_allowed",
            ),
            (
                "            post()\n",
                "            require_waiting_allowed(self.portal)\n            post()\n",
            ),
            ("Generator, ", ""),
            ("on behalf of tasks", "on behalf of threads"),
            ("# above all a cancellation", "# above all Ctrl-C"),
            (
                """\
for asyncio programs; made by `open_engine`. Tasks of any event loop may
    call every method. Once the engine is closed, every method and the next event of a stream raise
    ShuttingDown.
""",
                """\
for threads that block; made by `open_engine`. Every method may be called
    from any thread but the engine's own, and raises ShuttingDown once the engine is closed.

    A KeyboardInterrupt ends the waiting, and cancels what the thread waited for.
""",
            ),
            ("let other tasks finish", "let other threads finish"),
            ("Other tasks that wait", "Other threads that wait"),
            (
                "get ShuttingDown. After a fork this does not wait.",
                "get ShuttingDown. On the engine's own thread, and\n"
                "        after a fork, this does not wait.",
            ),
            ("self._portal.engine", "engine_of(self._portal)"),
            (") -> _Opening:", ") -> Engine:"),
            (
                """\
 or path.

    ``async with`` the result closes the engine at the block's end. ``await`` of it returns an
    engine that is closed by `Engine.close`, when it is collected, or at exit: for a notebook or an
    actor, where no block lasts.
""",
                """\
 or path. Leaving the engine's ``with`` block closes it; an engine
    that is left open is closed when it is collected, or at exit.
""",
            ),
            (
                "    return _Opening(engine_config(config), make_runner)",
                "    config = engine_config(config)\n"
                "    return Engine(config, _launched(config, make_runner))",
            ),
            (
                "(`engine.api.handles`), for asyncio programs",
                "(`engine.api.handles`), for threads that block",
            ),
            ("End what any task has", "End what any thread has"),
            ("once the reader's loop\n", "once the reader's thread\n"),
            (
                "; it begins at once. What `engine.api.handles.Chat.ask` raises is raised\n"
                "        at the first event.",
                ", which begins at once. Waits until the engine has the question.\n\n"
                "        Raises:\n"
                "            InvalidRequest, ShuttingDown: as `engine.api.handles.Chat.ask`.\n"
                "        ",
            ),
            (
                "streams.open(self, make_source)",
                "streams.open_begun(self, make_source, self._caller.ask)",
            ),
            ("    async def messages(self)", "    @property\n    def messages(self)"),
        ),
    ),
)


def fresh() -> dict[str, str]:
    """Return the texts of all generated files by their paths, relative to the root."""
    found = {face.path: face.generate() for face in FACES}
    packages = {Path(path).parent.as_posix() for path in found}
    return {f"{package}/__init__.py": INIT for package in packages} | found


def drift() -> list[str]:
    """Return the paths of the files that are missing or differ."""
    return [
        path
        for path, text in fresh().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate the faces for threads that block.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on any drift")
    is_check = parser.parse_args().check
    found = drift()
    if not is_check:
        for path, text in fresh().items():
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
    print("\n".join(f"differs: {path}" for path in found) or "the generated faces are current")
    return 1 if is_check and found else 0


if __name__ == "__main__":
    sys.exit(main())
