"""``triolet models``: lists, loads and unloads the server's models, and adapters of them.

Rule: Ctrl-C and --timeout end the command, but not the load, which goes on in the server; after
Ctrl-C the command prints that.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from grpc_service.app.statistics import paused_text, size_text
from grpc_service.cli.bars import bar
from grpc_service.cli.client import run_client
from grpc_service.cli.query import duration_of, print_json, print_table, show
from grpc_service.client import CallError, messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from google.protobuf.duration_pb2 import Duration

    from grpc_service.client import Client

LIST_TIMEOUT_S = 30.0


def run(args: argparse.Namespace) -> int:
    """List, load or unload models and adapters. Return the exit code."""
    action = {
        "load": _load,
        "unload": _unload,
        "load-adapter": _load_adapter,
        "unload-adapter": _unload_adapter,
    }.get(args.action, _list)
    return run_client(args, lambda client: action(args, client))


def _list(args: argparse.Namespace, client: Client) -> None:
    timeout_s = args.timeout or LIST_TIMEOUT_S
    listed = client.models.list_models(timeout=timeout_s)
    if args.json:
        print_json(listed)
        return
    pauses: dict[str, str] = {}
    with suppress(CallError):  # without the right to GetStats, no pauses are shown
        answer = client.control.get_stats(timeout=timeout_s)
        pauses.update({entry.model: paused_text(entry) for entry in answer.replicas})
    print_models(listed.models, pauses)


def _load(args: argparse.Namespace, client: Client) -> None:
    """Show a bar on a terminal, with --json a line for each stage."""
    replicas = getattr(args, "replicas", None)
    request = messages.LoadModelRequest(model=args.name, replicas=replicas)
    try:
        with (
            _stages(args) as show_stage,
            client.models.load_model(request, timeout=args.timeout) as stages,
        ):
            for stage in stages:
                show_stage(stage)
    except KeyboardInterrupt:
        print(f"triolet: the server goes on loading {args.name}", file=sys.stderr)
        raise
    if not args.json:
        get_request = messages.GetModelRequest(model=args.name)
        got = client.models.get_model(get_request, timeout=LIST_TIMEOUT_S)
        count, size = len(got.model.replicas), size_text(got.model.memory_bytes)
        print(f"{got.model.name} is loaded: {count} replica{'s' * (count != 1)}, {size}")


def _unload(args: argparse.Namespace, client: Client) -> None:
    request = messages.UnloadModelRequest(model=args.name, drain=_drain_of(args))
    answer = client.models.unload_model(request, timeout=args.timeout)
    show(args, answer, f"{args.name} is unloaded; the next request for it loads it again")


def _load_adapter(args: argparse.Namespace, client: Client) -> None:
    request = messages.LoadAdapterRequest(
        model=args.name, directory=args.directory, aliases=args.alias
    )
    answer = client.models.load_adapter(request, timeout=args.timeout)
    model = answer.model
    size = size_text(model.memory_bytes)
    show(args, answer, f"{model.name} is loaded: rank {model.adapter_rank}, {size}")


def _unload_adapter(args: argparse.Namespace, client: Client) -> None:
    request = messages.UnloadAdapterRequest(model=args.name, drain=_drain_of(args))
    answer = client.models.unload_adapter(request, timeout=args.timeout)
    show(args, answer, f"{args.name} is unloaded and no model any more")


def _drain_of(args: argparse.Namespace) -> Duration | None:
    """Return --drain, the time that running requests have; None: the server's --drain-timeout."""
    return duration_of(getattr(args, "drain", None))


@contextmanager
def _stages(args: argparse.Namespace) -> Iterator[Callable[[messages.LoadModelResponse], None]]:
    """Yield the function that shows a stage of a load."""
    if args.json:
        yield print_json
        return
    with bar(args.name, of_bytes=True) as update:

        def show_stage(stage: messages.LoadModelResponse) -> None:
            total = stage.bytes_total or None
            text = f"{args.name}: {stage.phase}"
            update(description=text, total=total, completed=stage.bytes_done)

        yield show_stage


def print_models(listed: Sequence[messages.Model], pauses: Mapping[str, str]) -> None:
    """Print a table of the models, the error of each that failed, and why a context is short."""
    rows = [
        (
            ", ".join((model.name, *model.aliases)),
            messages.ModelState.Name(model.state).removeprefix("MODEL_STATE_")
            + pauses.get(model.name, ""),
            _words(messages.Capability.Name(model.capability).removeprefix("CAPABILITY_")),
            model.device or "–",
            ", ".join(filter(None, (model.dtype, model.quantization))) or "–",
            str(model.max_model_len or "–"),
            size_text(model.memory_bytes),
            _count(model.replicas),
        )
        for model in listed
    ]
    head = ("NAME", "STATE", "CAPABILITY", "DEVICE", "DTYPE", "MAX LEN", "MEMORY", "REPLICAS")
    print_table(head, rows)
    for model in listed:
        if model.error:
            print(f"{model.name}: {model.error}")
        if model.context_note:
            print(f"{model.name}: context {model.max_model_len} {model.context_note}")


def _count(replicas: Sequence[messages.Replica]) -> str:
    """Return how many replicas there are, and among how many processes each is divided."""
    sizes = {replica.tensor_parallel_size for replica in replicas if replica.tensor_parallel_size}
    divided = f" × {max(sizes)}" if sizes - {1} else ""
    return f"{len(replicas)}{divided}"


def _words(name: str) -> str:
    return name.lower().replace("_", "-")
