"""``triolet models``: what the server has, and loading and unloading it.

Rule: leaving a load, by Ctrl-C or by --timeout, leaves it to the server, and the command says so.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc

from grpc_service._generated.triolet.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_json, print_table
from grpc_service.cli.statistics import paused_text, size_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

LIST_TIMEOUT_S = 30.0


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    actions: dict[str, Callable[[argparse.Namespace, models_pb2_grpc.ModelsStub], None]] = {
        "load": _load,
        "unload": _unload,
    }
    if args.action not in actions:
        return run_client(args, lambda channel: _list(args, channel))
    return run_client(
        args, lambda channel: actions[args.action](args, models_pb2_grpc.ModelsStub(channel))
    )


def _list(args: argparse.Namespace, channel: grpc.Channel) -> None:
    timeout_s = args.timeout or LIST_TIMEOUT_S
    stub = models_pb2_grpc.ModelsStub(channel)
    listed = stub.ListModels(models_pb2.ListModelsRequest(), timeout=timeout_s)
    if args.json:
        print_json(listed)
        return
    pauses: dict[str, str] = {}
    with suppress(grpc.RpcError):  # for who may not ask: the list alone
        control = control_pb2_grpc.ControlStub(channel)
        answer = control.GetStats(control_pb2.GetStatsRequest(), timeout=timeout_s)
        pauses.update({entry.model: paused_text(entry) for entry in answer.replicas})
    print_models(listed.models, pauses)


def _load(args: argparse.Namespace, stub: models_pb2_grpc.ModelsStub) -> None:
    """With a bar on a terminal, with --json a line for each stage."""
    replicas = getattr(args, "replicas", None)
    request = models_pb2.LoadModelRequest(model=args.name, replicas=replicas)
    call = stub.LoadModel(request, timeout=args.timeout)
    try:
        with _bar(args) as show:
            for stage in call:
                show(stage)
    except KeyboardInterrupt:
        print(f"triolet: the server goes on loading {args.name}", file=sys.stderr)
        raise
    if not args.json:
        got = stub.GetModel(models_pb2.GetModelRequest(model=args.name), timeout=LIST_TIMEOUT_S)
        count, size = len(got.model.replicas), size_text(got.model.memory_bytes)
        print(f"{got.model.name} is loaded: {count} replica{'s' * (count != 1)}, {size}")


def _unload(args: argparse.Namespace, stub: models_pb2_grpc.ModelsStub) -> None:
    request = models_pb2.UnloadModelRequest(model=args.name)
    if (drain_s := getattr(args, "drain", None)) is not None:
        request.drain.FromMicroseconds(int(drain_s * 1e6))
    answer = stub.UnloadModel(request, timeout=args.timeout)
    if args.json:
        print_json(answer)
    else:
        print(f"{args.name} is unloaded; the next request for it loads it again")


@contextmanager
def _bar(args: argparse.Namespace) -> Iterator[Callable[[models_pb2.LoadModelResponse], None]]:
    """What shows a stage of a load."""
    if args.json:
        yield print_json
        return
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(args.name, total=None)

        def show(stage: models_pb2.LoadModelResponse) -> None:
            total = stage.bytes_total or None
            text = f"{args.name}: {stage.phase}"
            bars.update(task, description=text, total=total, completed=stage.bytes_done)

        yield show


def print_models(listed: Sequence[models_pb2.Model], pauses: Mapping[str, str]) -> None:
    rows = [
        (
            ", ".join((model.name, *model.aliases)),
            common_pb2.ModelState.Name(model.state).removeprefix("MODEL_STATE_")
            + pauses.get(model.name, ""),
            _words(common_pb2.Capability.Name(model.capability).removeprefix("CAPABILITY_")),
            model.device or "–",
            model.dtype or "–",
            str(model.max_model_len or "–"),
            size_text(model.memory_bytes),
            str(len(model.replicas)),
        )
        for model in listed
    ]
    head = ("NAME", "STATE", "CAPABILITY", "DEVICE", "DTYPE", "MAX LEN", "MEMORY", "REPLICAS")
    print_table(head, rows)
    for model in listed:
        if model.error:
            print(f"{model.name}: {model.error}")


def _words(name: str) -> str:
    return name.lower().replace("_", "-")
