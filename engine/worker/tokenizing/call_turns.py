"""Finds the form in which a chat template reads a turn with tool calls.

OpenAI's form has no content in such a turn, and the arguments as JSON text; that of transformers
has the arguments as an object. A template may need one of these forms: it writes the calls only
where the content is None, fails on a missing content, joins the arguments with text, or writes an
object in Python's notation. So each template is tried once with a short chat, and then gets the
first form of `FORMS` in which it writes the call, or else the first form in which it writes
anything. Source: llama.cpp tries templates in the same way; transformers 5.23 drops a content that
is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from engine.errors import TrioletError
from engine.worker.tokenizing.templates import render

VALUE = "value_of_call"  # found in a rendered chat only if the template wrote the arguments
ARGUMENTS = {"key_of_call": VALUE}
PARAMETERS = {"type": "object", "properties": {}}
# The test chats come with a tool, because some templates fail without one.
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": PARAMETERS}}
]
FORMS_MAX = 128  # as many templates as stay compiled


class CallForm(NamedTuple):
    """The form of a turn with calls for a template: the ``content`` field if the turn has no text
    (perhaps no field), and whether the calls' arguments are JSON text."""

    content: Mapping[str, object] = {}
    has_json_text: bool = False


# The first form is that of transformers 5.23.
FORMS = [
    CallForm(content, has_json_text)
    for has_json_text in (False, True)
    for content in ({}, {"content": ""}, {"content": None})
]


def in_form(message: Mapping[str, object], form: CallForm) -> dict[str, object]:
    """Return a message in the form that a template reads. Fields that are None are dropped, as in
    transformers."""
    turn = {key: value for key, value in message.items() if value is not None}
    calls = turn.get("tool_calls")
    if not isinstance(calls, list | tuple) or not calls:
        return turn
    if not turn.get("content"):
        turn.pop("content", None)
        turn |= form.content
    return turn | {"tool_calls": [_call_in_form(call, form.has_json_text) for call in calls]}


def _call_in_form(call: Any, has_json_text: bool) -> Any:
    """Return a call with its arguments as JSON text or as an object. ``call`` may be the call's
    "function" alone."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_in_form(call["function"], has_json_text)}
    arguments = call.get("arguments")
    if has_json_text and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not has_json_text and isinstance(arguments, str):
        return {**call, "arguments": json.loads(arguments)}
    return call


@lru_cache(maxsize=FORMS_MAX)
def form_of(template: str, special_tokens: tuple[tuple[str, str], ...]) -> CallForm:
    """Return the form in which a template writes a turn's calls. Call it in a worker thread."""
    special: dict[str, object] = dict(special_tokens)
    silent = _written(template, special, {"role": "assistant", "content": ""}) or ""
    return max(FORMS, key=lambda form: _success(template, special, form, silent))


def _success(template: str, special_tokens: dict[str, object], form: CallForm, silent: str) -> int:
    """Return how well a template writes a turn with a call in this form: 3 if it writes the call; 2
    if it writes another text than ``silent``, the text of a turn without content and calls; 1 if it
    writes ``silent``, the word None or null, or arguments in a wrong notation; 0 if it fails."""
    function = {"name": "f", "arguments": ARGUMENTS}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    turn = in_form({"role": "assistant", "tool_calls": [call]}, form)
    text = _written(template, special_tokens, turn)
    if text is None:
        return 0
    # Wrong notations: arguments in Python's notation, or as a JSON text inside a JSON text.
    wrong = (str(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS))[1:-1])
    says_none = any(text.count(word) > silent.count(word) for word in ("None", "null"))
    if says_none or any(word in text for word in wrong):
        return 1
    return 3 if VALUE in text else 1 + (text != silent)


def _written(
    template: str, special_tokens: dict[str, object], turn: dict[str, object]
) -> str | None:
    """Return a chat that ends with ``turn``, rendered by a template; None if it fails."""
    message: dict[str, object] = {"role": "user", "content": "q"}
    try:
        return render(template, [message, turn], TOOLS, special_tokens, add_generation_prompt=False)
    except TrioletError:
        return None
