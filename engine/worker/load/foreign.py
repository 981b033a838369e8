"""Says what a file or a directory is if it is not a model in the form that is read here.

Rule: each sentence names what was found and the way out. Only the first bytes of a file are read,
and torch is not imported.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ADAPTER_NAME = "adapter_config.json"  # of PEFT
GGUF_MAGIC = b"GGUF"
POINTER_MAGIC = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES_MAX = 1024  # git-LFS's specification: a pointer is smaller


def is_gguf(path: Path) -> bool:
    """Return whether the file is a GGUF file."""
    return path.is_file() and _begins_with(path, GGUF_MAGIC)


def refusal_of_file(path: Path) -> Refusal:
    """Return why a model cannot be served whose name is that of a file that is no GGUF file."""
    return Refusal("it is a file, and a model is a directory or a GGUF file", detail=str(path))


def refusal_of_directory(directory: Path, otherwise: str) -> Refusal:
    """Return why a directory that lacks a file cannot be served: what the directory is instead or,
    if that is not known, ``otherwise``."""
    if not any(directory.iterdir()):
        return Refusal("its directory is empty")
    if (directory / ADAPTER_NAME).is_file():
        return Refusal(
            f"it is an adapter of PEFT, such as LoRA ({ADAPTER_NAME}), and not a whole model; "
            f"serve its base model{_base_of(directory)} with --adapter BASE:NAME=DIR, or merge it "
            "by PEFT's merge_and_unload, save that, and serve the result"
        )
    ggufs = sorted(path.name for path in directory.glob("*.gguf") if is_gguf(path))
    if len(ggufs) > 1:
        return Refusal(
            f"its directory has {len(ggufs)} GGUF files; name the one to serve, such as "
            f"{directory.name}/{ggufs[0]}"
        )
    return Refusal(otherwise, detail=str(directory))


def refuse_pointers(directory: Path, patterns: Iterable[str]) -> None:
    """Refuse a directory in which one of the files that ``patterns`` name is a pointer of git-LFS.

    Raises:
        Refusal: there is such a file.
    """
    found = [path for pattern in patterns for path in directory.glob(pattern) if _is_pointer(path)]
    if found:
        more = len(found) - 1
        what = f"and {more} more are pointers" if more else "is a pointer"
        raise Refusal(
            f"its {found[0].name} {what} of git-LFS, without the content; run 'git lfs pull' in "
            "the model's directory"
        )


def _base_of(directory: Path) -> str:
    """Return the name of an adapter's base model behind a comma; "" if the adapter does not say.
    Of a path only the last part is returned."""
    try:
        name = json.loads((directory / ADAPTER_NAME).read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not isinstance(name, str) or not name:
        return ""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return f", {name.rstrip('/').rpartition('/')[2] if is_path else name},"


def _is_pointer(path: Path) -> bool:
    try:
        is_small = path.stat().st_size < POINTER_BYTES_MAX
    except OSError:  # a link to nothing; whoever needs the file will say that it is missing
        return False
    return is_small and _begins_with(path, POINTER_MAGIC)


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
