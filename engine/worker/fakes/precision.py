"""The precisions of a vector's numbers in plain Python, for the fake encoder and its oracles.

Rule: this file imports no numpy and shares nothing with `engine.worker.encode.precision`, so that
tests compare the two.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING

from engine.core.encode.types import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.encode.types import Numbers

PARTS = 255  # a range is divided by this, and its end is a part of its own


def in_precision(
    values: Sequence[float], precision: str, low: Sequence[float] = (), high: Sequence[float] = ()
) -> Numbers:
    """Return numbers in a precision. ``low`` and ``high`` are the ranges of int8 and uint8."""
    if precision == "float16":
        return array("H", struct.pack(f"{len(values)}e", *values))
    if precision == "float32":
        return array("f", values)
    if precision.endswith("int8"):
        made = [_part(*one) for one in zip(values, low, high, strict=True)]
    else:
        bits = "".join("1" if value > 0 else "0" for value in values)
        parts = [bits[at : at + 8].ljust(8, "0") for at in range(0, len(bits), 8)]
        made = [int(part, 2) for part in parts]
    less = 0 if precision.startswith("u") else 128
    return array(PRECISIONS[precision], [number - less for number in made])


def _part(value: float, low: float, high: float) -> int:
    width = (high - low) / PARTS or 1.0
    return int(max(0.0, min(PARTS, (value - low) // width)))
