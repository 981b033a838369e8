"""The server's figures in words, for ``triolet stats`` and for the log on SIGUSR1."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from grpc_service._generated.triolet.v1 import common_pb2, control_pb2
from grpc_service.services.snapshots_codec import encode_statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.message import Message

    from engine.status import EngineStatistics

log = logging.getLogger(__name__)


def log_statistics(statistics: EngineStatistics) -> None:
    """Log the figures in words and, in a JSON log, also by the proto's names."""
    text = "".join(f"\n  {line}" for line in lines_of(encode_statistics(statistics)))
    log.info("statistics:%s", text, extra={"fields": {"totals": asdict(statistics.totals)}})


def lines_of(answer: control_pb2.GetStatsResponse) -> Iterator[str]:
    """Yield the figures of a snapshot: a line for each group of totals and for each replica."""
    for name, text in _totals(answer.totals):
        yield f"{name:<10}{text}"
    for entry in answer.replicas:
        state = common_pb2.ReplicaState.Name(entry.state).removeprefix("REPLICA_STATE_")
        state += paused_text(entry)
        blocks = f", {entry.free_blocks} of {entry.total_blocks} blocks free"
        states = f", {entry.free_states} of {entry.total_states} state slots free"
        yield (
            f"{entry.model}/{entry.replica} {state}: {entry.running} running, {entry.waiting} "
            f"waiting{blocks if entry.total_blocks else ''}{states if entry.total_states else ''}"
        )


def paused_text(entry: control_pb2.ReplicaStats) -> str:
    """Return the words about a pause that follow a replica's state; "" without a pause."""
    if not entry.pause:
        return ""
    mode = control_pb2.PauseMode.Name(entry.pause).removeprefix("PAUSE_MODE_")
    return f", paused ({mode.lower()})"


def _totals(totals: control_pb2.Totals) -> Iterator[tuple[str, str]]:
    ends = totals.requests_total
    levels = ("running", "waiting", "parked", "ending", "unread_calls", "detached", "peak_waiting")
    yield "sequences", _named(totals, levels)
    yield "requests", _named(ends, [field.name for field in ends.DESCRIPTOR.fields])
    yield (
        "tokens",
        f"{totals.prompt_tokens_total} of prompts, {totals.completion_tokens_total} generated",
    )
    if totals.total_blocks:  # encoders have no KV pool
        yield (
            "blocks",
            f"{totals.free_blocks} of {totals.total_blocks} free, {totals.cached_blocks} cached",
        )
        share = totals.prefix_hits / totals.prefix_queries if totals.prefix_queries else 0.0
        yield (
            "prefixes",
            f"{totals.prefix_hits} of {totals.prefix_queries} tokens found ({share:.0%})",
        )
    if totals.total_states:
        yield (
            "states",
            f"{totals.free_states} of {totals.total_states} slots free, {totals.cached_states} "
            "snapshots",
        )
    rows = totals.step_rows_total / totals.step_count if totals.step_count else 0.0
    yield (
        "steps",
        f"{totals.step_count}, of {rows:.1f} rows on average, {totals.preemptions} preemptions",
    )
    yield (
        "memory",
        f"{size_text(totals.memory_reserved)} of {size_text(totals.memory_limit)} reserved",
    )


def _named(message: Message, names: Sequence[str]) -> str:
    return ", ".join(f"{getattr(message, name)} {name}" for name in names)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with its unit, – for 0."""
    if not num_bytes:
        return "–"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
