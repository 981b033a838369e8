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


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of serve. A flag that is not given sets no attribute."""
    parser.usage = "%(prog)s [-h] [--model NAME_OR_DIR] [--config FILE.toml] [flags]"
    groups = {}
    for flag in FLAGS:
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section)
            if flag.section == MODELS:
                _add_models(groups[MODELS])
        _add(groups[flag.section], flag)


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
