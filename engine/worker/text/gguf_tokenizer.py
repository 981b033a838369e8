"""Writes the tokenizer and the chat template that are inside a GGUF file as a checkpoint has them.

transformers builds the tokenizer. A file says whether a text begins with a token and ends with one;
here that becomes the tokenizer's post-processor, which is what `engine.worker.text.tokenizer` uses.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import processors

from engine.errors import SpawnFailed

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def write_tokenizer(path: Path, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the GGUF file ``path``.

    Raises:
        SpawnFailed: the file has no tokenizer, or one that transformers does not build.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, stored, settings = get_gguf_tokenizer(str(path))
        backend, _ = convert_gguf_tokenizer(architecture, stored)
    except Exception as error:  # a file without the fields, or with an unknown kind
        raise SpawnFailed(
            f"{path.name} has no tokenizer that transformers builds",
            log_detail=f"{type(error).__name__}: {error}",
        ) from error
    special = {name: settings[name] for name in NAMES if settings.get(name)}
    _add_ends(backend, settings, special)
    backend.save(str(directory / "tokenizer.json"))
    content: dict[str, Any] = dict(special)
    if settings.get("chat_template"):
        content["chat_template"] = settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


def _add_ends(backend: Tokenizer, settings: dict[str, Any], special: dict[str, str]) -> None:
    """Make the tokenizer add the tokens that the file asks for before and behind a text."""
    first = special.get("bos_token") if settings.get("add_bos_token") else None
    last = special.get("eos_token") if settings.get("add_eos_token") else None
    around = [token for token in (first, last) if token]
    if not around:
        return
    before, behind = [first] if first else [], [last] if last else []
    processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[*before, "$A", *behind, *before, "$B:1", *behind],
        special_tokens=[(token, backend.token_to_id(token)) for token in around],
    )
    byte_level = backend.post_processor
    backend.post_processor = (
        processor if byte_level is None else processors.Sequence([byte_level, processor])
    )
