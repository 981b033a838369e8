"""The kinds of values that flags and the configuration file hold, each read from either.

Rule 1: both readers give the same value or the same sentence; a test holds them together.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE | re.ASCII)
EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """``read`` takes what a flag (always text) or TOML gives and returns the value.

    It raises ValueError for anything else; ``wanted`` completes "must be …". A switch takes no
    text on the command line.
    """

    wanted: str
    metavar: str
    read: Callable[[Any], Any]
    is_switch: bool = False


def read_count(given: object) -> int:
    """A whole number; TOML's ``true`` is none."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str):
        return int(given)
    raise ValueError


def read_seconds(given: object) -> float:
    """A finite number of seconds."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError
    seconds = float(given)
    if not math.isfinite(seconds):
        raise ValueError
    return seconds


def read_size(given: object) -> int:
    """Bytes: a number, or text such as ``512MiB``. ``4G`` and ``4GiB`` are 4 * 2**30, ``4GB`` is
    4 * 10**9."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise ValueError
    number, unit, binary = found.groups()
    is_decimal = unit is not None and not binary and found[0][-1] in "bB"
    base = 1000 if is_decimal else 1024
    return int(float(number) * base ** EXPONENTS.get((unit or "").upper(), 0))


def read_text(given: object) -> str:
    """Text that says something."""
    if not isinstance(given, str) or not given:
        raise ValueError
    return given


def read_switch(given: object) -> bool:
    """Yes or no, TOML's only: on the command line a switch is there or not."""
    if not isinstance(given, bool):
        raise ValueError
    return given


COUNT = Kind("a whole number", "N", read_count)
SECONDS = Kind("a number of seconds", "SECONDS", read_seconds)
BYTES = Kind("a number of bytes, or such as 512MiB or 4GiB", "BYTES", read_size)
TEXT = Kind("a text that is not empty", "TEXT", read_text)
SWITCH = Kind("true or false", "", read_switch, is_switch=True)
