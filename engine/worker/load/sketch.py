"""Makes a Hugging Face model readable without its weights: files of weights that have their header
and their length, and no content.

Rule: everything that reads headers takes a sketch for the model, so that a model is measured by the
code that loads it. Nothing that the cache already has is fetched again, and the cache gets only
small files.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import (
    WANTED_FILES,
    is_hub_id,
    is_whole,
    refusal_of_hub,
    require_cache,
    resolve_local,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WEIGHTS = ".safetensors"
IMPOSSIBLE = (ValueError, TypeError, OverflowError)  # what a header that is not one leads to
# Files on which memory does not depend: they are not fetched. Some are large.
UNREAD = ("tokenizer*", "vocab.*", "merges.txt", "*/merges.txt", "spiece.model", "*token*.json")


@contextmanager
def sketched(model: str, revision: str = "") -> Iterator[str]:
    """Yield what to look at in the place of a model: the model, or the directory of its sketch if
    it is a Hugging Face id that is not wholly in the cache.

    Raises:
        Refusal: The Hub does not give the model, or cannot be reached; or no temporary directory
            can hold the sketch.
    """
    local = resolve_local(model, revision)
    if not is_hub_id(model) or (local is not None and is_whole(local.directory)):
        yield model
        return
    try:
        with TemporaryDirectory(prefix="triolet-sketch-") as directory:
            _draw(model, revision, Path(directory))
            yield directory
    except OSError as error:
        if error.filename is None:
            raise
        raise Refusal(f"needs a temporary folder for its headers, and {error.strerror}") from error


def _draw(model: str, revision: str, directory: Path) -> None:
    """Fill a directory with the model's small files and with its headers."""
    require_cache(model)
    try:
        names = _names(model, revision)
        if not any(name.endswith(WEIGHTS) for name in names):
            raise Refusal("its repository has no safetensors weights")
        for name in names:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(WEIGHTS):
                _draw_weights(model, revision, name, path)
            else:
                shutil.copyfile(_fetch(model, revision, name), path)
    except Refusal:
        raise
    except Exception as error:  # the Hub's client raises many kinds
        raise refusal_of_hub(model, revision, error) from error


@holds_import_lock
def _names(model: str, revision: str) -> list[str]:
    """Return the names of the files that are read.

    Raises:
        Refusal: A name leads out of the model's directory.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    listed = HfApi().model_info(model, revision=revision or None).siblings or []
    names = [file.rfilename for file in listed]
    names = list(filter_repo_objects(names, allow_patterns=list(WANTED_FILES),
                                     ignore_patterns=list(UNREAD)))  # fmt: skip
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Refusal("its repository has a file whose name leads out of its directory")
    return names


@holds_import_lock
def _fetch(model: str, revision: str, name: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(model, name, revision=revision or None)


@holds_import_lock
def _draw_weights(model: str, revision: str, name: str, path: Path) -> None:
    """Link a file of weights that is in the cache, or write its header and its length.

    Raises:
        Refusal: The Hub's file has no header, or an impossible one.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import SafetensorsParsingError

    cached = try_to_load_from_cache(model, name, revision=revision or None)
    if isinstance(cached, str):
        path.symlink_to(cached)
        return
    try:
        found = HfApi().parse_safetensors_file_metadata(model, name, revision=revision or None)
        _write_header(found.tensors, path)
    except (SafetensorsParsingError, *IMPOSSIBLE) as error:
        raise Refusal(
            f"its weight file {name} is not a safetensors file",
            detail=f"{type(error).__name__}: {error}",
        ) from error


def _write_header(tensors: Mapping[str, Any], path: Path) -> None:
    """Write a file that has this header, and a hole for the content, which takes no disk space."""
    header = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for tensor, info in tensors.items()
    }
    text = json.dumps(header).encode()
    end = max((info.data_offsets[1] for info in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + end)
        except OSError as error:
            raise ValueError(f"its content would have {end} bytes ({error.strerror})") from error
