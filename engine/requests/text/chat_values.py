"""A conversation as a request has it, for a model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import FieldViolation
from engine.requests.field_types import MAPPING, MESSAGES, NAME, SWITCH, TOOLS, convert_fields
from engine.requests.text.answers.reader import refuse_constant

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT_TYPES = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "template_args": MAPPING,
    "tool_choice": NAME,
    "add_generation_prompt": SWITCH,
}


# Most characters of a call's arguments. One call of Python's JSON parser reads them, in 10 ms,
# while every other thread waits. A guess: a file that a model wrote has fewer.
ARGUMENTS_CHARS_MAX = 262_144
# Most violations that are kept of a large chat; a guess: to send ten thousand takes the loop 17 ms.
VIOLATIONS_MAX = 64


class _Seen(NamedTuple):
    """The results of `Chat.look_through`."""

    violations: tuple[FieldViolation, ...]
    images: tuple[tuple[str, bytes], ...]
    num_bytes: int


class _Looked:
    """Keeps the results of `Chat.look_through` in no field, so that no copy by `replace` has
    them."""

    __slots__ = ("_kept",)
    _kept: _Seen

    @property
    def _seen(self) -> _Seen | None:
        return getattr(self, "_kept", None)


@dataclass(frozen=True, slots=True)
class Chat(_Looked):
    """A conversation for the model's own chat template.

    A message is a dict with role and content in transformers' (OpenAI's) form; an assistant's
    message may have tool_calls, whose arguments are an object or its JSON text, and a tool's
    message has tool_call_id. A content may be a list of parts: ``{"type": "text", "text": …}`` and
    ``{"type": "image", "image": bytes}``. ``tools`` have the same
    form: ``{"type": "function", "function": {…}}``. ``tool_choice`` is auto, none, required (at
    least one call), or the name of the one function that must be called.

    ``truncates``: if the chat leaves too little room for an answer, turns are left out
    (`engine.requests.text.truncation`), and `Started.dropped` lists their messages.

    ``continue_final_message``: the last message is the beginning of the answer, which the model
    goes on with. ``add_generation_prompt`` None means that the template opens the assistant's turn,
    unless the last message is continued.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    truncates: bool = False
    tool_choice: str = "auto"
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, CHAT_TYPES)

    def look_through(self) -> None:
        """Compute and keep what reads every message: the chat's first `VIOLATIONS_MAX` violations,
        its images and its size. To be called in the thread that made the chat; the messages must
        not change from then on."""
        violations = tuple(islice(self.violations(), VIOLATIONS_MAX))
        seen = _Seen(violations, tuple(self.images), self.num_bytes)
        object.__setattr__(self, "_kept", seen)

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the chat template gets."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def opens_turn(self) -> bool:
        """Whether the template writes the opening of the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def answer_begun(self) -> str:
        """The beginning of the answer, which the last message has; empty for a new answer."""
        if not self.continue_final_message or not self.messages:
            return ""
        content = self.messages[-1].get("content")
        return content if isinstance(content, str) else ""

    @property
    def images(self) -> Iterator[tuple[str, bytes]]:
        """The images of the chat's messages, each with its proto path."""
        if self._seen is not None:
            yield from self._seen.images
            return
        for index, message in enumerate(self.messages):
            for number, part in enumerate(_parts_of(message)):
                if isinstance(part.get("image"), bytes):
                    yield f"chat.messages[{index}].parts[{number}].image", part["image"]

    @property
    def num_bytes(self) -> int:
        """About how much memory the chat's messages and tools take."""
        if self._seen is not None:
            return self._seen.num_bytes
        total = len(str(self.tools)) if self.tools else 0
        for message in self.messages:
            parts = _parts_of(message)
            if parts:
                message = {**message, "content": [part.get("text") for part in parts]}
                total += sum([len(part.get("image") or b"") for part in parts])
            total += len(str(message))
        return total

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in ("auto", "none")

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        if self._seen is not None:
            yield from self._seen.violations
            return
        if not self.messages:
            yield FieldViolation("chat.messages", "is empty")
        for index, message in enumerate(self.messages):
            path = f"chat.messages[{index}]"
            if not message.get("role"):
                yield FieldViolation(f"{path}.role", "is empty")
            for number, part in enumerate(_parts_of(message)):
                if str(part.get("type", "")).startswith("image") and not isinstance(
                    part.get("image"), bytes
                ):
                    what = "needs the bytes of an image file as image; no URL is opened"
                    yield FieldViolation(f"{path}.parts[{number}]", what)
            for number, call in enumerate(message.get("tool_calls") or ()):
                function, call_path = function_of(call), f"{path}.tool_calls[{number}]"
                if not function.get("name"):
                    yield FieldViolation(f"{call_path}.name", "is empty")
                arguments = function.get("arguments", {})
                if isinstance(arguments, str) and len(arguments) > ARGUMENTS_CHARS_MAX:
                    what = f"has {len(arguments)} characters, of at most {ARGUMENTS_CHARS_MAX}"
                    yield FieldViolation(f"{call_path}.arguments_json", what)
                elif not _is_object(arguments):
                    yield FieldViolation(f"{call_path}.arguments_json", "is not a JSON object")
        names = [function_of(tool).get("name") for tool in self.tools]
        for number, name in enumerate(names):
            if not name:
                yield FieldViolation(f"chat.tools[{number}].name", "is empty")
        if self.must_call and self.tool_choice not in names + ["required"][: len(names)]:
            what = "must be auto, none, required or the name of one of the tools"
            yield FieldViolation("chat.tool_choice", f"is {self.tool_choice!r}, but {what}")
        if self.continue_final_message:
            yield from self._violations_of_final_message()

    def _violations_of_final_message(self) -> Iterator[FieldViolation]:
        path = "chat.continue_final_message"
        final = self.messages[-1] if self.messages else {}
        if self.messages and (final.get("role") != "assistant" or not self.answer_begun):
            yield FieldViolation(path, "needs a last message of the assistant, with content")
        elif final.get("tool_calls"):
            yield FieldViolation(path, "cannot go on with a message that has tool_calls")
        if self.add_generation_prompt:
            yield FieldViolation("chat.add_generation_prompt", f"cannot be true beside {path}")
        if self.must_call:
            what = f"cannot be {self.tool_choice!r} beside {path}"
            yield FieldViolation("chat.tool_choice", what)


def _parts_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content; none of a message whose content is one text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part if isinstance(part, Mapping) else {} for part in content]


def _is_object(arguments: object) -> bool:
    """Return whether a call's arguments are a JSON object, which may be written as text."""
    if isinstance(arguments, str):
        if not arguments.lstrip().startswith("{"):  # ten times as fast as json's error
            return False
        try:
            arguments = json.loads(arguments, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return False
    return isinstance(arguments, Mapping)


def function_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool or a call; as in transformers, ``entry`` may be the
    function."""
    function = entry.get("function", entry)
    return function if isinstance(function, Mapping) else {}
