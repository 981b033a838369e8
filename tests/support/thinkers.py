"""Models that reason: the shipped story model with other templates. Stories are its thoughts."""

import json
import shutil

from engine.worker.load.resolve import resolve

THINKS = "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}{%- endif -%}"
SWITCHED = (
    "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '\\n</think>\\n\\n' -}}"
    "{%- endif -%}{%- endif -%}"
)
MARKERS = {"<|pad|>": "</think>", "<|system|>": "<think>"}
CHANNELS = {
    "<|pad|>": "<|channel|>",
    "<|system|>": "<|start|>",
    "<|user|>": "<|message|>",
    "<|assistant|>": "<|call|>",
}
# What stands in the place of the model's own special tokens, and behind its template.
KINDS = {
    "text": ({}, THINKS),
    "tokens": (MARKERS, SWITCHED),
    "tokens, not opened": (MARKERS, "{#</think>#}"),
    "channels": (CHANNELS, "{{- '<|start|>assistant<|channel|>analysis<|message|>' -}}"),
}


def make_thinker(folder, kind):
    """Return a model of a kind in a new folder inside ``folder``. In "tokens" the markers are
    tokens of their own, and the template has a switch; in "text" the markers are made of several
    tokens; in "channels" the answer is messages in channels."""
    renamed, behind = KINDS[kind]
    made = folder / kind.split(",")[0]
    shutil.copytree(resolve("demo-stories").directory, made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (made / name).read_text()
        for own, marker in renamed.items():
            text = text.replace(own, marker)
        (made / name).write_text(text)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config["chat_template"] += behind
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    own = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps(own | {"eos_token_id": [1]}))
    return made
