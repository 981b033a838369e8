"""Checks an encoder's files before sentence-transformers reads them.

Rule 1: sentence-transformers imports any class that a model's files name, and reads pickled weights
if there are no safetensors. So only the modules in `MODULES`, activations of torch.nn and
safetensors are accepted. Rule 2: no weight is ever initialised at random or replaced silently.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from engine.status import Capability
from engine.worker.load.capability import IMAGE_TEXT_TYPES, MODULES_NAME, OWN_CONFIG_NAME
from engine.worker.load.reading import check_readable, has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import (
    INDEX_NAME,
    WEIGHTS_NAME,
    parse_file,
    read_json,
    weight_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MODULES = {
    Capability.TEXT_EMBEDDING: {"Transformer", "Pooling", "Dense", "LayerNorm", "Normalize"},
    Capability.IMAGE_EMBEDDING: {"Transformer", "CLIPModel", "Dense", "LayerNorm", "Normalize"},
    Capability.RERANK: {"Transformer", "LogitScore"},
    Capability.TEXT_CLASSIFICATION: {"Transformer"},
    Capability.TOKEN_CLASSIFICATION: {"Transformer"},
    Capability.SPARSE_EMBEDDING: {"Transformer", "MLMTransformer", "SpladePooling"},
    Capability.MULTI_VECTOR_EMBEDDING: {
        *("Transformer", "Dense", "LayerNorm", "Normalize"),
        *("MultiVectorMask", "HierarchicalTokenPooling"),
    },
}
# Types of modules of other libraries that sentence-transformers has a class of its own for.
ALIASES = {(Capability.MULTI_VECTOR_EMBEDDING, "pylate.models.Dense.Dense"): "Dense"}
# Modules that no model is complete without, if its files list modules.
NEEDED = {
    Capability.TEXT_EMBEDDING: "Pooling",
    Capability.SPARSE_EMBEDDING: "SpladePooling",
}
# Modules that are not served, and what messages call their output.
OTHER_OUTPUTS = {
    **dict.fromkeys(("SparseAutoEncoder", "SparseStaticEmbedding"), "sparse vectors"),
    "LambdaTokenPooling": "a vector for each token",
}
PROJECTION = "linear.weight"  # in the first ColBERT models, whose files have no modules
FIRST = {"Transformer", "CLIPModel", "MLMTransformer"}
WITH_WEIGHTS = FIRST | {"Dense", "LayerNorm"}
SETTINGS_NAME = "sentence_bert_config.json"
PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json")
MODULE_TYPE = re.compile(r"sentence_transformers(\.\w+)*\.(?P<name>\w+)")
ACTIVATION = re.compile(r"torch\.nn\.(modules\.\w+\.)?\w+")
# The suffixes of a layer norm's weights in old checkpoints, and transformers' suffixes.
OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))


def check(directory: Path, capability: Capability) -> Path:
    """Check the files and return the directory of the transformer module.

    Raises:
        Refusal: A file is missing or broken, or names something that is not accepted (Rule 1).
    """
    modules = _modules(directory)
    names = [_name_of(module, capability) for module in modules]
    if names and [name in FIRST for name in names] != [True] + [False] * (len(names) - 1):
        raise Refusal(f"its {MODULES_NAME} does not begin with its one Transformer")
    needed = NEEDED.get(capability) if names or capability is Capability.TEXT_EMBEDDING else None
    if needed is not None and needed not in names:
        raise Refusal(f"its {MODULES_NAME} has no {needed}")
    folders = [_folder_of(directory, module) for module in modules] or [directory]
    without = "Dense" if capability is Capability.MULTI_VECTOR_EMBEDDING else "Transformer"
    for name, folder in zip(names or [without], folders, strict=True):
        if name in WITH_WEIGHTS:
            _check_weights(folder, name)
        if name == "Dense":
            _check_activation(read_json(folder, "config.json").get("activation_function"))
    _check_task(folders[0])
    if has_file(folders[0] / "adapter_config.json"):
        raise Refusal("it is an adapter, and adapters are not supported")
    config = read_json(folders[0], "config.json")
    if config.get("transformers_weights") is not None:
        raise Refusal(
            "its config.json names a file of weights (transformers_weights) in the place of "
            f"{WEIGHTS_NAME}, which is not supported; remove the field"
        )
    if capability is Capability.IMAGE_EMBEDDING:
        _check_image_model(config, folders[0])
    own = read_json(directory, OWN_CONFIG_NAME) if has_file(directory / OWN_CONFIG_NAME) else {}
    _check_activation(own.get("activation_fn"))
    _check_activation(config.get("sbert_ce_default_activation_function"))
    inner = config.get("sentence_transformers")
    _check_activation(inner.get("activation_fn") if isinstance(inner, dict) else None)
    return folders[0]


def _check_task(folder: Path) -> None:
    """Check that a model is not one of transformers' ForRetrieval classes, whose processors write
    queries and documents in their own ways."""
    settings = read_json(folder, SETTINGS_NAME) if has_file(folder / SETTINGS_NAME) else {}
    if settings.get("transformer_task") == "retrieval":
        raise Refusal(
            f"its {SETTINGS_NAME} has the transformer_task 'retrieval' (ColPali and its kin), "
            "which is not served; choose a checkpoint of BERT's kind"
        )


def _check_weights(folder: Path, module: str) -> None:
    """Check that a module's files of weights can be read, also by the library that loads it:
    transformers needs the index's field "metadata", and sentence-transformers reads no index."""
    files = weight_files(folder)
    if module not in FIRST and not has_file(folder / WEIGHTS_NAME):
        raise Refusal(f"its {folder.name} has no {WEIGHTS_NAME}")
    for file in files:
        check_readable(folder / file)
    has_index = module in FIRST and has_file(folder / INDEX_NAME)
    if has_index and not isinstance(read_json(folder, INDEX_NAME).get("metadata"), dict):
        raise Refusal(
            f'its {INDEX_NAME} has no "metadata", without which transformers does not read it; '
            'add "metadata": {} to it'
        )


def check_projection(directory: Path, capability: Capability, stored: Iterable[str]) -> None:
    """Check that a checkpoint has the projection of its vectors to a few dimensions, if no module
    has it; the library would make one at random.

    Raises:
        Refusal: The checkpoint lacks it.
    """
    makes_several = capability is Capability.MULTI_VECTOR_EMBEDDING
    if makes_several and not has_file(directory / MODULES_NAME) and PROJECTION not in stored:
        raise Refusal(f"its checkpoint lacks the tensor {PROJECTION}")


def _check_image_model(config: dict[str, Any], folder: Path) -> None:
    model_type = str(config.get("model_type"))[:200]
    if model_type not in IMAGE_TEXT_TYPES:
        raise Refusal(
            f"its model type is {model_type!r}, and models that embed images are one of "
            f"{', '.join(IMAGE_TEXT_TYPES)}"
        )
    if not any(has_file(folder / name) for name in PROCESSOR_NAMES):
        raise Refusal(f"it has no image processor ({' or '.join(PROCESSOR_NAMES)})")


def _modules(directory: Path) -> list[dict[str, Any]]:
    if not has_file(directory / MODULES_NAME):
        return []
    modules = parse_file(directory, MODULES_NAME)
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not modules:
        raise Refusal(f"its {MODULES_NAME} is not a list of modules")
    return modules


def _name_of(module: dict[str, Any], capability: Capability) -> str:
    kind, allowed = str(module.get("type")), MODULES[capability]
    if (capability, kind) in ALIASES:
        return ALIASES[capability, kind]
    match = MODULE_TYPE.fullmatch(kind)
    if match is not None and match["name"] in OTHER_OUTPUTS:
        raise Refusal(
            f"its module {match['name']}, which makes {OTHER_OUTPUTS[match['name']]}, is not "
            "served; choose a model whose modules end with a Pooling or a SpladePooling"
        )
    if match is None or match["name"] not in allowed:
        raise Refusal(
            f"its {MODULES_NAME} names a module of type {kind[:200]!r}, which is not one of "
            f"{', '.join(sorted(allowed))}"
        )
    return match["name"]


def _folder_of(directory: Path, module: dict[str, Any]) -> Path:
    path = PurePosixPath(str(module.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise Refusal(f"its {MODULES_NAME} points outside the model's directory")
    return directory / path


def _check_activation(name: object) -> None:
    if name is not None and not (isinstance(name, str) and ACTIVATION.fullmatch(name)):
        raise Refusal(f"its activation {str(name)[:200]!r} is not one of torch.nn")


def check_all_loaded(parameters: Iterable[str], stored: Iterable[str], unused: str) -> None:
    """Check that the checkpoint has every parameter; transformers would fill others at random.

    Names may differ by a base model's prefix. Parameters whose name contains ``unused`` may be
    missing.

    Raises:
        Refusal: The checkpoint lacks a parameter.
    """
    known: set[str] = set()
    for name in map(_current_name, stored):
        parts = name.split(".")
        known.update(".".join(parts[start:]) for start in range(min(3, len(parts))))
    missing = [
        name
        for name in map(_current_name, parameters)
        if not (unused and unused in name)
        and not any(end in known for end in (name, *_ends_of(name)))
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Refusal(f"its checkpoint lacks the tensor {missing[0]}{more}")


def _current_name(name: str) -> str:
    for old, new in OLD_NAMES:
        name = name.replace(old, new)
    return name


def _ends_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[1:])] if len(parts) > 2 else []
