"""The arguments of ``triolet serve`` and their sections in its help.

Rule: every flag of `grpc_service.cli.flags` is in one section, which a test checks.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from engine.config import DEMO_MODELS
from grpc_service.cli.flags import FLAGS
from grpc_service.cli.values import ADAPTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.cli.flags import Flag
    from grpc_service.cli.values import Kind

MODELS = "models"
SECTIONS = {
    MODELS: (
        *("revision", "dtype", "quantization", "speculation", "draft-model"),
        *("tensor-parallel-size", "device", "threads", "runner", "lazy", "adapter-root"),
    ),
    "address and access": (
        *("host", "port", "uds", "insecure", "tls-cert", "tls-key", "client-ca"),
        *("api-key-file", "key-max-requests", "key-max-queued-tokens"),
    ),
    "gateways, metrics and the log": (
        *("vllm-engine-port", "metrics-port", "metrics-host", "log-format"),
    ),
    "memory and steps": (
        *("max-model-len", "max-num-seqs", "max-num-batched-tokens", "block-size"),
        *("kv-cache-memory", "prefault-kv-cache", "memory-limit", "step-time-target"),
        *("inter-token-target", "no-prefix-cache", "no-prepared-plans", "seed"),
    ),
    "images": ("max-image-bytes", "max-image-pixels", "max-drawings"),
    "requests that wait": (
        *("max-queued-requests", "max-queued-tokens", "default-deadline", "stream-buffer"),
        *("stall-timeout", "routing"),
    ),
    "loads, failures and the end": (
        *("spawn-timeout", "idle-ttl", "max-worker-deaths", "step-timeout", "drain-timeout"),
    ),
    "connections": (
        *("max-message-bytes", "max-held-bytes", "max-connections"),
        *("max-connections-per-address", "max-connection-age", "max-connection-idle"),
        *("connection-budget", "keepalive-time", "keepalive-timeout"),
    ),
}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of serve. A flag that is not given sets no attribute."""
    parser.usage = "%(prog)s [-h] [--model NAME_OR_DIR] [--config FILE.toml] [flags]"
    by_name = {flag.name: flag for flag in FLAGS}
    for title, names in SECTIONS.items():
        group = parser.add_argument_group(title)
        if title == MODELS:
            _add_models(group)
        for name in names:
            _add(group, by_name[name])


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME_OR_DIR",
        help="a directory, a GGUF file, a demo id or a Hugging Face id; may be given several times "
        f"(default: {', '.join(DEMO_MODELS)})",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="the name that clients use; the first is that of the first --model, and so on",
    )
    group.add_argument(
        "--adapter",
        action="append",
        default=argparse.SUPPRESS,
        metavar="BASE:NAME=DIR",
        type=_argument_type(ADAPTER),
        help="an adapter (LoRA) that peft wrote to DIR, served beside its base model as the model "
        "BASE:NAME; may be given several times",
    )
    group.add_argument("--config", metavar="FILE.toml", help="a file with any of these settings")


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    if flag.kind.is_switch:
        group.add_argument(
            f"--{flag.name}",
            action="store_true",
            default=argparse.SUPPRESS,
            help=flag.help_text(),
        )
        return
    group.add_argument(
        f"--{flag.name}",
        type=_argument_type(flag.kind),
        action="extend" if flag.kind.is_repeated else "store",
        default=argparse.SUPPRESS,
        metavar=flag.kind.metavar,
        help=flag.help_text(),
    )


def _argument_type(kind: Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}, but must be {kind.wanted}") from None

    return read
