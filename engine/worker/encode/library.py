"""Loads a model by sentence-transformers, and checks the library's result.

Rule: no code of a model's author is run, and no setting of its files is dropped silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.status import Capability
from engine.worker.encode.classifier import AUTO_CLASSES, load_classifier
from engine.worker.encode.files import check_all_loaded
from engine.worker.encode.input_template import InputTemplate
from engine.worker.import_lock import holds_import_lock
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Model types that need their checkpoint's code, and transformers' types of the same models.
OWN_FORMS = {"new": "gte", "xlm-roberta-flash": "jina_embeddings_v3"}
# The library's classes for models that are no SentenceTransformer.
CLASSES = {
    Capability.RERANK: "CrossEncoder",
    Capability.SPARSE_EMBEDDING: "SparseEncoder",
    Capability.MULTI_VECTOR_EMBEDDING: "MultiVectorEncoder",
}
# The keys of a model's processing_kwargs that change how the library tokenises texts.
TEXT_SETTINGS = {"common", "text"}


@holds_import_lock
def check_model_type(config: dict[str, Any]) -> None:
    """Check that transformers has a class for the model, because no code of a checkpoint is run.

    Raises:
        Refusal: transformers has none; the message names a form of the model that is served.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    name = str(config.get("model_type"))[:200]
    if name in CONFIG_MAPPING_NAMES:
        return
    form = f"is {OWN_FORMS[name]!r}" if name in OWN_FORMS else "transformers has"
    raise Refusal(
        f"its model type {name!r} is none of transformers' and needs the checkpoint's own code, "
        f"which is never run; choose a checkpoint whose model type {form}"
    )


@holds_import_lock
def load_model(
    directory: Path,
    folder: Path,
    capability: Capability,
    weights: dict[str, torch.Tensor] | None,
) -> Any:
    """Load a model by the library's class for a capability, on the CPU in float32, without the
    network, foreign code or pickled files. ``folder`` is the transformer's. ``weights``, if given,
    replace the transformer's: of a tensor in several files, transformers takes the last copy,
    whatever the index names.

    The library imports modules throughout the load, so the import lock is held for all of it. The
    load is short, 0.3 s for 0.7 GB, because `Checkpoint.check_finite` has read the weights."""
    import sentence_transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for all uses of transformers in this process
    if capability in AUTO_CLASSES:
        return load_classifier(folder, capability, weights)
    make = getattr(sentence_transformers, CLASSES.get(capability, "SentenceTransformer"))
    model = make(
        str(directory),
        device="cpu",
        trust_remote_code=False,
        local_files_only=True,
        model_kwargs={"dtype": torch.float32, "use_safetensors": True},
    )
    if weights is not None:
        inner = model[0].model
        model[0].model = type(inner).from_pretrained(
            None, config=inner.config, state_dict=weights, dtype=torch.float32
        )
    return model


@holds_import_lock
def check_weights(model: Any, stored: Iterable[str], unused: str) -> None:
    """Check as `check_all_loaded` does that the checkpoint has every parameter of a model of
    transformers. Some checkpoints (Nomic's, GTE's) have other names, or several parameters in one
    tensor; transformers' conversions say under which names a parameter is stored.

    Raises:
        Refusal: The checkpoint lacks a parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = [name for name, _ in model.named_parameters()]
    if getattr(model, "_weight_conversions", None):
        shapes = {name: parameter.to("meta") for name, parameter in model.named_parameters()}
        names = list(revert_weight_conversion(model, shapes))
    check_all_loaded(names, stored, unused)


def is_causal(transformer: Any) -> bool:
    """Return whether a model's scores are logits of its next token (Qwen3-Reranker), which
    LogitScore reads at an input's last token."""
    return getattr(transformer, "transformer_task", "") == "text-generation"


def _learnt_positions(module: Any) -> int | None:
    """Return the number of positions of a model like RoBERTa, whose positions count from the
    padding id + 1, so that its first position embeddings belong to no token. None for others."""
    for name, part in module.named_modules():
        padding = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return len(part.weight) - padding - 1
    return None


def max_tokens_of(model: Any, operator_limit: int | None, own: int | None = None) -> int:
    """Return the most tokens of an input: the least of the tokenizer's limit or, if it is not None,
    the model's ``own`` limit for such texts, the model's positions, and the operator's setting.

    Raises:
        Refusal: No limit is known.
    """
    module = model[0].model
    config = getattr(module.config, "text_config", module.config)
    limits = [own or model.max_seq_length, getattr(config, "max_position_embeddings", None)]
    limits += [operator_limit, _learnt_positions(module)]
    known = [int(limit) for limit in limits if limit]
    if not known or min(known) > 10**6:
        raise Refusal("neither its tokenizer nor its config limits the length of an input")
    return min(known)


def padding_of(model: Any, *, is_classifier: bool) -> int:
    """Return the id of the padding token. That of a classifier of whole inputs is its config's,
    because a classifier converted from a decoder (Qwen3-Reranker) finds the end of a text by it.

    Raises:
        Refusal: The config of a classifier names no padding token.
    """
    transformer = model[0]
    config = transformer.model.config
    if not is_classifier or is_causal(transformer):
        return int(model.tokenizer.pad_token_id or 0)
    if config.pad_token_id is None:
        raise Refusal(
            "its config.json has no pad_token_id, by which a classifier finds the end of a text; "
            "add its tokenizer's"
        )
    return int(config.pad_token_id)


def input_template(transformer: Any, prompt: str, *, is_rerank: bool) -> InputTemplate | None:
    """Return the chat template by which a model reads its inputs; None if it reads plain texts. The
    library renders every text by the template if a model can read messages.

    Raises:
        Refusal: The model reads messages and has not exactly one chat template, or one without a
            place for its inputs, or one that treats queries and documents in different ways, or it
            expands queries; or its files change how texts are read.
    """
    settings = dict(transformer.processing_kwargs)
    if unsupported := sorted(TEXT_SETTINGS & settings.keys()):
        raise Refusal(
            f"its sentence_bert_config.json sets processing_kwargs.{unsupported[0]}, which changes "
            "how texts are read and is not supported; choose a checkpoint without that setting"
        )
    if "message" not in transformer.modality_config:
        return None
    tokenizer = transformer.tokenizer
    if not isinstance(tokenizer.chat_template, str):
        raise Refusal(
            "it reads its inputs as chat messages, and its tokenizer does not have exactly one "
            "chat template; choose a checkpoint with one in chat_template.jinja"
        )
    if transformer._chat_template_declares_task():
        raise Refusal(
            "its chat template has the variable 'task', by which it renders queries and documents "
            "in different ways, and that is not supported; choose a checkpoint without it"
        )
    if transformer.query_expansion is not None:
        raise Refusal(
            "it expands queries and reads them by a chat template, which the library refuses, too"
        )
    return InputTemplate(
        tokenizer.chat_template,
        has_pairs=is_rerank,
        special_tokens=tokenizer.special_tokens_map,
        settings=settings.get("chat_template", {}),
        in_parts=transformer.input_formatter.message_format == "structured",
        prompt=prompt,
    )
