"""What a server and its worker process say to each other, and how it travels.

A message is a name and a value, pickled, behind a header, on a socket. The rows of plans and
results, which come with every step, and log-probabilities, of which a row may have dozens, are
taken apart first, into plain tuples: named tuples and frozen dataclasses pickle by calls of Python
for each, and a step costs half as much this way (`python -m tools.bench child`).

Rule 1: a message comes whole, or `LineEnded` or `LineGarbled` is raised; the line is of no use
after either. Rule 2: unpickling runs what it is told to, so a line is a socket pair that the server
made and handed to its own child, a process of the same program and user, and nobody else's.
Rule 3: imports no torch.

Source: D3, D8.
"""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from engine.core.encode_types import EncodePlan, EncodeResult
from engine.core.plan import Row, RowResult, StepPlan, StepResult
from engine.core.types import Alternative, TokenLogprob
from engine.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.encode_types import EncoderInfo, EncoderTokenizer
    from engine.core.plan import MemoryEstimate, ModelInfo, RunnerSpec, Tokenizer
    from engine.core.types import Constraint
    from engine.status import Capability

    AnyPlan = StepPlan | EncodePlan
    AnyResult = StepResult | EncodeResult

HEADER = struct.Struct("<4sQ")  # the mark, and the bytes that follow
MARK = b"tri1"
# Of one message; what says it is larger is no message. The largest known are the log-probabilities
# of a prompt of 128,000 tokens with 20 alternatives each, 68 MB (measured).
FRAME_MAX = 1 << 30
TEXT_CHARS = 2000  # of an error's message; a guess
PROTOCOL = 5


class LineEnded(Exception):
    """The other side is gone, or this one closed the line."""


class LineGarbled(Exception):
    """What came is no message."""


class ChildError(RuntimeError):
    """An exception of the worker process: its type and message; its traceback is a note, which
    logs show and ``str`` does not."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker process: what it is to be. ``factory`` is ``module:function``,
    which makes an unloaded runner of the spec and the capability; ``path`` is where modules are
    found; ``log_level`` and ``is_json`` are how its log lines look."""

    factory: str
    spec: RunnerSpec
    capability: Capability | None
    path: tuple[str, ...]
    log_level: int
    is_json: bool


@dataclass(frozen=True, slots=True)
class Estimated:
    """What the model will need, and, with ``process_bytes``, its process beside it."""

    estimate: MemoryEstimate
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is known of a loaded model, what its process had before the load, and its tokenizers."""

    info: ModelInfo | EncoderInfo
    process_bytes: int
    tokenizer: Tokenizer
    encoder_tokenizer: EncoderTokenizer | None


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile a constraint, the ``forgets`` forgotten first. ``number`` counts these and forgets
    in the order in which the server's side made them, as they may overtake each other."""

    constraint: Constraint
    number: int
    forgets: tuple[tuple[Constraint, int], ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as it travels: strings that always do, and, of one of ours, itself."""

    text: str
    traceback: str
    is_memory: bool
    own: bytes = b""

    def error(self) -> Exception:
        """The exception to raise here."""
        found: Exception = MemoryError(self.text) if self.is_memory else ChildError(self.text)
        if self.own:
            with suppress(Exception):  # a class that only the worker process can import
                found = pickle.loads(self.own)
        found.add_note(f"In the worker process:\n{self.traceback}")
        return found


def raised(error: BaseException) -> Raised:
    """Whatever was raised, made ready to travel; never fails, whatever the exception is like."""
    is_memory = isinstance(error, MemoryError)
    try:
        own = pickle.dumps(error, PROTOCOL) if isinstance(error, TrioletError) else b""
        if own:
            pickle.loads(own)
    except Exception:
        own = b""
    name = type(error).__name__
    try:
        said = str(error)[:TEXT_CHARS]
    except Exception:
        said = "its message cannot be shown"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = "its traceback cannot be shown"
    text = said if is_memory else f"{name}: {said}"
    return Raised(text, trace, is_memory, own)


# ---- plans and results, taken apart and put together


def plain_plan(plan: AnyPlan) -> object:
    """A plan as it travels."""
    if isinstance(plan, EncodePlan):
        return plan
    rows = tuple(map(tuple, plan.rows))
    return (plan.plan_id, rows, plan.copies, plan.admitted, plan.released)


def plan_of(plain: Any) -> AnyPlan:
    """The plan that `plain_plan` took apart."""
    if isinstance(plain, EncodePlan):
        return plain
    plan_id, rows, *rest = plain
    return StepPlan(plan_id, tuple(map(tuple.__new__, repeat(Row), rows)), *rest)


def plain_result(result: AnyResult) -> object:
    """A result as it travels. Of its rows only those of the common kind are taken apart."""
    if isinstance(result, EncodeResult):
        return result
    rows = [_plain_row(row) if row.__class__ is RowResult else row for row in result.rows]
    return (result.plan_id, rows, result.timings)


def result_of(plain: Any) -> AnyResult:
    """The result that `plain_result` took apart."""
    if isinstance(plain, EncodeResult):
        return plain
    plan_id, rows, timings = plain
    made = tuple([_row_of(row) if row.__class__ is tuple else row for row in rows])
    return StepResult(plan_id, made, timings)


def _plain_row(row: Any) -> tuple[Any, ...]:
    if row.logprobs or row.prompt_logprobs:
        row = row._replace(
            logprobs=_plain_scores(row.logprobs), prompt_logprobs=_plain_scores(row.prompt_logprobs)
        )
    return tuple(row)


def _row_of(plain: Any) -> RowResult:
    row = tuple.__new__(RowResult, plain)
    if row.logprobs or row.prompt_logprobs:
        return row._replace(
            logprobs=_scores_of(row.logprobs), prompt_logprobs=_scores_of(row.prompt_logprobs)
        )
    return row


def _plain_scores(scores: tuple[TokenLogprob, ...]) -> tuple[Any, ...]:
    return tuple(
        [
            (
                one.token_id,
                one.text,
                one.logprob,
                [
                    (other.token_id, other.text, other.logprob, other.rank)
                    for other in one.alternatives
                ],
            )
            for one in scores
        ]
    )


def _scores_of(plain: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        [
            TokenLogprob(token_id, text, logprob, tuple([Alternative(*other) for other in others]))
            for token_id, text, logprob, others in plain
        ]
    )


# ---- the line


class Line:
    """One end of a socket pair. One thread at a time sends and receives; any may close it, and
    whoever waits then hears of it at once.

    The descriptor is given back by whoever is the last to use it, so that its number never becomes
    another file's under a thread that reads. That takes no lock: each side first says what it does
    and then looks at what the other does.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_used = False
        self._is_closed = False

    def fileno(self) -> int:
        """The descriptor; -1 when it is given back."""
        return self._socket.fileno()

    def send(self, name: str, value: object) -> None:
        """Send a message whole; waits while the other side does not take it.

        Raises:
            LineEnded: it will not get there. Exception: the value cannot be pickled; nothing was
                sent.
        """
        body = pickle.dumps((name, value), PROTOCOL)
        if len(body) > FRAME_MAX:
            raise ValueError(f"a message of {len(body)} bytes")
        with self._used():
            self._socket.sendall(HEADER.pack(MARK, len(body)) + body)

    def receive(self) -> tuple[str, Any]:
        """Wait for a message. Python's global lock is not held meanwhile.

        Raises:
            LineEnded: none will come. LineGarbled: what came is none.
        """
        with self._used():
            mark, size = HEADER.unpack(self._read(HEADER.size))
            if mark != MARK or size > FRAME_MAX:
                raise LineGarbled("what came does not begin as a message does")
            body = self._read(size)
        try:
            name, value = pickle.loads(body)
        except Exception as error:
            raise LineGarbled(f"a message cannot be read: {error!r}") from error
        return name, value

    def close(self) -> None:
        """Use it no more. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # it is closed already, here or there
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_used:
            self._socket.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        self._is_used = True
        try:
            if self._is_closed:
                raise LineEnded("the line was closed")
            yield
        except OSError as error:
            raise LineEnded(f"the line ended: {error}") from error
        finally:
            self._is_used = False
            if self._is_closed:
                self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise LineEnded("the other side closed the line")
            done += count
        return data
