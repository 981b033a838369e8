"""Finds the parts of a GGUF model that llama-gguf-split or a converter has divided into files.

The parts' names end in their numbers, from 1 on: ``-00001-of-00003.gguf``. Only the first has the
metadata; each has its number, from 0 on, and the count. Source: llama.cpp's llama_split_path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
NAMED_MOST = 5  # missing parts that a message names


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of the model to which a GGUF file belongs: all parts in their order, whether
    or not they are there, or the file itself if its name is not that of a part."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return (path,)
    prefix, count = match["prefix"], match["count"]
    return tuple(
        path.with_name(f"{prefix}-{number:05}-of-{count}.gguf")
        for number in range(1, int(count) + 1)
    )


def first_parts(paths: Iterable[Path]) -> list[Path]:
    """Return the first file of each model to which these GGUF files belong, sorted."""
    return sorted({parts_of(path)[0] for path in paths})


def require_parts(paths: tuple[Path, ...]) -> None:
    """Check that a model's files are there.

    Raises:
        Refusal: Some are missing; the message names them. Or one cannot be read.
    """
    missing = [path.name for path in paths if not has_file(path)]
    if missing:
        more = f" and {len(missing) - NAMED_MOST} more" if len(missing) > NAMED_MOST else ""
        raise Refusal(
            f"of its {len(paths)} parts, {', '.join(missing[:NAMED_MOST])}{more} "
            f"{'are' if len(missing) > 1 else 'is'} missing; download all parts into one directory"
        )


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Check that a file says to be the part of a model as which it is read, counted from 0.

    Raises:
        Refusal: The file says to be another part, or that there are more or fewer parts.
    """
    own, own_count = (int(metadata.get(key) or 0) for key in (NUMBER, COUNT))
    if count == 1 and own_count > 1:
        raise Refusal(
            f"{path.name} is one of {own_count} parts of a GGUF model, and the others are found "
            f"only if its name is the original one, which ends in -{own + 1:05}-of-{own_count:05}"
            ".gguf"
        )
    if count > 1 and (own, own_count) != (number, count):
        raise Refusal(
            f"{path.name} has the name of another part: its {NUMBER} is {own}, and its {COUNT} "
            f"{own_count}"
        )
