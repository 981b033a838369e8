"""The server's figures in words: for ``triolet stats``, and for the log when SIGUSR1 asks."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from grpc_service._generated.triolet.v1 import common_pb2, control_pb2
from grpc_service.snapshots import encode_statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.message import Message

    from engine.status import EngineStatistics

log = logging.getLogger(__name__)


def log_statistics(statistics: EngineStatistics, num_zombies: int) -> None:
    """The figures as they stand, readable, and for a machine by the proto's names."""
    totals = replace(statistics.totals, zombies=num_zombies)
    answer = encode_statistics(replace(statistics, totals=totals))
    text = "".join(f"\n  {line}" for line in lines_of(answer))
    log.info("statistics:%s", text, extra={"fields": {"totals": asdict(totals)}})


def lines_of(answer: control_pb2.GetStatsResponse) -> Iterator[str]:
    """The figures of a snapshot, a line for each kind and for each replica."""
    for name, text in _totals(answer.totals):
        yield f"{name:<10}{text}"
    for entry in answer.replicas:
        state = common_pb2.ReplicaState.Name(entry.state).removeprefix("REPLICA_STATE_")
        state += paused_text(entry)
        yield (
            f"{entry.model}/{entry.replica} {state}: {entry.running} running, {entry.waiting} "
            f"waiting, {entry.free_blocks} of {entry.total_blocks} blocks free"
        )


def paused_text(entry: control_pb2.ReplicaStats) -> str:
    """What is said of a pause behind a state; empty: there is none."""
    if not entry.pause:
        return ""
    mode = control_pb2.PauseMode.Name(entry.pause).removeprefix("PAUSE_MODE_")
    return f", paused ({mode.lower()})"


def _totals(totals: control_pb2.Totals) -> Iterator[tuple[str, str]]:
    ends = totals.requests_total
    yield "sequences", _named(totals, ("running", "waiting", "parked", "ending", "zombies"))
    yield "requests", _named(ends, [field.name for field in ends.DESCRIPTOR.fields])
    yield (
        "tokens",
        f"{totals.prompt_tokens_total} of prompts, {totals.completion_tokens_total} generated",
    )
    yield (
        "blocks",
        f"{totals.free_blocks} of {totals.total_blocks} free, {totals.cached_blocks} cached",
    )
    share = totals.prefix_hits / totals.prefix_queries if totals.prefix_queries else 0.0
    yield (
        "prefixes",
        f"{totals.prefix_hits} of {totals.prefix_queries} tokens found ({share:.0%})",
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
    """Bytes as a person writes them; – for none."""
    if not num_bytes:
        return "–"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
