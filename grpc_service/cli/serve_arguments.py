"""The arguments of ``triolet serve``, in the sections of its help."""

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
# The flags of serve on which a model's memory, or the way in which it runs, depends.
INSPECTED = {
    *("revision", "dtype", "quantization", "device", "max-model-len"),
    *("kv-cache-memory", "memory-limit", "max-num-seqs", "max-num-batched-tokens", "block-size"),
    *("draft-model", "kv-cache-dtype", "tensor-parallel-size"),
    *("max-drawings", "max-image-pixels"),
}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of serve. A flag that is not given sets no attribute; ``config`` is then
    None."""
    parser.usage = "%(prog)s [-h] [--model NAME_OR_DIR] [--config FILE.toml] [flags]"
    groups = {}
    for flag in FLAGS:
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section)
            if flag.section == MODELS:
                _add_models(groups[MODELS])
        _add(groups[flag.section], flag)


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of inspect: a model, and the flags of serve on which its memory depends."""
    parser.description = (
        "Say what a model is, whether it is served and how it runs, how much memory it takes and "
        "how many sequences fit into this machine. Nothing is loaded: of a Hugging Face model that "
        "is not in the cache, only small files and headers are fetched. The exit code is 1 if the "
        "model is not served."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a directory, a GGUF file, a demo id or a Hugging Face id"
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
    group = parser.add_argument_group("as for serve")
    _add_adapters(group)
    for flag in FLAGS:
        if flag.name in INSPECTED:
            _add(group, flag)


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME_OR_DIR",
        help="a directory, a GGUF file, a demo id or a Hugging Face id; may be given several times "
        f"(default: {', '.join(DEMO_MODELS)})",
    )
    _add_adapters(group)
    group.add_argument("--config", metavar="FILE.toml", help="a file with any of these settings")


def _add_adapters(group: argparse._ArgumentGroup) -> None:
    """Add the flags of names and adapters."""
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
