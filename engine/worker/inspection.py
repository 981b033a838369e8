"""Looks at a model without loading it, for ``triolet inspect``.

Rule: sizes are those by which a load reserves memory (`engine.worker.interface.Inspection`), and a
model that a server would refuse has the server's sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from engine.errors import SpawnFailed
from engine.limits.memory import CPU, default_limit, own_bytes
from engine.worker.factory import look_at_files, runner_of, runner_spec
from engine.worker.load.refusal import Refusal
from engine.worker.load.sketch import sketched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.config import AdapterConfig, EngineConfig, ModelConfig
    from engine.status import Capability
    from engine.worker.interface import Inspection
    from engine.worker.text.adapters import LoadedAdapters
    from engine.worker.torch_runner import InProcessRunner

    AnyInProcess = InProcessRunner[Any, Any, Any]

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
    """The facts about a model before it is loaded. ``found`` is None if its files show that it
    cannot be served; ``refusal`` says why it cannot, "" if it can; ``limit`` is the memory that
    models may use on its device, in bytes."""

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
            ranks = [replace(spec, rank=rank) for rank in range(spec.tp)]
            runners = [cast("AnyInProcess", runner_of(rank, kind)) for rank in ranks]
            found = _joined([runner.inspect() for runner in runners])
            for adapter in model.adapters:
                found = _with_adapter(found, runners[0], adapter)
            if found.device != CPU:
                limits = {one.device: one.limit for one in (r.estimate() for r in runners)}
                limit = sum(filter(None, limits.values())) or limit
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


def _joined(ranks: Sequence[Inspection]) -> Inspection:
    """Return the bytes that all ranks of a model take together, each in a process like this one."""
    first = ranks[0]
    if len(ranks) == 1:
        return first
    kv = first.kv
    if kv is not None:
        own = [rank.kv for rank in ranks if rank.kv is not None]
        kv = replace(
            kv,
            bytes_per_token=sum(pool.bytes_per_token for pool in own),
            num_blocks=min(pool.num_blocks for pool in own),
        )
    return replace(
        first,
        device=", ".join(dict.fromkeys(rank.device for rank in ranks)),
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        tokenizer_bytes=sum(rank.tokenizer_bytes for rank in ranks),
        workspace_bytes=sum(rank.workspace_bytes for rank in ranks),
        process_bytes=sum(own_bytes() for rank in ranks if rank.device == CPU),
        kv=kv,
    )


def _with_adapter(found: Inspection, runner: AnyInProcess, adapter: AdapterConfig) -> Inspection:
    """Return an inspection to which an adapter is added: its numbers, and what its load and its
    steps take beside them.

    Raises:
        Refusal: The model takes no adapters, or the adapter's files show that it is not served.
    """
    store: LoadedAdapters | None = getattr(runner, "adapters", None)
    if store is None:
        raise Refusal(f"the adapter {adapter.name}: only models that generate text take adapters")
    try:
        most = store.measure(adapter.directory)
        own = store.placed_bytes(adapter.directory, found.dtype)
    except SpawnFailed as failed:
        reason = str(failed).removeprefix(SpawnFailed.prefix)
        raise Refusal(f"the adapter {adapter.name}: {reason}", detail=failed.log_detail) from failed
    return replace(
        found,
        adapter_bytes=found.adapter_bytes + own,
        workspace_bytes=found.workspace_bytes + most - own,
    )


def _fits(found: Inspection, limit: int, most: int) -> Iterator[Fit]:
    """Yield how many sequences fit, for each context up to the model's own."""
    if found.kv is None:
        return
    kv = found.kv
    others = found.num_bytes - kv.num_bytes - kv.num_states * kv.bytes_per_state
    for context in (*(c for c in CONTEXTS if c < found.context_limit), found.context_limit):
        count = min(most, kv.sequences(limit - others, context))
        yield Fit(context, count, count * kv.sequence_bytes(context))
