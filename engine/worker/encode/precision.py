"""Turns vectors into the precision that a request asks for, as sentence-transformers does.

Rule: a vector's numbers depend on it and on the ranges alone, never on its batch. The library's
`quantize_embeddings` takes ranges of the batch if it gets none; here there always are some.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from engine.core.encode.types import PRECISIONS
from engine.errors import FieldViolation
from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from engine.core.encode.types import EncodeOptions, Numbers

FLOAT32_MAX = np.finfo(np.float32).max
RANGES_NAME = "embedding_ranges.json"


TOO_GREAT = FieldViolation("precision", "is float16, which cannot hold a number of a vector")


def packed(vector: np.ndarray[Any, Any], options: EncodeOptions) -> Numbers | FieldViolation | None:
    """Return vectors ([…, dimensions] float32), one after the other, in the precision of the
    options; None if a number is not finite, `TOO_GREAT` if float16 cannot hold it. A binary
    precision has eight dimensions in each number, the first in the highest bit, and a last number
    filled with zeros.

    Source: sentence_transformers.util.quantize_embeddings.
    """
    if not np.isfinite(vector).all():
        return None
    made = vector
    if options.precision == "float16":
        with np.errstate(over="ignore"):
            made = vector.astype(np.float16)
        if not np.isfinite(made).all():
            return TOO_GREAT
    elif options.ranges:
        starts, steps = _parts(options.ranges)
        made = np.clip(np.floor((vector - starts) / steps), 0, 255).astype(np.uint8)
    elif options.precision in ("binary", "ubinary"):
        made = np.packbits(vector > 0, axis=-1)
    if PRECISIONS[options.precision] == "b":
        made = (made.astype(np.int16) - 128).astype(np.int8)
    numbers: Numbers = array(PRECISIONS[options.precision])
    numbers.frombytes(made.tobytes())
    return numbers


@lru_cache(maxsize=16)  # of the requests of a few steps
def _parts(ranges: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where each dimension's range starts, and how wide its 256 parts are."""
    starts, ends = np.frombuffer(ranges, dtype=np.float32).reshape(2, -1)
    steps = (ends - starts) / 255
    return starts, np.where(steps == 0, 1, steps)


def read_ranges(directory: Path, dimensions: int) -> bytes:
    """Return the ranges that a model's folder has for its whole vectors, as `EncodeOptions.ranges`;
    empty if it has none.

    Raises:
        Refusal: The file has not two lists of so many numbers, of which the first are not greater,
            or float32 cannot hold the width of a range.
    """
    if not has_file(directory / RANGES_NAME):
        return b""
    given = read_json(directory, RANGES_NAME)
    try:
        ranges = np.array([given["low"], given["high"]], dtype=np.float32)
        fits = ranges.shape == (2, dimensions) and bool(np.isfinite(ranges).all())
        with np.errstate(over="ignore", invalid="ignore"):
            widths = ranges[1] - ranges[0]
            if not fits or not ((widths >= 0) & (widths <= FLOAT32_MAX)).all():
                raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            f'its {RANGES_NAME} is not of the form {{"low": […], "high": […]}} with the least and '
            f"the greatest number of each of its {dimensions} dimensions"
        ) from error
    return ranges.tobytes()
