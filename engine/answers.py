"""A chat model's answer told apart: reasoning, text and tool calls, as they stream.

Rule 1: pure and linear: a character is looked at once, or twice where it began like a marker, so
that this can run on the engine's thread whatever a model writes. Rule 2: what comes out does not
depend on how the text was cut. Rule 3: nothing is lost: what begins like a tool call and is none
comes out as text, its marker too. Only whitespace around reasoning, before a call, and after the
last one belongs to the format.

A call comes out whole, once its JSON is complete and right: arguments that were sent piece by piece
could not be taken back when the rest of them turns out to be no JSON.

The formats, found by what the model's chat template says (`detect_format`):

    HERMES     <tool_call>{"name": …, "arguments": {…}}</tool_call>     Hermes, Qwen 2.5 and 3
    LLAMA      {"name": …, "parameters": {…}} as the answer's beginning, Llama 3.1 to 3.3
               or after <|python_tag|>; further ones after ";"
    MISTRAL    [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or         Mistral
               [TOOL_CALLS]name[ARGS]{…}
    reasoning  <think>…</think> as the answer's beginning; the template may have opened it

Why not a library: transformers' ResponseParser (5.23) raises where a call is not JSON, and what it
took of the text is gone; it ends a call at a marker inside a JSON string; and it needs a marker
before a call, which Llama's lack. vLLM's and SGLang's parsers come with their engines.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

    Reading = Generator[None, str, None]
    Trying = Generator[None, str, bool]

DEPTH_MAX = 64  # guess: deeper than any schema, and far from what Python's decoder cannot take
NAME_CHARS_MAX = 256  # guess: OpenAI allows 64

THINK, END_THINK = "<think>", "</think>"
HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
END = ""  # what is read after the last character

_SPACE = frozenset(" \t\r\n")
# What JSON has outside of strings, quotes and brackets aside.
_BARE = frozenset(":,0123456789+-.eE" + "truefalsn") | _SPACE
_WORD = frozenset("_-.")
_DECODER = json.JSONDecoder()


class ToolFormat(Enum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


_OPENINGS = {
    ToolFormat.HERMES: HERMES_OPEN,
    ToolFormat.LLAMA: PYTHON_TAG,
    ToolFormat.MISTRAL: MISTRAL_OPEN,
}
_MARKERS = {
    ToolFormat.HERMES: (HERMES_OPEN, HERMES_CLOSE),
    ToolFormat.LLAMA: (PYTHON_TAG,),
    ToolFormat.MISTRAL: (MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGS),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What to look for in an answer. ``begins_inside``: the prompt has opened the reasoning."""

    tools: ToolFormat | None = None
    reasons: bool = False
    begins_inside: bool = False

    @property
    def is_plain(self) -> bool:
        """There is nothing to tell apart."""
        return self.tools is None and not self.reasons

    @property
    def markers(self) -> tuple[str, ...]:
        """What to look for. A model may have some as special tokens, which must then be shown."""
        of_tools = () if self.tools is None else _MARKERS[self.tools]
        return of_tools + ((THINK, END_THINK) if self.reasons else ())


PLAIN = AnswerFormat()


class ToolCall(NamedTuple):
    """A call that the model asks for. ``arguments_json`` is a JSON object, as the model wrote it;
    ``call_id`` is the model's own, or empty."""

    name: str
    arguments_json: str
    call_id: str = ""


class Parts(NamedTuple):
    """What an answer grew by."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def detect_format(
    template: str, *, has_tools: bool, prompt: str, constraint: str | None = None
) -> AnswerFormat:
    """How a model with this chat template answers.

    Calls are looked for only where the request offers tools. ``prompt`` is what the template wrote
    for it: if that ends with the opening of the reasoning, the answer begins inside. ``constraint``
    is the source of the form the answer has: that is its text then, whole, unless the source itself
    spells the end of a reasoning.
    """
    if constraint is not None:
        has_tools = False
        if END_THINK not in constraint:
            return PLAIN
    reasons = END_THINK in template
    return AnswerFormat(
        tools=_tool_format(template) if has_tools else None,
        reasons=reasons,
        begins_inside=reasons and prompt.rstrip().endswith(THINK),
    )


def _tool_format(template: str) -> ToolFormat | None:
    if MISTRAL_OPEN in template:
        return ToolFormat.MISTRAL
    if HERMES_OPEN in template:
        return ToolFormat.HERMES
    if PYTHON_TAG in template or '"parameters": dictionary of argument' in template:
        return ToolFormat.LLAMA
    return None


class AnswerParser:
    """Tells one answer apart: `feed` it the text in pieces of any size, `close` it at the end.

    It reads as a generator that is sent one character at a time; ``_next`` is the one not used
    yet. What it has read and not given out is held back: it may still become a marker or a call.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._opening = "" if form.tools is None else _OPENINGS[form.tools]
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._is_after_call = False  # and only whitespace since
        self._next = END
        self._again: list[str] = []  # read before, to be read once more: a stack
        self._reader = self._read_answer()
        next(self._reader)

    def feed(self, piece: str) -> Parts:
        """What is certain after this piece."""
        send = self._reader.send
        for character in piece:
            send(character)
        return self._take()

    def close(self) -> Parts:
        """The rest: no more text comes. Once."""
        with suppress(StopIteration):
            self._reader.send(END)
        return self._take()

    def _take(self) -> Parts:
        parts = Parts("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        self._text, self._reasoning, self._calls = [], [], []
        return parts

    def _say(self, *texts: str) -> None:
        self._text += texts
        self._is_after_call = False

    # ---- reading

    def _advance(self) -> Reading:
        """The next character, or `END`."""
        self._next = self._again.pop() if self._again else (yield)

    def _skip_space(self) -> Generator[None, str, str]:
        """Use up whitespace; what it was."""
        space = []
        while self._next in _SPACE:
            space.append(self._next)
            yield from self._advance()
        return "".join(space)

    def _try_marker(self, marker: str) -> Trying:
        """Use up a marker if it comes next; else nothing."""
        for index, wanted in enumerate(marker):
            if self._next != wanted:
                self._unread(marker[:index])
                return False
            yield from self._advance()
        return True

    def _unread(self, text: str) -> None:
        """Have ``text``, which was read last, read again."""
        if text:
            self._again += [self._next, *reversed(text[1:])]
            self._next = text[0]

    # ---- the answer

    def _read_answer(self) -> Reading:
        yield from self._advance()
        space = ""
        if self._form.begins_inside:
            yield from self._read_reasoning()
        else:
            space = yield from self._skip_space()
            if self._form.reasons and (yield from self._try_marker(THINK)):
                space = ""
                yield from self._read_reasoning()
        if self._form.tools is ToolFormat.LLAMA and self._next == "{":
            yield from self._read_llama(space)
        else:
            self._say(space)
        yield from self._read_text()

    def _read_reasoning(self) -> Reading:
        """To its closing marker, with the whitespace after that; or to the answer's end."""
        yield from self._skip_space()
        while self._next:
            space = yield from self._skip_space()
            if self._next == "<" and (yield from self._try_marker(END_THINK)):
                yield from self._skip_space()
                return
            self._reasoning.append(space + self._next)
            if self._next:
                yield from self._advance()

    def _read_text(self) -> Reading:
        """To the answer's end, with the calls in it."""
        opening = self._opening
        while self._next:
            space = (yield from self._skip_space()) if opening else ""
            if opening and self._next == opening[0] and (yield from self._try_marker(opening)):
                yield from self._read_calls(space + opening)
                continue
            if self._next or not self._is_after_call:
                self._say(space + self._next)
            if self._next:
                yield from self._advance()

    def _read_calls(self, raw: str) -> Reading:
        """What follows an opening marker; ``raw`` is text if it turns out to be no call."""
        if self._form.tools is ToolFormat.HERMES:
            yield from self._read_hermes(raw)
        elif self._form.tools is ToolFormat.LLAMA:
            yield from self._read_llama(raw)
        else:
            yield from self._read_mistral(raw)

    def _read_hermes(self, raw: str) -> Reading:
        raw += yield from self._skip_space()
        if (yield from self._try_call(raw)):
            space = yield from self._skip_space()
            if not (yield from self._try_marker(HERMES_CLOSE)):
                self._unread(space)

    def _read_llama(self, raw: str) -> Reading:
        raw += yield from self._skip_space()
        while (yield from self._try_call(raw)):
            space = yield from self._skip_space()
            if self._next not in ("{", ";"):
                self._unread(space)
                return
            raw = ""
            if self._next == ";":
                yield from self._advance()
                raw = ";" + (yield from self._skip_space())

    def _read_mistral(self, raw: str) -> Reading:
        raw += yield from self._skip_space()
        if self._next == "[":
            yield from self._advance()
            yield from self._read_list(raw + "[")
        else:
            yield from self._read_named(raw)

    def _read_list(self, raw: str) -> Reading:
        while True:
            raw += yield from self._skip_space()
            if not (yield from self._try_call(raw)):
                return
            space = yield from self._skip_space()
            if self._next == ",":
                raw = ","
                yield from self._advance()
                continue
            if self._next == "]":
                yield from self._advance()
            else:
                self._unread(space)
            return

    def _read_named(self, raw: str) -> Reading:
        """``name[CALL_ID]id[ARGS]{…}``, where all but name and object may be missing."""
        name = yield from self._read_word()
        call_id = ""
        raw += name
        if name and (yield from self._try_marker(MISTRAL_ID)):
            call_id = yield from self._read_word()
            raw += MISTRAL_ID + call_id
        if name and (yield from self._try_marker(MISTRAL_ARGS)):
            raw += MISTRAL_ARGS
        raw += yield from self._skip_space()
        yield from self._try_call(raw, name, call_id)

    def _read_word(self) -> Generator[None, str, str]:
        word: list[str] = []
        while len(word) < NAME_CHARS_MAX and (self._next.isalnum() or self._next in _WORD):
            word.append(self._next)
            yield from self._advance()
        return "".join(word)

    def _try_call(self, raw: str, name: str = "", call_id: str = "") -> Trying:
        """Use up an object that is a call; if what comes is none, it is text, and ``raw`` before
        it. A ``name`` that is given makes any object its arguments."""
        json_text: list[str] = []
        scanner = _Scanner()
        while self._next and scanner.takes(self._next):
            json_text.append(self._next)
            if scanner.depth == 0:
                call = _call_of("".join(json_text), name, call_id)
                if call is not None:
                    self._calls.append(call)
                    self._is_after_call = True
                else:
                    self._say(raw, *json_text)
                yield from self._advance()
                return call is not None
            yield from self._advance()
        self._say(raw, *json_text)
        return False


class _Scanner:
    """Where a JSON object ends, told character by character; most of what is none is noticed."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_begun = False
        self._is_string = False
        self._is_escaped = False

    def takes(self, character: str) -> bool:
        """Take the next one, unless no object goes on like this."""
        if not self._is_begun:
            self._is_begun, self.depth = True, 1
            return character == "{"
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_string = False
            return character >= " "  # a control character must be escaped
        if character == '"':
            self._is_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
        else:
            return character in _BARE
        return self.depth <= DEPTH_MAX


def _call_of(text: str, name: str, call_id: str) -> ToolCall | None:
    """The call that a JSON object is; None: it is none. Arguments are kept as they are written."""
    try:
        fields = _fields_of(text)
    except (ValueError, RecursionError):  # an int of 5,000 digits is a ValueError
        return None
    if name:
        return ToolCall(name, text, call_id)
    named, _ = fields.get("name", (None, ""))
    arguments, written = fields.get("arguments") or fields.get("parameters") or ({}, "{}")
    if isinstance(arguments, str):  # some models write the object as a string
        written = arguments
        try:
            arguments = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    own_id, _ = fields.get("id", ("", ""))
    if not (isinstance(named, str) and named and isinstance(arguments, dict)):
        return None
    call = ToolCall(named, written, own_id if isinstance(own_id, str) else "")
    return call if _is_unicode(call) else None


def _is_unicode(call: ToolCall) -> bool:
    """JSON's escapes can write half a surrogate pair, which no message can carry."""
    try:
        "".join(call).encode()
    except UnicodeEncodeError:
        return False
    return True


def _fields_of(text: str) -> dict[str, tuple[Any, str]]:
    """An object's fields: each value, and as it is written.

    Raises:
        ValueError: it is no JSON object.
    """
    json.loads(text, parse_constant=_refuse)
    fields: dict[str, tuple[Any, str]] = {}
    at = _after_space(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, _after_space(text, at))
        begin = _after_space(text, _after_space(text, at) + 1)
        value, at = _DECODER.raw_decode(text, begin)
        fields[key] = value, text[begin:at]
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return fields


def _after_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
