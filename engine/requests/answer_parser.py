"""Parses a chat model's answer into reasoning, text and tool calls while it streams.

Rule 1: the parser is pure and takes linear time. Each character is read once, or twice if it began
like a marker, so that the parser can run on the engine's thread whatever a model writes. Rule 2:
the output does not depend on how the text was cut into pieces. Rule 3: nothing is lost. Text that
begins like a tool call but is not one comes out as text, together with its marker. Only whitespace
around reasoning, before a call and after the last call belongs to the format and is dropped.

A call comes out whole, once its JSON is complete and valid. Arguments that had been sent piece by
piece could not be taken back if the rest turned out to be invalid JSON.

Why not a library: transformers' ResponseParser (5.23) raises an error if a call is not JSON, and
the text that it has read is lost; it ends a call at a marker inside a JSON string; and it requires
a marker before a call, which Llama's calls lack. vLLM's and SGLang's parsers need their engines.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.requests.answer_format import (
    END_THINK,
    HERMES_CLOSE,
    MISTRAL_ARGS,
    MISTRAL_ID,
    THINK,
    ToolFormat,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from engine.requests.answer_format import AnswerFormat

    Reading = Generator[None, str, None]
    Trying = Generator[None, str, bool]

DEPTH_MAX = 64  # guess: deeper than any schema, and far below the limit of Python's decoder
NAME_CHARS_MAX = 256  # guess: OpenAI allows 64

END = ""  # is read after the last character

_SPACE = frozenset(" \t\r\n")
# The characters of JSON outside of strings, except quotes and brackets.
_BARE = frozenset(":,0123456789+-.eE" + "truefalsn") | _SPACE
_WORD = frozenset("_-.")
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A call that the model asks for. ``arguments_json`` is a JSON object as the model wrote it;
    ``call_id`` is empty unless the model wrote one."""

    name: str
    arguments_json: str
    call_id: str = ""


class Parts(NamedTuple):
    """The additions to an answer since the last ones."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerParser:
    """Parses one answer: `feed` takes the text in pieces of any size, `close` ends it.

    The parser is a generator that is sent one character at a time. ``_next`` is the character that
    is read but not consumed. Text that may still become a marker or a call is held back.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._opening = form.opening
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._is_after_call = False  # only whitespace has followed the last call
        self._next = END
        self._pushed_back: list[str] = []  # characters to read once more: a stack
        self._reader = self._read_answer()
        next(self._reader)

    def feed(self, piece: str) -> Parts:
        """Read a piece of text, and return the additions that are certain after it."""
        send = self._reader.send
        for character in piece:
            send(character)
        return self._take()

    def close(self) -> Parts:
        """End the answer and return the rest of it. Called once."""
        with suppress(StopIteration):
            self._reader.send(END)
        return self._take()

    def _take(self) -> Parts:
        parts = Parts("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        self._text, self._reasoning, self._calls = [], [], []
        return parts

    def _emit_text(self, *texts: str) -> None:
        self._text += texts
        self._is_after_call = False

    # ---- reading

    def _advance(self) -> Reading:
        """Read the next character, or `END`, into ``_next``."""
        self._next = self._pushed_back.pop() if self._pushed_back else (yield)

    def _skip_space(self) -> Generator[None, str, str]:
        """Consume whitespace and return it."""
        space = []
        while self._next in _SPACE:
            space.append(self._next)
            yield from self._advance()
        return "".join(space)

    def _try_marker(self, marker: str) -> Trying:
        """Consume ``marker`` if it comes next, otherwise nothing. Return whether it came."""
        for index, wanted in enumerate(marker):
            if self._next != wanted:
                self._unread(marker[:index])
                return False
            yield from self._advance()
        return True

    def _unread(self, text: str) -> None:
        """Push back ``text``, the characters consumed last, so that they are read again."""
        if text:
            self._pushed_back += [self._next, *reversed(text[1:])]
            self._next = text[0]

    # ---- the answer

    def _read_answer(self) -> Reading:
        """Read the whole answer: reasoning if there is any, then text and calls."""
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
            self._emit_text(space)
        yield from self._read_text()

    def _read_reasoning(self) -> Reading:
        """Read up to the marker that ends the reasoning and the whitespace after it, or to the
        answer's end."""
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
        """Read text and the calls in it, to the answer's end."""
        opening = self._opening
        while self._next:
            space = (yield from self._skip_space()) if opening else ""
            if opening and self._next == opening[0] and (yield from self._try_marker(opening)):
                yield from self._read_calls(space + opening)
                continue
            if self._next or not self._is_after_call:
                self._emit_text(space + self._next)
            if self._next:
                yield from self._advance()

    def _read_calls(self, raw: str) -> Reading:
        """Read what follows an opening marker. ``raw`` holds the marker and the whitespace before
        it, which become text if no call follows."""
        if self._form.tools is ToolFormat.HERMES:
            yield from self._read_hermes(raw)
        elif self._form.tools is ToolFormat.LLAMA:
            yield from self._read_llama(raw)
        else:
            yield from self._read_mistral(raw)

    def _read_hermes(self, raw: str) -> Reading:
        """Read one call and its closing marker."""
        raw += yield from self._skip_space()
        if (yield from self._try_call(raw)):
            space = yield from self._skip_space()
            if not (yield from self._try_marker(HERMES_CLOSE)):
                self._unread(space)

    def _read_llama(self, raw: str) -> Reading:
        """Read calls separated by ";" or by nothing."""
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
        """Read a list of calls, or one call whose name stands before its arguments."""
        raw += yield from self._skip_space()
        if self._next == "[":
            yield from self._advance()
            yield from self._read_list(raw + "[")
        else:
            yield from self._read_named(raw)

    def _read_list(self, raw: str) -> Reading:
        """Read calls separated by "," up to "]"."""
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
        """Read ``name[CALL_ID]id[ARGS]{…}``, where only the name and the object are required."""
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
        """Consume a name or an id and return it."""
        word: list[str] = []
        while len(word) < NAME_CHARS_MAX and (self._next.isalnum() or self._next in _WORD):
            word.append(self._next)
            yield from self._advance()
        return "".join(word)

    def _try_call(self, raw: str, name: str = "", call_id: str = "") -> Trying:
        """Consume a JSON object that is a call, and return whether there was one. If not, ``raw``
        and what was consumed become text. With a ``name``, any object is the call's arguments."""
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
                    self._emit_text(raw, *json_text)
                yield from self._advance()
                return call is not None
            yield from self._advance()
        self._emit_text(raw, *json_text)
        return False


class _Scanner:
    """Finds the end of a JSON object, one character at a time. It notices most of the text that is
    not JSON; the rest fails when the object is decoded."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_begun = False
        self._is_string = False
        self._is_escaped = False

    def takes(self, character: str) -> bool:
        """Take the next character. Return False if no JSON object can go on with it."""
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
    """Return the call that a JSON object describes, or None if it describes none. Arguments keep
    the model's spelling."""
    try:
        fields = _fields_of(text)
    except (ValueError, RecursionError):  # an int of 5,000 digits raises ValueError
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
    """Return whether a protobuf message can carry the call: JSON's escapes can spell half a
    surrogate pair, which it cannot."""
    try:
        "".join(call).encode()
    except UnicodeEncodeError:
        return False
    return True


def _fields_of(text: str) -> dict[str, tuple[Any, str]]:
    """Return a JSON object's fields by name: each value, decoded and as it is written.

    Raises:
        ValueError: The text is not a JSON object.
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
    raise ValueError(f"{constant} is not JSON")
