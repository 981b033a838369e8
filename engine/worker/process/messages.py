"""The messages between a server and its worker process, as values that pickle.

Rows of plans and results come with every step, and a row may have dozens of log-probabilities. They
are converted to plain tuples first: named tuples and frozen dataclasses pickle by calls of Python
for each, and a step's messages take half as long this way (bench `process`). Plans and results of
other kinds of work are sent unchanged, so they must not be plain tuples.

Rule: imports no torch.

Source: D3, D8.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from engine.core.text.plan import Row, RowResult, StepPlan, StepResult
from engine.core.text.types import Alternative, TokenLogprob
from engine.errors import TrioletError
from engine.processes.channel import PROTOCOL

if TYPE_CHECKING:
    from engine.core.text.types import Constraint
    from engine.status import Capability
    from engine.worker.encode.interface import EncoderInfo, EncoderTokenizer
    from engine.worker.image_generation.interface import ImageGenerationInfo
    from engine.worker.interface import MemoryEstimate, RunnerSpec, Tokenizer
    from engine.worker.text.interface import ModelInfo

TEXT_CHARS = 2000  # the most characters of an error's message; not tuned


class WorkerProcessError(RuntimeError):
    """An exception in the worker process that is no `TrioletError`. The message has the original
    exception's type and message. The original's traceback is a note, which only logs show."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker process. ``factory`` is ``module:function`` of a function that
    returns an unloaded runner for the spec and the capability. ``path`` is added to its sys.path.
    ``log_level`` and ``is_json`` configure its log lines."""

    factory: str
    spec: RunnerSpec
    capability: Capability | None
    path: tuple[str, ...]
    log_level: int
    is_json: bool


@dataclass(frozen=True, slots=True)
class Estimated:
    """The answer to ``estimate``: the memory that the model will need, and ``process_bytes``, the
    memory of its process beside the model."""

    estimate: MemoryEstimate
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to ``load``. ``process_bytes`` is the process's memory before the load.
    ``encoder_tokenizer`` is None except for an encoder. Of a group's ranks, only rank 0 has a
    ``tokenizer``."""

    info: ModelInfo | EncoderInfo | ImageGenerationInfo
    process_bytes: int
    tokenizer: Tokenizer | None
    encoder_tokenizer: EncoderTokenizer | None


@dataclass(frozen=True, slots=True)
class Compile:
    """A request to drop the constraints of ``forgets`` and then compile one. ``number`` counts
    compilations and forgets in the order in which the server made them, because on different
    channels they may overtake each other."""

    constraint: Constraint
    number: int
    forgets: tuple[tuple[Constraint, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterCall:
    """A request to call a method of the runner's adapters. ``verb`` is measure, load or unload, and
    ``argument`` the directory or the digest."""

    verb: str
    argument: str


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as a message: as strings, and, if it is a TrioletError, pickled in ``own``.
    ``num_collectives`` is how many collectives the rank of a group had begun when it raised."""

    text: str
    traceback: str
    is_memory: bool
    own: bytes = b""
    num_collectives: int = 0

    def error(self) -> Exception:
        """Return the exception to raise on the server's side."""
        error: Exception = (
            MemoryError(self.text) if self.is_memory else WorkerProcessError(self.text)
        )
        if self.own:
            with suppress(Exception):  # only the worker process can import the class
                error = pickle.loads(self.own)
        error.add_note(f"In the worker process:\n{self.traceback}")
        return error


def raised(error: BaseException, num_collectives: int = 0) -> Raised:
    """Return an exception as a message. Never fails, whatever the exception's methods do."""
    is_memory = isinstance(error, MemoryError)
    try:
        own = pickle.dumps(error, PROTOCOL) if isinstance(error, TrioletError) else b""
        if own:
            pickle.loads(own)
    except Exception:
        own = b""
    name = type(error).__name__
    try:
        message = str(error)[:TEXT_CHARS]
    except Exception:
        message = "its message cannot be shown"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = "its traceback cannot be shown"
    text = message if is_memory else f"{name}: {message}"
    return Raised(text, trace, is_memory, own, num_collectives)


# ---- plans and results, as plain tuples and back


def plain_plan(plan: object) -> object:
    """Return a plan in the form that is sent."""
    if not isinstance(plan, StepPlan):
        return plan
    rows = tuple(map(tuple, plan.rows))
    return (plan.plan_id, rows, plan.copies, plan.admitted, plan.released)


def plan_of(plain: Any) -> Any:
    """Return the plan that `plain_plan` converted."""
    if plain.__class__ is not tuple:
        return plain
    plan_id, rows, *rest = plain
    return StepPlan(plan_id, tuple(map(tuple.__new__, repeat(Row), rows)), *rest)


def plain_result(result: object) -> object:
    """Return a result in the form that is sent. Of its rows only a `RowResult` is converted."""
    if not isinstance(result, StepResult):
        return result
    rows = [_plain_row(row) if row.__class__ is RowResult else row for row in result.rows]
    return (result.plan_id, rows, result.timings)


def result_of(plain: Any) -> Any:
    """Return the result that `plain_result` converted."""
    if plain.__class__ is not tuple:
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
                score.token_id,
                score.text,
                score.logprob,
                [
                    (other.token_id, other.text, other.logprob, other.rank)
                    for other in score.alternatives
                ],
            )
            for score in scores
        ]
    )


def _scores_of(plain: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        [
            TokenLogprob(token_id, text, logprob, tuple([Alternative(*other) for other in others]))
            for token_id, text, logprob, others in plain
        ]
    )
