"""Looks at a model without loading it, for ``triolet inspect``.

Rule: sizes are those by which a load reserves memory (`engine.worker.interface.Inspection`), and a
model that a server would refuse has the server's sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from engine.errors import SpawnFailed
from engine.limits.memory import CPU, default_limit
from engine.worker.factory import look_at_files, runner_of, runner_spec
from engine.worker.load.refusal import Refusal
from engine.worker.load.sketch import sketched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import EngineConfig, ModelConfig
    from engine.status import Capability
    from engine.worker.interface import Inspection
    from engine.worker.torch_runner import InProcessRunner

CONTEXTS = (2048, 8192, 32_768, 131_072)  # tokens, for which `Report.fits` is shown


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of a context of ``num_tokens`` fit into memory, at most --max-num-seqs,
    and the KV pool of so many, in bytes."""

    num_tokens: int
    num_sequences: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a model before it is loaded. ``found`` is None if its files exclude it;
    ``refusal`` is the sentence of why it cannot be served, "" if it can; ``limit`` is the memory
    that models may use on its device, in bytes."""

    capability: Capability | None
    found: Inspection | None
    limit: int
    refusal: str = ""
    detail: str = ""
    fits: tuple[Fit, ...] = ()


def inspect(model: ModelConfig, config: EngineConfig) -> Report:
    """Look at a model and return what a load with this configuration would take. Of a Hugging Face
    id that is not in the cache, small files and headers are fetched."""
    limit, kind = config.memory_limit or default_limit(), None
    try:
        with sketched(model.model, model.revision) as place:
            spec = replace(runner_spec(model, config), model=place)
            kind = look_at_files(spec, model.capability)
            runner = cast("InProcessRunner[Any, Any, Any]", runner_of(spec, kind))
            found = runner.inspect()
            if found.device != CPU:
                limit = runner.estimate().limit or limit
    except Refusal as refusal:
        return Report(kind, None, limit, str(refusal), refusal.detail)
    except SpawnFailed as failed:
        reason = str(failed).removeprefix(SpawnFailed.prefix)
        return Report(kind, None, limit, reason, failed.log_detail)
    fits = tuple(_fits(found, limit, config.max_num_seqs))
    reason = ""
    if found.num_bytes > limit:
        reason = (
            f"it needs {found.num_bytes >> 20} MiB, and models may use {limit >> 20} MiB "
            "(--memory-limit)"
        )
    return Report(kind, found, limit, reason, fits=fits)


def _fits(found: Inspection, limit: int, most: int) -> Iterator[Fit]:
    """Yield how many sequences fit, for each context up to the model's own."""
    if found.kv is None:
        return
    kv = found.kv
    others = found.num_bytes - kv.num_bytes - kv.num_states * kv.bytes_per_state
    for context in (*(c for c in CONTEXTS if c < found.context_limit), found.context_limit):
        count = min(most, kv.sequences(limit - others, context))
        yield Fit(context, count, count * kv.sequence_bytes(context))
