"""A tool, and the story model with a chat template that takes tools, in Hermes' format."""

import json
import shutil

from tests.support.server import DEMO

TEMPLATE = """{{- bos_token -}}
{%- if tools -%}
<|system|>{% for tool in tools %}{{ tool | tojson }} {% endfor %}<|end|>
{%- endif -%}
{%- for message in messages -%}
{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' -}}
{%- if message['content'] -%}{{- message['content'] | trim -}}{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "additionalProperties": False,
            "properties": {"word": {"maxLength": 8, "type": "string"}},
            "required": ["word"],
            "type": "object",
        },
    },
}


def make_tool_model(parent):
    """Return the directory of the model, which is made in ``parent``."""
    made = parent / "tools"
    shutil.copytree(DEMO, made)
    path = made / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return made
