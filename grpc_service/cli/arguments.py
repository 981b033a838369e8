"""The arguments that several commands have."""

from __future__ import annotations

import argparse
import os
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from grpc_service.addresses import DEFAULT_HOST, DEFAULT_PORT
from grpc_service.cli.security import add_security_arguments
from grpc_service.cli.values import COUNT, SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

SERVER_VARIABLE = "TRIOLET_SERVER"
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
PART = re.compile(r"[0-9]+(?:\.[0-9]+)?[smhd]")
DURATION = re.compile(rf"(?:{PART.pattern})+")
TIME = re.compile(  # of RFC 3339
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def add_client(parser: argparse.ArgumentParser, timeout_s: float | None) -> None:
    """Add the flags that every client command has."""
    parser.add_argument(
        "--server",
        default=os.environ.get(SERVER_VARIABLE) or f"{DEFAULT_HOST}:{DEFAULT_PORT}",
        metavar="ADDRESS",
        help=f"HOST:PORT or unix:PATH of the server (default: ${SERVER_VARIABLE}, or "
        f"{DEFAULT_HOST}:{DEFAULT_PORT})",
    )
    parser.add_argument(
        "--timeout",
        type=number_of("seconds"),
        default=timeout_s,
        metavar="SECONDS",
        help=f"longest wait for the answer (default: {'none' if timeout_s is None else timeout_s})",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
    add_security_arguments(parser)


def add_numbers(parser: argparse.ArgumentParser, *rows: tuple[str, str, str, str]) -> None:
    """Add flags of numbers: each with its kind (`number_of`), its placeholder, and its help."""
    for flag, kind, metavar, what in rows:
        parser.add_argument(flag, type=number_of(kind), metavar=metavar, help=what)


def add_model(parser: argparse.ArgumentParser, default: str = "the first that can do this") -> None:
    """Add the flag of the model."""
    parser.add_argument("--model", default="", help=f"name of the model (default: {default})")


def add_images(parser: argparse.ArgumentParser, what: str) -> None:
    """Add a flag for images, which takes several paths and may be repeated."""
    parser.add_argument(
        "--image",
        dest="images",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help=what,
    )


def add_texts(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    """Add the arguments for many texts, and the flag for texts that are too long."""
    parser.add_argument(
        name,
        nargs="*",
        metavar=metavar,
        help=f"{what}; - reads the lines of standard input, as does giving none",
    )
    parser.add_argument("--file", metavar="FILE", help=f"a file with a {metavar.lower()} per line")
    add_model(parser)
    parser.add_argument(
        "--no-truncate",
        dest="truncate",
        action="store_false",
        default=None,
        help="refuse texts that are longer than the model allows (default: cut off their ends)",
    )


def number_of(kind: str) -> Callable[[str], float]:
    """Return a parser of numbers that a message can hold. The server checks their ranges.
    ``kind`` is count, seed, real, or seconds (more than 0)."""

    def read(text: str) -> float:
        try:
            number = SECONDS.read(text) if kind in ("seconds", "real") else COUNT.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        most = {"count": UINT32_MAX, "seed": UINT64_MAX}.get(kind)
        if most is not None and not 0 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is outside [0, {most}]")
        if kind == "seconds" and number <= 0:
            raise argparse.ArgumentTypeError("must be more than 0")
        return float(number) if most is None else int(number)

    return read


def time_before(text: str) -> datetime:
    """Parse a time of RFC 3339, or a duration before now, by this machine's clock."""
    try:
        if DURATION.fullmatch(text):
            parts = [timedelta(**{UNITS[x[-1]]: float(x[:-1])}) for x in PART.findall(text)]
            return datetime.now(UTC) - sum(parts, timedelta())
        if TIME.fullmatch(text):
            return datetime.fromisoformat(text.upper())
    except (ValueError, OverflowError):  # no such day, or before the year 1
        pass
    what = "neither a time such as 2026-01-31T08:00:00Z nor a duration such as 1h30m"
    raise argparse.ArgumentTypeError(f"{text!r} is {what}")
