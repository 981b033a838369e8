"""Finds the directory of a model by the name that the user gave.

A name is one of these, in this order: an existing directory, a demo id, a Hugging Face id.

Rule 1: nothing here reads weights or knows architectures. Rule 2: the network is used only for a
model that the local cache does not hold completely, so that a second start needs no network.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.foreign import (
    ADAPTER_NAME,
    check_files,
    is_gguf,
    refusal_of_directory,
    refusal_of_file,
)
from engine.worker.load.gguf.parts import first_parts, parts_of, require_parts
from engine.worker.load.reading import has_file, read_text, reading
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from huggingface_hub.errors import HfHubHTTPError

# Demo models, as package data under engine/demo/.
DEMOS = {
    "demo-stories": "stories",
    "demo-embed": "embed",
    "demo-rerank": "rerank",
    "demo-draft": "draft",  # drafts for the stories
    "demo-clip": "clip",
    "demo-see": "see",
}
DEMO_ROOT = Path(__file__).resolve().parents[2] / "demo"

PIPELINE_INDEX = "model_index.json"  # lists an image model's components, a folder for each
PIPELINE_FOLDERS = ("unet", "vae", "text_encoder")
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
# The files of a repository that a model needs, including an encoder's modules such as
# 1_Pooling/config.json, and the file by which an adapter is recognised. Pickled and original
# weights are not downloaded.
WANTED_FILES = (
    "config.json", "generation_config.json", WEIGHTS_NAME, INDEX_NAME, "model-*.safetensors",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "spiece.model",
    "vocab.txt", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
    "[0-9]_*/*.json", "[0-9]_*/*.txt", "[0-9]_*/*.safetensors", ADAPTER_NAME,
    PIPELINE_INDEX, "scheduler/scheduler_config.json", "tokenizer*/*.json", "tokenizer*/merges.txt",
    "unet/*.json", "unet/diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model-*.safetensors", "vae/*.json",
    "vae/diffusion_pytorch_model.safetensors", "text_encoder*/*.json",
    "text_encoder*/model.safetensors", "text_encoder*/model-*.safetensors",
)  # fmt: skip
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Error numbers of a file system that a download cannot write to.
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# What may be a Hub id; the Hub's own rules, which `_is_hub_name` checks, are stricter.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A model's directory, and the name that a client may see. ``gguf`` are the files of a GGUF
    model, in their order, and ``directory`` then their directory; () for other models."""

    directory: Path
    name: str
    is_demo: bool = False
    gguf: tuple[Path, ...] = ()


def short_name(model: str) -> str:
    """Return the model's name for messages: the last part of a directory, never its path."""
    path = Path(os.path.expanduser(model))
    is_path = os.path.isdir(path) or model.startswith((".", "/", "~")) or model.count("/") > 1
    return path.resolve().name if is_path else model


def resolve(model: str, revision: str = "") -> Source:
    """Find the model's directory. A Hugging Face id that is not cached yet is downloaded.

    Raises:
        Refusal: There is no such model; the message says where it was searched. Or one of its files
            is missing, cannot be read, or is a pointer of git-LFS.
    """
    source = _find(model, revision)
    if source.gguf:
        require_parts(source.gguf)
    else:
        check_files(source.directory, WANTED_FILES)
    return source


def _find(model: str, revision: str) -> Source:
    path = _path_of(model)
    if path.is_dir():
        return Source(path, short_name(model), gguf=_only_gguf(path))
    if any(is_gguf(part) for part in parts_of(path)):
        return Source(path.parent, short_name(model), gguf=parts_of(path))
    if model in DEMOS:
        directory = DEMO_ROOT / DEMOS[model]
        if not (directory / "config.json").is_file():
            raise Refusal("this demo model is not part of the installation", detail=str(directory))
        return Source(directory, model, is_demo=True)
    if path.exists():
        raise refusal_of_file(path)
    if not _is_hub_name(model):
        raise Refusal("there is no such directory", detail=str(path.absolute()))
    return Source(_hub_directory(model, revision), model)


def _only_gguf(directory: Path) -> tuple[Path, ...]:
    """Return the files of a directory's GGUF model, if it has exactly one and no config.json, else
    ().

    Raises:
        Refusal: The directory or a GGUF file in it cannot be read.
    """
    with reading("directory"):
        paths = [path for path in directory.iterdir() if path.suffix == ".gguf"]
    if has_file(directory / "config.json"):
        return ()
    models = first_parts(path for path in paths if is_gguf(path))
    return parts_of(models[0]) if len(models) == 1 else ()


def resolve_local(model: str, revision: str = "") -> Source | None:
    """Find the model's directory without the network. Return None where `resolve` would download
    or refuse."""
    try:
        if is_hub_id(model):
            return _cached(model, revision)
        return _find(model, revision)
    except Refusal:
        return None


def is_hub_id(model: str) -> bool:
    """Return whether a model's name is a Hugging Face id, and neither a path that exists nor a
    demo's.

    Raises:
        Refusal: The operating system cannot say whether the path exists.
    """
    return model not in DEMOS and not _path_of(model).exists() and _is_hub_name(model)


def absence(model: str) -> str:
    """Return why there is no such model, if its name can only be a path; empty if there may be such
    a model. This needs no network and no large import."""
    if model in DEMOS or HUB_ID.fullmatch(model):
        return ""
    path = Path(os.path.expanduser(model))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no such directory or file [{path.absolute()}]"
    except (OSError, ValueError):  # loading the model reports the reason
        return ""
    return ""


def _path_of(model: str) -> Path:
    """Return the path that the name would have as a directory.

    Raises:
        Refusal: The operating system cannot say whether the path exists.
    """
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, never raises
    try:
        path.exists()
    except OSError as error:
        raise Refusal(f"its path cannot be accessed: {error.strerror}", detail=str(path)) from None
    return path


@holds_import_lock
def _is_hub_name(model: str) -> bool:
    if not HUB_ID.fullmatch(model):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


@holds_import_lock
def _cached(model: str, revision: str) -> Source | None:
    import huggingface_hub

    for name in ("config.json", "modules.json", PIPELINE_INDEX):
        path = huggingface_hub.try_to_load_from_cache(model, name, revision=revision or None)
        if isinstance(path, str):
            return Source(Path(path).parent, model)
    return None


def _hub_directory(model: str, revision: str) -> Path:
    """Return the snapshot of a Hugging Face id: the cached one if it is complete, else a new
    download."""
    require_cache(model)
    download, _, _ = _hub()
    snapshot = partial(
        download,
        model,
        revision=revision or None,
        allow_patterns=list(WANTED_FILES),
    )
    try:
        cached = Path(snapshot(local_files_only=True))
        if is_whole(cached):
            return cached
    except (OSError, ValueError):
        pass  # this revision is not cached: ask the Hub
    try:
        directory = Path(snapshot())
    except Exception as error:  # the Hub's HTTP client raises many kinds without a network
        raise refusal_of_hub(model, revision, error) from error
    if not is_whole(directory):  # without a network, the client returns the cached files
        raise refusal_of_directory(
            directory,
            "its repository has no safetensors weights, or its download is unfinished and the "
            "Hub cannot be reached",
        )
    return directory


def require_cache(model: str) -> None:
    """Check that there is a place for the Hugging Face cache.

    Raises:
        Refusal: The user has no home directory, and names no other place.
    """
    if _hub()[1].startswith("~"):  # this user has no home directory
        raise Refusal(
            "there is no directory of this name, and without a home directory there is no Hugging "
            f"Face cache; name a folder in HF_HOME{_hint(model)}"
        )


def refusal_of_hub(model: str, revision: str, error: Exception) -> Refusal:
    """Return the refusal of a model that the Hub's client did not give, by its error."""
    if isinstance(error, _hub()[2]):
        status = getattr(error.response, "status_code", "no answer")
        where = f"revision {revision!r} of it " if revision else "it "
        return Refusal(
            "there is no directory of this name, and the Hugging Face Hub does not give "
            f"{where}(status {status}){_hint(model)}",
            detail=str(error),
        )
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return Refusal(
            "there is no directory of this name, and the Hugging Face cache cannot be written "
            f"({error.strerror}); name another folder in HF_HOME",
            detail=str(error),
        )
    return Refusal(
        "there is no directory of this name, it is not in the Hugging Face cache, and the "
        f"Hub cannot be reached{_hint(model)}",
        detail=f"{type(error).__name__}: {error}",
    )


@holds_import_lock
def _hub() -> tuple[Callable[..., str], str, type[HfHubHTTPError]]:
    """Return the Hub's download function, its cache directory, and its class of HTTP errors."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    return snapshot_download, constants.HF_HUB_CACHE, HfHubHTTPError


def _hint(model: str) -> str:
    """Return a list of the demos for a name without an owner, which may be a misspelled demo's."""
    return "" if "/" in model else f"; the demos are {', '.join(DEMOS)}"


def is_whole(directory: Path) -> bool:
    """Return whether the directory has a config and all files of its weights. For some models of
    sentence-transformers, such as CLIP's, they are in the folder of the first module, and for an
    image model in the folders of its components."""
    if (directory / PIPELINE_INDEX).is_file():
        return all(any((directory / name).glob("*.safetensors")) for name in PIPELINE_FOLDERS)
    folders = (directory, *sorted(directory.glob("0_*")))
    folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if folder is None:
        return False
    try:
        return all((folder / name).is_file() for name in weight_files(folder))
    except Refusal:
        return False


def weight_files(directory: Path) -> tuple[str, ...]:
    """Return the names of the checkpoint's safetensors files, from its index if there is an index.

    Raises:
        Refusal: There are no weights, or only pickled ones; or the directory holds no model.
    """
    if index := weight_index(directory):
        return tuple(sorted(set(index.values())))
    if has_file(directory / WEIGHTS_NAME):
        return (WEIGHTS_NAME,)
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLED)
    raise refusal_of_directory(
        directory,
        f"its weights are pickled ({pickled[0]}), which can run code when read; only safetensors "
        "are loaded"
        if pickled
        else f"it has no weights ({WEIGHTS_NAME})",
    )


def weight_index(directory: Path, name: str = INDEX_NAME) -> dict[str, str]:
    """Return the file of each tensor by the checkpoint's index; {} if there is no index.

    Raises:
        Refusal: The index is broken, or names a file that is no safetensors file of the directory.
    """
    if not has_file(directory / name):
        return {}
    index = read_json(directory, name).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise Refusal(f"its {name} lists no weights")
    for tensor, file in index.items():
        if not isinstance(file, str) or not _is_file_of_weights(file):
            raise Refusal(f"its {name} names no safetensors file for {ascii(tensor)[:200]}")
        if Path(file).name != file:
            raise Refusal(f"its {name} points outside the model's directory")
    return index


def _is_file_of_weights(name: str) -> bool:
    return name.endswith(".safetensors") and name.isprintable() and len(os.fsencode(name)) <= 255


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from the model's directory.

    Raises:
        Refusal: The file is missing, unreadable, not JSON, or not an object.
    """
    parsed = parse_file(directory, name)
    if not isinstance(parsed, dict):
        raise Refusal(f"its {name} is not a JSON object")
    return parsed


def parse_file(directory: Path, name: str) -> Any:
    """Return the parsed content of a JSON file of the model's directory.

    Raises:
        Refusal: The file is missing, unreadable or not JSON.
    """
    if not has_file(directory / name):
        raise refusal_of_directory(directory, f"it has no {name}")
    try:
        return json.loads(read_text(directory / name))
    except (ValueError, RecursionError) as error:  # also too long numbers and too deep nesting
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Refusal(f"its {name} is not valid JSON{where}", detail=str(error)) from error
