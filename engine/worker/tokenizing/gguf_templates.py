"""Writes the chat templates that are inside a GGUF file as a checkpoint has them, in files.

A file has one template under `KEY` and further ones, such as tool_use, under names behind it.
Source: llama.cpp's llama_model_chat_template, and gguf's writer, which allows letters, digits
and underscores in a name.
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
    named = {found[1]: metadata[key] for key in metadata if (found := NAMED.fullmatch(key))}
    templates = {"default": metadata.get(KEY), **named}
    for name, template in templates.items():
        if not isinstance(template, str) or not template:
            continue
        file = directory / "chat_template.jinja"
        if name != "default":
            file = directory / "additional_chat_templates" / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")
