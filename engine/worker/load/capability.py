"""Determines a model's capability from the files of its directory.

Rule: this file imports neither torch nor transformers and does not use the network, because the
pool needs the answer before it loads anything.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine.status import Capability
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import PIPELINE_INDEX, read_json, resolve_local
from engine.worker.load.vision_architectures import has_vision

if TYPE_CHECKING:
    from pathlib import Path

# transformers' model types that embed texts and images into one vector space.
IMAGE_TEXT_TYPES = ("clip", "siglip", "siglip2")
# Of these capabilities, a model may have another one than its files show, if the operator says so.
OPEN = (
    *(Capability.TEXT_TO_TEXT, Capability.TEXT_EMBEDDING, Capability.RERANK),
    *(Capability.SPARSE_EMBEDDING, Capability.TEXT_CLASSIFICATION),
)
# Capabilities by the end of the name of a model's class in transformers.
CLASSIFIERS = {
    "ForSequenceClassification": Capability.TEXT_CLASSIFICATION,
    "ForTokenClassification": Capability.TOKEN_CLASSIFICATION,
}
# Capabilities by the class of sentence-transformers that saved the model.
SAVED_BY = {
    "CrossEncoder": Capability.RERANK,
    "SparseEncoder": Capability.SPARSE_EMBEDDING,
    "MultiVectorEncoder": Capability.MULTI_VECTOR_EMBEDDING,
    "ColBERT": Capability.MULTI_VECTOR_EMBEDDING,  # PyLate's
}
# Capabilities by a module that only such models have.
OWN_MODULES = {
    "SpladePooling": Capability.SPARSE_EMBEDDING,
    "MultiVectorMask": Capability.MULTI_VECTOR_EMBEDDING,
}
# Files of BGE-M3's further heads, by the capability that they would give it.
PICKLED_HEADS: dict[Capability | None, str] = {
    Capability.SPARSE_EMBEDDING: "sparse_linear.pt",
    Capability.MULTI_VECTOR_EMBEDDING: "colbert_linear.pt",
}
STANFORD = "HF_ColBERT"  # the architecture of the first ColBERT models, whose files have no modules
MODULES_NAME = "modules.json"
OWN_CONFIG_NAME = "config_sentence_transformers.json"


def find(model: str, revision: str = "") -> Capability | None:
    """Return the capability of a model by directory, demo id or cached Hugging Face id, or None if
    its files are not on this machine."""
    source = resolve_local(model, revision)
    if source is None:
        return None
    return Capability.TEXT_TO_TEXT if source.gguf else capability_of(source.directory)


def capability_of(directory: Path) -> Capability:
    """Return the capability of the model in ``directory``: a pipeline of diffusers draws images, a
    classifier with one label reranks, `SAVED_BY` and `OWN_MODULES` name others, a CLIP or SigLIP
    model embeds images, any other sentence-transformers model embeds texts, `CLASSIFIERS` names
    others, a model with a vision part beside its text model reads images in chats, and any other
    model generates text or is refused when it is loaded."""
    if (directory / PIPELINE_INDEX).is_file():
        return Capability.TEXT_TO_IMAGE
    if (saved := _saved_as(directory)) is not None:
        inner = _read(first_folder(directory), "config.json")
        has_labels = saved is Capability.RERANK and _num_labels(inner) > 1
        return _classifies(inner) or saved if has_labels else saved
    if _is_cross_encoder(directory):
        return Capability.RERANK
    if _read(first_folder(directory), "config.json").get("model_type") in IMAGE_TEXT_TYPES:
        return Capability.IMAGE_EMBEDDING
    if (directory / MODULES_NAME).is_file():
        return Capability.TEXT_EMBEDDING
    if (classifies := _classifies(_read(directory, "config.json"))) is not None:
        return classifies
    if has_vision(_read(directory, "config.json")):
        return Capability.VISION
    return Capability.TEXT_TO_TEXT


def fitting(directory: Path, configured: Capability | None) -> Capability:
    """Return the capability of the model in ``directory``: ``configured``, the operator's setting,
    or, if that is None, the capability that the model's files show.

    Raises:
        Refusal: The files show that the model does not have the capability ``configured``.
    """
    own = capability_of(directory)
    if configured in (None, own):
        return own
    # Some files do not show whether a model embeds or ranks: `CrossEncoder` makes a reranker of a
    # classifier with any number of labels, and many embedding models are text models.
    if own is Capability.TEXT_EMBEDDING and (head := PICKLED_HEADS.get(configured)):
        _check_head(directory, head)
    is_open = configured in OPEN and own in OPEN
    if is_open and configured is Capability.RERANK:
        _check_can_rank(directory, own)
    if is_open and configured is Capability.SPARSE_EMBEDDING:
        _check_predicts_masked(directory, own)
    if is_open and configured is Capability.TEXT_CLASSIFICATION:
        _check_classifies(directory, own)
    if not is_open:
        raise Refusal(
            f"it is said to have the capability {configured.value}, and its files show "
            f"{own.value}; leave the setting out"
        )
    return configured


def _check_can_rank(directory: Path, own: Capability) -> None:
    """Check that a model that the operator calls a reranker has a module that computes a score.

    Raises:
        Refusal: The model has neither a classifier nor a LogitScore, or more labels than one.
    """
    config = _read(directory, "config.json")
    if _classifies(config) is not None and (number := _num_labels(config)) != 1:
        raise Refusal(
            f"it is said to have the capability rerank, and it has {number} labels in the place of "
            "one score; leave the setting out"
        )
    if not _is_classifier(config):
        raise Refusal(
            f"it is said to have the capability rerank, and its files show {own.value}, with "
            "neither a classifier nor a LogitScore; choose a checkpoint that CrossEncoder saved or "
            "that was converted to a classifier"
        )


def _check_head(directory: Path, head: str) -> None:
    """Check that what the operator says a model makes is not made by a pickled head of BGE-M3.

    Raises:
        Refusal: The model has the file.
    """
    if (directory / head).is_file():
        raise Refusal(
            f"its head {head} is a pickle, which is never read (BGE-M3's sparse and multi-vector "
            "heads); it is served for dense vectors: leave the capability out"
        )


def _check_classifies(directory: Path, own: Capability) -> None:
    """Check that a model that the operator calls a classifier is one.

    Raises:
        Refusal: It has none of transformers' classes of classifiers.
    """
    config = _read(first_folder(directory), "config.json")
    if _classifies(config) is not Capability.TEXT_CLASSIFICATION:
        raise Refusal(
            f"it is said to have the capability text-classification, and its files show "
            f"{own.value}; choose a checkpoint whose class ends with ForSequenceClassification"
        )


def _check_predicts_masked(directory: Path, own: Capability) -> None:
    """Check that a model that the operator says makes sparse vectors predicts masked tokens, as the
    older SPLADE models do, whose files have no modules.

    Raises:
        Refusal: It does not, or has modules, which say what it makes.
    """
    names = _read(directory, "config.json").get("architectures")
    predicts = isinstance(names, list) and bool(names) and str(names[0]).endswith("ForMaskedLM")
    if not predicts or (directory / MODULES_NAME).is_file():
        raise Refusal(
            f"it is said to have the capability sparse-embedding, and its files show {own.value}; "
            "choose a checkpoint that SparseEncoder saved or one that predicts masked tokens"
        )


def first_folder(directory: Path) -> Path:
    """Return the folder of a sentence-transformers model's first module, or else its directory."""
    try:
        modules = json.loads((directory / MODULES_NAME).read_text("utf-8"))
        name = modules[0].get("path") or "."
        folder = (directory / name).resolve()
        return folder if folder.is_relative_to(directory.resolve()) else directory
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return directory  # loading reports a broken list of modules


def _saved_as(directory: Path) -> Capability | None:
    """Return the capability that the files of sentence-transformers name; None: they do not."""
    saved = SAVED_BY.get(str(_read(directory, OWN_CONFIG_NAME).get("model_type")))
    if STANFORD in str(_read(directory, "config.json").get("architectures")):
        saved = Capability.MULTI_VECTOR_EMBEDDING
    try:
        modules = json.loads((directory / MODULES_NAME).read_text("utf-8"))
        names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    except (OSError, ValueError, TypeError, AttributeError):
        names = []  # loading reports a broken list of modules
    return saved or next((OWN_MODULES[name] for name in names if name in OWN_MODULES), None)


def _is_cross_encoder(directory: Path) -> bool:
    config = _read(directory, "config.json")
    return bool(config.get("architectures")) and _is_classifier(config) and _num_labels(config) == 1


def _is_classifier(config: dict[str, object]) -> bool:
    """Return whether a config names a classifier, or no class at all."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return True
    return str(names[0]).endswith("ForSequenceClassification")


def _classifies(config: dict[str, object]) -> Capability | None:
    """Return the capability of a classifier by the class that its config names; None: another."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return next((CLASSIFIERS[end] for end in CLASSIFIERS if name.endswith(end)), None)


def _num_labels(config: dict[str, object]) -> int:
    """Count the labels as transformers does: by their names, else by their number, else two."""
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    number = config.get("num_labels", 2)
    return number if isinstance(number, int) else 2


def _read(directory: Path, name: str) -> dict[str, object]:
    """Return a file's JSON object, or {} if it is missing or broken, which loading reports."""
    try:
        return read_json(directory, name)
    except (Refusal, OSError):
        return {}
