"""``triolet inspect``: says what a model is, what it takes, and what fits into this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.limits.memory import usable_bytes
from grpc_service.app.statistics import size_text
from grpc_service.cli.flags import configs_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from engine.worker.inspection import Report
    from engine.worker.interface import Inspection, KvInspection


def run(args: argparse.Namespace) -> int:
    """Print what is found. Return the exit code: 1 if the model is not served."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    name = args.model
    args.model, args.config = [name], None
    config, _ = configs_of(args, os.environ)
    from engine.worker.inspection import inspect

    report = inspect(config.models[0], config)
    if args.json:
        print(json.dumps(as_json(name, report), ensure_ascii=False))
    else:
        for label, text in lines_of(name, report):
            print(f"{label:<10}{text}")
    return 1 if report.refusal else 0


def as_json(name: str, report: Report) -> dict[str, Any]:
    """Return the report as one flat object; what is not known is left out."""
    found = report.found
    values: dict[str, Any] = {"model": name, "refusal": report.refusal}
    values |= {"memory_limit": report.limit, "usable_bytes": usable_bytes()}
    if report.capability is not None:
        values["capability"] = report.capability.value
    if found is None:
        return values
    own = asdict(found)
    kv = own.pop("kv")
    values |= own | {"load_bytes": found.load_bytes, "reserved_bytes": found.num_bytes}
    if found.kv is not None:
        values |= {f"kv_{key}": value for key, value in kv.items()}
        values |= {"kv_bytes": found.kv.num_bytes, "fits": [asdict(fit) for fit in report.fits]}
    return values


def lines_of(name: str, report: Report) -> Iterator[tuple[str, str]]:
    """Yield the report as labels and texts for people."""
    found, kind = report.found, report.capability
    yield "model", f"{name}, {kind.value.replace('_', '-')}" if kind else name
    if found is not None:
        yield from _model_lines(found)
        yield (
            "memory",
            f"{size_text(report.limit)} for all models (--memory-limit), of "
            + (f"{size_text(usable_bytes())} that this process may use"),
        )
        if report.fits:
            yield (
                "fits",
                ", ".join(
                    f"{fit.num_sequences or 'no'} of {fit.num_tokens:,} tokens"
                    for fit in report.fits
                )
                + " (sequences at once, with as large a --kv-cache-memory)",
            )
    if report.refusal:
        yield "refused", report.refusal + (f" [{report.detail}]" if report.detail else "")


def _model_lines(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "class", f"{found.architecture}, {found.dtype} on {found.device}"
    yield "runs", found.execution
    yield "files", f"{found.stored}, {size_text(found.file_bytes)}"
    yield "weights", size_text(found.weight_bytes)
    if found.kv is not None:
        yield "KV cache", _kv_text(found, found.kv)
    if found.draft_bytes:
        yield "drafts", f"{size_text(found.draft_bytes)} for the draft model"
    if found.adapter_bytes:
        yield "adapters", size_text(found.adapter_bytes)
    if found.process_bytes:
        yield "processes", f"{size_text(found.process_bytes)} beside the model"
    more, whole = size_text(found.workspace_bytes), size_text(found.num_bytes)
    loaded = f"{size_text(found.load_bytes)}, and at most {more} more for a step"
    yield "loaded", f"{loaded}: {whole} are reserved"


def _kv_text(found: Inspection, kv: KvInspection) -> str:
    state = f" and {size_text(kv.bytes_per_state)} for each state" if kv.bytes_per_state else ""
    return (
        f"{size_text(kv.bytes_per_token)} for each token in {kv.dtype}{state}; the pool has "
        f"{size_text(kv.num_bytes)} (--kv-cache-memory), and a sequence up to "
        f"{found.max_model_len:,} of {found.context_limit:,} tokens"
    )
