"""What `triolet serve` shows a person while it starts.

Rule: progress goes to standard error and the summary to standard output. Without a terminal, only
plain lines are printed.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from engine.limits.cpu import cpu_limit
from engine.status import Capability, ModelState
from grpc_service.addresses import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from engine.api.engine import Engine
    from engine.config import EngineConfig
    from engine.pool.entry import Entry
    from engine.status import ModelStatus
    from grpc_service.app.server_config import ServerConfig

REFRESH_S = 0.1
LEAST_SHARE = 0.05  # before this share of a load is done, its speed is not known
LINE_S = 5.0  # between two lines about a load where there is no terminal
LOAD_ERRORS = "engine.pool.load_errors"  # the logger of failed loads


class HeldBack(logging.Filter):
    """Keeps the reasons of failed loads out of the log until `release`, if ``begins`` is set."""

    def __init__(self, *, begins: bool) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] | None = [] if begins else None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged now; otherwise keep it."""
        if self._records is None:
            return True
        self._records.append(record)
        return False

    def release(self, failure: str = "") -> None:
        """Log the kept records, and keep none from now on. Where the start prints ``failure``
        itself, log only the details that are not in it. Idempotent."""
        records, self._records = self._records, None
        for record in records or ():
            detail = getattr(record, "detail", "")
            if failure and detail in failure:
                continue
            if failure:
                record.msg, record.args = "details of the failed load: %s", (detail,)
            logging.getLogger(LOAD_ERRORS).handle(record)


@contextmanager
def reasons_held_back(config: EngineConfig) -> Iterator[HeldBack]:
    """Hold back the reason why the only model did not load, until the caller releases it or leaves
    the block: a start that fails prints the reason itself, and the log would repeat it. With
    several models the log has each reason at once, and the start prints none."""
    held, logger = HeldBack(begins=len(config.models) == 1), logging.getLogger(LOAD_ERRORS)
    logger.addFilter(held)
    try:
        yield held
    finally:
        held.release()
        logger.removeFilter(held)


def awaited(entries: Collection[Entry]) -> list[Entry]:
    """Return the preloaded models that a start waits for: the text models or, if there is none,
    the encoders."""
    preloaded = [entry for entry in entries if not entry.config.lazy]
    return [entry for entry in preloaded if not entry.traits.loads_last] or preloaded


async def show_loading(engine: Engine) -> None:
    """Show a progress bar per model while it loads; without a terminal, one line per model at its
    begin, and one for each `LINE_S` that it takes.

    Cancellation: safe; the bars disappear.
    """
    entries = awaited(engine.registry.entries.values())
    if not sys.stderr.isatty():
        await _print_loading(entries)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {
            entry.config.name: bars.add_task(entry.config.name, total=None) for entry in entries
        }
        while any(not entry.settled.is_set() for entry in entries):
            for entry in entries:
                total, done = _progress(entry)
                bars.update(tasks[entry.config.name], total=total, completed=done)
            await trio.sleep(REFRESH_S)


async def _print_loading(entries: Collection[Entry]) -> None:
    for entry in entries:
        print(f"loading {entry.config.name} …", file=sys.stderr)
    start = trio.current_time()
    while True:
        with trio.move_on_after(LINE_S):
            for entry in entries:
                await entry.settled.wait()
            return
        for entry in entries:
            if not entry.settled.is_set():
                print(loading_line(entry, trio.current_time() - start), file=sys.stderr)


def loading_line(entry: Entry, seconds: float) -> str:
    """Return how far a load is that began ``seconds`` ago, and how long it will take at its mean
    speed so far."""
    total, done = _progress(entry)
    phase = entry.progress.phase if entry.progress else "waiting"
    line = f"loading {entry.config.name}: {phase}, {seconds:.0f} s"
    if total and done < total:
        line += f", {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if total and total * LEAST_SHARE < done < total:
        line += f", about {seconds * (total - done) / done:.0f} s left"
    return line


def _progress(entry: Entry) -> tuple[int | None, int]:
    progress = entry.progress
    if progress is None or not progress.bytes_total:
        return None, 0
    return progress.bytes_total, progress.bytes_done


def show_ready(engine: Engine, config: ServerConfig, port: int) -> None:
    """Print the address, the models, and a first request for each kind of model."""
    where = f"unix:{config.uds}" if config.uds else f"{config.host}:{port}"
    models = engine.list_models()
    failed = [model.name for model in models if model.state is ModelState.FAILED]
    without = f", but without {', '.join(failed)}" if failed else ""
    lines = [f"Triolet is ready on {where} after {_seconds_since_start():.1f} s{without}."]
    for model in models:
        if model.state is ModelState.READY:
            form = f" with {model.quantization} weights" if model.quantization else ""
            lines.append(
                f"  {model.name}: {model.architecture}, {model.dtype}{form} on {model.device}, "
                f"{_context(model)}, {_memory(model)}"
            )
        else:
            why = f" ({model.error})" if model.error else ""
            lines.append(f"  {model.name}: {model.state.value}{why}")
    lines += [
        f"  {_threads(engine)}",
        "Try:",
        *(f"  {line}" for line in first_requests(engine, config, port)),
        "Ctrl-C drains; a second Ctrl-C cuts.",
    ]
    print("\n".join(lines), flush=True)


def _threads(engine: Engine) -> str:
    """Return how many CPU threads compute, and why, and which models have a number of their own."""
    own = []
    for entry in engine.registry.entries.values():
        config = entry.config
        threads = max(config.replica(index).threads for index in range(config.num_replicas))
        if threads:
            own.append(f"{config.name} has {threads}")
    return "; ".join([str(cpu_limit()), *own])


def _context(model: ModelStatus) -> str:
    note = f" ({model.context_note})" if model.context_note else ""
    return f"context {model.max_model_len}{note}"


def _memory(model: ModelStatus) -> str:
    size, count = f"{model.memory_bytes / 2**20:.0f} MiB", model.full_sequences
    if not count:
        return size
    return (
        f"{size}, of which {model.kv_bytes / 2**20:.0f} MiB are its KV pool, for {count} "
        f"sequence{'s' * (count != 1)} of full length (--kv-cache-memory)"
    )


def first_requests(engine: Engine, config: ServerConfig, port: int) -> Iterator[str]:
    """Yield a command for each kind of model that is served."""
    where, needs = _reachable(config, port), _needs(config)
    server = "" if where == f"{DEFAULT_HOST}:{DEFAULT_PORT}" else f" --server {where}"
    models = engine.list_models()
    kinds = {model.capability for model in models if model.state is not ModelState.FAILED}
    if Capability.TEXT_TO_TEXT in kinds:
        yield f'triolet generate "Once upon a time"{server}{needs}'
    if Capability.VISION in kinds:
        yield f'triolet generate --chat --image FILE "What do you see?"{server}{needs}'
    if Capability.TEXT_EMBEDDING in kinds:
        yield f'triolet embed "The dog sleeps." "A hound naps." "The ship left."{server}{needs}'
    if Capability.SPARSE_EMBEDDING in kinds:
        yield f'triolet embed --kind sparse "The dog sleeps." "A hound naps."{server}{needs}'
    if Capability.MULTI_VECTOR_EMBEDDING in kinds:
        yield f'triolet embed --kind multi-vector "The dog sleeps."{server}{needs}'
    if Capability.IMAGE_EMBEDDING in kinds:
        yield f'triolet embed "a dog" "a ship" --image FILE{server}{needs}'
    if Capability.RERANK in kinds:
        texts = '"Where is the dog?" "The dog sleeps." "The ship left."'
        yield f"triolet rerank {texts}{server}{needs}"
    if Capability.TEXT_CLASSIFICATION in kinds:
        yield f'triolet classify "I am happy." "I am afraid."{server}{needs}'
    if Capability.TOKEN_CLASSIFICATION in kinds:
        yield f'triolet classify --aggregation simple "Ann lives in Rome."{server}{needs}'
    if Capability.TEXT_TO_IMAGE in kinds:
        yield f'triolet draw "a red circle" -o FILE{server}{needs}'
    if Capability.TEXT_TO_TEXT in kinds and not needs:
        yield (
            f'grpcurl -plaintext -d \'{{"text": "Once upon a time"}}\' {where} '
            "triolet.v1.Inference/Generate"
        )


def _reachable(config: ServerConfig, port: int) -> str:
    """Return an address at which a client on this machine reaches the server."""
    if config.uds:
        return f"unix:{config.uds}"
    host = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(config.host.strip("[]"), config.host)
    return f"[{host}]:{port}" if ":" in host.strip("[]") and host[0] != "[" else f"{host}:{port}"


def _needs(config: ServerConfig) -> str:
    """Return the flags that a client of this server needs."""
    needs = " --tls-ca FILE" if config.tls_cert else ""
    needs += " --tls-cert FILE --tls-key FILE" if config.client_ca else ""
    return needs + (" --api-key-file FILE" if config.api_key_file and not config.uds else "")


def _seconds_since_start() -> float:
    """Return the seconds since this process was started, including imports."""
    with open("/proc/self/stat") as stat:
        started_ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / 100
