"""One stable text line per event: what simulations compare, and what a dump shows.

Rule 1: no prompt text, no object addresses, nothing that differs between two equal runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.encode_types import Encoded, EncodePlan, EncodeRequest
from engine.core.events import (
    Admitted,
    Cancel,
    Finished,
    Pause,
    Preempted,
    ReaderDrained,
    Refused,
    StepDone,
    StepFailed,
    Submit,
    Tokens,
)
from engine.core.plan import Logits, StepPlan

if TYPE_CHECKING:
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import Row


def line(event: InputEvent | OutputEvent | StepPlan | EncodePlan) -> str:
    """The event in one line: its kind, whose it is, and what matters."""
    match event:
        case EncodePlan():
            lengths = ",".join(str(len(row.input.token_ids)) for row in event.rows)
            return f"plan {event.plan_id}: {lengths}"
        case Submit(EncodeRequest() as request):
            return (
                f"submit {request.request_id} inputs={len(request.inputs)} "
                f"tokens={request.num_tokens} priority={request.priority}"
            )
        case Encoded():
            return f"  encoded {event.request_id}/{event.index} {event.tokens}"
        case StepPlan():
            return f"plan {event.plan_id}: {' '.join(map(_row, event.rows))}"
        case Submit(request):
            assert not isinstance(request, EncodeRequest)
            return (
                f"submit {request.request_id} prompt={len(request.prompt)} n={request.n} "
                f"max={request.stops.max_tokens} priority={request.priority}"
            )
        case Cancel(request_id, reason):
            return f"cancel {request_id} {reason.value}"
        case ReaderDrained(request_id):
            return f"drained {request_id}"
        case StepDone(result):
            return f"done {result.plan_id}"
        case StepFailed(failure):
            return f"failed {failure.plan_id} {failure.kind.value}"
        case Pause(mode):
            return f"pause {mode.value}"
        case Admitted(request_id, prompt_tokens):
            return f"  admitted {request_id} {prompt_tokens}"
        case Tokens():
            ids = ",".join(map(str, event.token_ids))
            return f"  tokens {event.request_id}/{event.choice} {ids}"
        case Preempted(request_id, sequence, choice):
            return f"  preempted {request_id}/{choice} {sequence}"
        case Finished():
            return (
                f"  finished {event.request_id}/{event.choice} {event.reason.value} {event.phase}"
            )
        case Refused(request_id, error):
            return f"  refused {request_id} {error.reason}"
    return type(event).__name__.lower()


def _row(row: Row) -> str:
    samples = "!" if row.logits is not Logits.NONE else ""
    return f"{row.sequence}[{row.start}+{row.count}{samples}]"
