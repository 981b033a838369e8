"""What a model is for, from its directory's files alone.

Rule: imports neither torch nor transformers, and asks no network: the pool asks before anything is
loaded (R124).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.refusal import Refusal
from engine.model.resolve import read_json, resolve_local
from engine.status import Capability

if TYPE_CHECKING:
    from pathlib import Path

MODULES_NAME = "modules.json"
OWN_CONFIG_NAME = "config_sentence_transformers.json"


def find(model: str, revision: str = "") -> Capability | None:
    """The capability of a model by directory, demo id or cached Hugging Face id; None: its files
    are not on this machine."""
    source = resolve_local(model, revision)
    return None if source is None else capability_of(source.directory)


def capability_of(directory: Path) -> Capability:
    """A classifier with one label reranks, modules of sentence-transformers embed, and everything
    else generates text (or is refused when it loads)."""
    if _is_cross_encoder(directory):
        return Capability.RERANK
    if (directory / MODULES_NAME).is_file():
        return Capability.TEXT_EMBEDDING
    return Capability.TEXT_TO_TEXT


def _is_cross_encoder(directory: Path) -> bool:
    if _read(directory, OWN_CONFIG_NAME).get("model_type") == "CrossEncoder":
        return True
    config = _read(directory, "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return False
    is_classifier = str(names[0]).endswith("ForSequenceClassification")
    return is_classifier and _num_labels(config) == 1


def _num_labels(config: dict[str, object]) -> int:
    """As transformers counts them: by name, else by number, else two."""
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    number = config.get("num_labels", 2)
    return number if isinstance(number, int) else 2


def _read(directory: Path, name: str) -> dict[str, object]:
    """A file's JSON object; {} for one that is missing or broken, which loading will tell of."""
    try:
        return read_json(directory, name)
    except (Refusal, OSError):
        return {}
