"""Loads a classifier by transformers' own class, in the form of a model of sentence-transformers.

Rule: a text is read as transformers' pipelines do: without a prompt or a chat template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.status import Capability
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from pathlib import Path

# transformers' automatic classes by the capability.
AUTO_CLASSES = {
    Capability.TEXT_CLASSIFICATION: "AutoModelForSequenceClassification",
    Capability.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
}
FORWARDED = ("input_ids", "attention_mask", "token_type_ids")
# The most bytes of a model's labels, each with 16 for its score: a message has all of them.
LABEL_BYTES_MAX = 2**20
ONE_SCORE = "LABEL_0"  # transformers' name of a label that has none


class Logits(torch.nn.Module):
    """The module of a `Classifier`: ``model`` is transformers'."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.modality_config: dict[str, Any] = {"text": {}}

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features and ``logits``: [inputs, labels] or [inputs, tokens, labels]."""
        given = {name: features[name] for name in FORWARDED if name in features}
        return features | {"logits": self.model(**given).logits}


class Classifier(torch.nn.Sequential):
    """A classifier with the attributes of sentence-transformers' models that runners use."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(Logits(model, tokenizer))
        self.tokenizer = tokenizer
        self.max_seq_length = tokenizer.model_max_length
        self.prompts: dict[str, str] = {}
        self.default_prompt_name = None


def load_classifier(
    folder: Path, capability: Capability, weights: dict[str, torch.Tensor] | None
) -> Classifier:
    """Load a classifier on the CPU in float32, without the network, foreign code or pickled files.
    ``weights``, if given, replace the files'. The caller holds the import lock.

    Raises:
        Refusal: The model has no labels.
    """
    import transformers

    made = getattr(transformers, AUTO_CLASSES[capability])
    own = {"trust_remote_code": False, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(str(folder), **own)
    if not config.num_labels:
        raise Refusal("its config.json has no labels (id2label)")
    config.use_cache = False  # of a decoder: no token is generated
    kind = {"config": config, "dtype": torch.float32, "use_safetensors": True}
    model = made.from_pretrained(str(folder), **kind, **own)
    if weights is not None:
        model = type(model).from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **own)
    return Classifier(model, tokenizer)


def labels_of(config: Any, number: int) -> tuple[str, ...]:
    """Return the names of a model's ``number`` labels.

    Raises:
        Refusal: The config lacks a name, or one is not Unicode, or they take too many bytes.
    """
    names: dict[Any, Any] = getattr(config, "id2label", None) or {}
    if missing := [label for label in range(number) if label not in names]:
        raise Refusal(f"its config.json has no name of the label {missing[0]} in id2label")
    labels = tuple(str(names[label]) for label in range(number))
    try:
        size = sum(len(label.encode()) + 16 for label in labels)
    except UnicodeEncodeError:
        raise Refusal("a label in its config.json (id2label) is not valid Unicode") from None
    if size > LABEL_BYTES_MAX:
        raise Refusal(
            f"its {number} labels take {size} bytes, of at most {LABEL_BYTES_MAX}; a message has "
            "all of them"
        )
    return labels


def activation_of(config: Any) -> str:
    """Return the activation of a sequence classifier, as transformers' pipeline chooses it.

    Source: transformers, pipelines/text_classification.py.
    """
    problem, number = getattr(config, "problem_type", None), config.num_labels
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or number == 1 else "softmax"
