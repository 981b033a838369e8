"""The kinds of values that flags and the configuration file have.

Rule 1: a flag and the file give the same value or the same error message; a test compares them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from engine.settings import setting_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE | re.ASCII)
EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values. ``read`` returns the value of a flag's text or of a TOML value, and raises
    ValueError if it is not of this kind. ``wanted`` completes the message "must be …". A switch
    takes no text on the command line. A flag that may be repeated has a tuple of values, as a list
    in the file gives them; ``read`` then returns a tuple of one or more."""

    wanted: str
    metavar: str
    read: Callable[[Any], Any]
    is_switch: bool = False
    is_repeated: bool = False


def read_count(given: object) -> int:
    """Return a whole number. TOML's ``true`` does not count as one."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str):
        return int(given)
    raise ValueError


def read_seconds(given: object) -> float:
    """Return a finite number of seconds."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError
    seconds = float(given)
    if not math.isfinite(seconds):
        raise ValueError
    return seconds


def read_size(given: object) -> int:
    """Return a number of bytes, from a number or a text such as ``512MiB``. ``4G`` and ``4GiB``
    are 4 * 2**30, ``4GB`` is 4 * 10**9."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    match = SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None:
        raise ValueError
    number, unit, binary = match.groups()
    is_decimal = unit is not None and not binary and match[0][-1] in "bB"
    base = 1000 if is_decimal else 1024
    return int(float(number) * base ** EXPONENTS.get((unit or "").upper(), 0))


def read_text(given: object) -> str:
    """Return a text that is not empty."""
    if not isinstance(given, str) or not given:
        raise ValueError
    return given


def read_switch(given: object) -> bool:
    """Return TOML's true or false. On the command line a switch has no value."""
    if not isinstance(given, bool):
        raise ValueError
    return given


def read_ports(given: object) -> tuple[tuple[str, int], ...]:
    """Return ports, each with the name of its model, "" without one: from a number, from a text
    such as ``stories=50052``, or from a list of these."""
    if isinstance(given, list):
        return tuple(port for text in given for port in read_ports(text))
    if not isinstance(given, str):
        return (("", read_count(given)),)
    name, separator, number = given.rpartition("=")
    if separator and not name:
        raise ValueError
    return ((name, int(number)),)


def read_texts(given: object) -> tuple[str, ...]:
    """Return texts that are not empty, from one or from a list."""
    if isinstance(given, list):
        return tuple(read_text(one) for one in given)
    return (read_text(given),)


def read_adapter(given: object) -> tuple[str, str, str]:
    """Return the base, the name and the directory of a text such as ``llama:sql=adapters/sql``."""
    if not isinstance(given, str):
        raise ValueError
    full, _, directory = given.partition("=")
    base, _, name = full.rpartition(":")
    if not (base and name and directory):
        raise ValueError
    return base, name, directory


def text(metavar: str) -> Kind:
    """Return a kind of texts that are not empty; ``metavar`` is their placeholder in the help."""
    return Kind("a text that is not empty", metavar, read_text)


def one_of(*values: str) -> Kind:
    """Return a kind of texts that are one of these; the configuration refuses others."""
    return text(f"{{{','.join(values)}}}")


COUNT = Kind("a whole number", "N", read_count)
SECONDS = Kind("a number of seconds", "SECONDS", read_seconds)
BYTES = Kind("a number of bytes, or such as 512MiB or 4GiB", "BYTES", read_size)
TEXT = text("TEXT")
SWITCH = Kind("true or false", "", read_switch, is_switch=True)
ADAPTER = Kind("BASE:NAME=DIR", "BASE:NAME=DIR", read_adapter)
PORTS = Kind("a port, or MODEL=PORT", "[MODEL=]PORT", read_ports, is_repeated=True)
ORIGINS = Kind("an origin, or a list of them", "ORIGIN", read_texts, is_repeated=True)
BY_TYPE = {"int": COUNT, "float": SECONDS, "bool": SWITCH, "str": TEXT, "Capability": TEXT}
BY_UNIT = {kind.metavar: kind for kind in (BYTES, PORTS, ORIGINS)}


def kind_of(field: Field[Any]) -> Kind | None:
    """Return the kind of a configuration's field; None if an argument cannot give it."""
    setting = setting_of(field)
    unit = setting.unit if setting is not None else ""
    if setting is not None and setting.choices:
        return one_of(*setting.choices)
    kind = BY_UNIT.get(unit) or BY_TYPE.get(str(field.type).removesuffix(" | None"))
    return text(unit) if unit and kind is TEXT else kind


def kinds_of(config: type[Any]) -> dict[str, Kind]:
    """Return the kinds of a configuration's fields by name, for a table of the file."""
    return {field.name: kind for field in fields(config) if (kind := kind_of(field)) is not None}
