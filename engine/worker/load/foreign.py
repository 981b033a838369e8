"""Writes the refusals for files and directories that are not models in a form that is read.

Rule: each message names the file that was found and a remedy. Only the first bytes of a file are
read, and torch is not imported.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from engine.worker.load.gguf.parts import first_parts
from engine.worker.load.reading import begins_with, has_file, reading
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ADAPTER_NAME = "adapter_config.json"  # which PEFT writes into an adapter's directory
GGUF_MAGIC = b"GGUF"
POINTER_MAGIC = b"version https://git-lfs.github.com/spec/"


def is_gguf(path: Path) -> bool:
    """Return whether there is a file at ``path``, and it is a GGUF file.

    Raises:
        Refusal: The file cannot be read.
    """
    return has_file(path) and begins_with(path, GGUF_MAGIC)


def refusal_of_file(path: Path) -> Refusal:
    """Return the refusal of a model whose name is the path of a file that is no GGUF file."""
    if path.is_file() and not path.stat().st_size:
        return Refusal("its file is empty", detail=str(path))
    return Refusal("it is a file, and a model is a directory or a GGUF file", detail=str(path))


def refusal_of_directory(directory: Path, otherwise: str) -> Refusal:
    """Return the refusal of a directory that lacks a needed file. Its message says what the
    directory is instead, or, if that is not recognised, ``otherwise``."""
    if not any(directory.iterdir()):
        return Refusal("its directory is empty")
    if (directory / ADAPTER_NAME).is_file():
        return Refusal(
            f"it is an adapter of PEFT, such as LoRA ({ADAPTER_NAME}), and not a whole model; "
            f"serve its base model{_base_of(directory)} with --adapter BASE:NAME=DIR, or merge it "
            "by PEFT's merge_and_unload, save that, and serve the result"
        )
    models = first_parts(path for path in directory.glob("*.gguf") if is_gguf(path))
    if len(models) > 1:
        return Refusal(
            f"its directory has {len(models)} GGUF models; name the file to serve, such as "
            f"{directory.name}/{models[0].name}"
        )
    return Refusal(otherwise, detail=str(directory))


def check_files(directory: Path, patterns: Sequence[str]) -> None:
    """Check every file of a directory that ``patterns`` name. Libraries read some of them later,
    and ignore an optional file that cannot be read.

    Raises:
        Refusal: A file cannot be read, or is a pointer of git-LFS.
    """
    names = _names(directory, patterns)
    pointers = [name for name in names if begins_with(directory / name, POINTER_MAGIC, name)]
    if pointers:
        more = len(pointers) - 1
        what = f"and {more} more are pointers" if more else "is a pointer"
        raise Refusal(
            f"its {pointers[0]} {what} of git-LFS, without the content; run 'git lfs pull' in "
            "the model's directory"
        )


def _names(directory: Path, patterns: Sequence[str], within: str = "") -> Iterator[str]:
    """Yield the names in a directory that patterns such as ``*/*.json`` match, broken links
    included (`Path.glob` leaves them out). ``within`` is put before each name."""
    with reading(within.rstrip("/") or "directory"):
        entries = sorted(directory.iterdir())
    split = [pattern.partition("/") for pattern in patterns]
    for entry in entries:
        name = f"{within}{entry.name}"
        if any(not rest and fnmatchcase(entry.name, own) for own, _, rest in split):
            yield name
        inner = [rest for own, _, rest in split if rest and fnmatchcase(entry.name, own)]
        if inner and not entry.is_file():
            yield from _names(entry, inner, f"{name}/")


def _base_of(directory: Path) -> str:
    """Return the name of an adapter's base model between commas; "" if the adapter does not name
    it. Of a path only the last part is returned."""
    try:
        name = json.loads((directory / ADAPTER_NAME).read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(name, str) or not name:
        return ""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return f", {name.rstrip('/').rpartition('/')[2] if is_path else name},"
