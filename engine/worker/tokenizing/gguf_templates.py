"""Writes the chat templates inside a GGUF file into files, as in a checkpoint.

A GGUF file has one template under `KEY` and further templates, such as tool_use, under `KEY`, a dot
and their names. Source: llama.cpp's llama_model_chat_template, and gguf's writer, which allows
letters, digits and underscores in a name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEY = "tokenizer.chat_template"
NAMED = re.compile(re.escape(KEY) + r"\.([A-Za-z0-9_]+)")


def write_templates(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write chat_template.jinja and the files of named templates."""
    named = {match[1]: metadata[key] for key in metadata if (match := NAMED.fullmatch(key))}
    templates = {"default": metadata.get(KEY), **named}
    for name, template in templates.items():
        if not isinstance(template, str) or not template:
            continue
        file = directory / "chat_template.jinja"
        if name != "default":
            file = directory / "additional_chat_templates" / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")
