"""The base of the readers of all answer formats. They read an answer one character at a time while
it streams: text, markers that may turn out to be text, and JSON objects that may be calls.

Rule 1: a reader is pure and takes linear time. Each character is read once, or twice if it began
like a marker, so that a reader can run on the engine's thread whatever a model writes. Rule 2: the
output does not depend on how the text was cut into pieces. Rule 3: nothing is lost. Text that
begins like a tool call but is not one, or calls a function that was not offered, comes out as text,
together with its marker.

A call comes out whole, once its JSON is complete and valid. Arguments that had been sent piece by
piece could not be taken back if the rest turned out to be invalid JSON.

Why not a library: transformers' ResponseParser (5.23) raises an error if a call is not JSON, and
the text that it has read is lost; it ends a call at a marker inside a JSON string; and it requires
a marker before a call, which Llama's calls lack. vLLM's and SGLang's parsers need their engines,
and openai-harmony parses the tokens of its own encoding.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    Reading = Generator[None, str, None]
    Trying = Generator[None, str, bool]

DEPTH_MAX = 64  # levels in a call's JSON; a guess: deeper than any schema, far below Python's limit
NAME_CHARS_MAX = 256  # characters of a function's name; a guess: OpenAI allows 64

END = ""  # stands for what follows the last character

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


class Object(Enum):
    """The outcome of reading a JSON object. Unless it is a call, it became text."""

    CALL = auto()
    OTHER_CALL = auto()  # a call of a function that was not offered
    NO_CALL = auto()


class Parts(NamedTuple):
    """What an answer got since the last `feed`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerReader(ABC):
    """Reads one answer: `feed` takes the text in pieces of any size, `close` ends it.

    The reader is a generator that is sent one character at a time. ``_next`` is the character that
    is read but not consumed. Text that may still become a marker or a call is held back. ``names``
    are the functions that can be called; ``needs_arguments``: an object with a name alone is data.
    """

    def __init__(self, names: Collection[str], *, needs_arguments: bool = False) -> None:
        self._names = names
        self._needs_arguments = needs_arguments
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

    @abstractmethod
    def _read_answer(self) -> Reading:
        """Read the whole answer."""

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

    def _try_markers(self, markers: Sequence[str]) -> Generator[None, str, str]:
        """Consume one of ``markers``, none of which begins another, if it comes next, otherwise
        nothing. Return it, or ""."""
        read = ""
        while self._next and any(marker.startswith(read + self._next) for marker in markers):
            read += self._next
            yield from self._advance()
            if read in markers:
                return read
        self._unread(read)
        return ""

    def _unread(self, text: str) -> None:
        """Push back ``text``, the characters consumed last, so that they are read again."""
        if text:
            self._pushed_back += [self._next, *reversed(text[1:])]
            self._next = text[0]

    def _read_word(self) -> Generator[None, str, str]:
        """Consume a name or an id and return it."""
        word: list[str] = []
        while len(word) < NAME_CHARS_MAX and (self._next.isalnum() or self._next in _WORD):
            word.append(self._next)
            yield from self._advance()
        return "".join(word)

    def _try_call(
        self, raw: str, name: str = "", call_id: str = ""
    ) -> Generator[None, str, Object]:
        """Consume a JSON object that may be a call, and return what it is. Unless it is a call,
        ``raw`` and the consumed text become text of the answer. With a ``name``, any object is the
        call's arguments."""
        json_text: list[str] = []
        scanner = _Scanner()
        while self._next and scanner.takes(self._next):
            json_text.append(self._next)
            if scanner.depth == 0:
                call = _call_of("".join(json_text), name, call_id, self._needs_arguments)
                outcome = Object.NO_CALL if call is None else Object.OTHER_CALL
                if call is not None and call.name in self._names:
                    outcome = Object.CALL
                    self._calls.append(call)
                    self._is_after_call = True
                else:
                    self._emit_text(raw, *json_text)
                yield from self._advance()
                return outcome
            yield from self._advance()
        self._emit_text(raw, *json_text)
        return Object.NO_CALL


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


def _call_of(text: str, name: str, call_id: str, needs_arguments: bool) -> ToolCall | None:
    """Return the call that a JSON object describes, or None if it describes none. Arguments keep
    the model's spelling."""
    try:
        fields = _fields_of(text)
    except (ValueError, RecursionError):  # to json, an int of 5,000 digits is a ValueError
        return None
    if name:
        return ToolCall(name, text, call_id)
    named, _ = fields.get("name", (None, ""))
    given = fields.get("arguments") or fields.get("parameters")
    if given is None and needs_arguments:
        return None
    arguments, written = given or ({}, "{}")
    if isinstance(arguments, str):  # some models write the object as a string
        written = arguments
        try:
            arguments = json.loads(written, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return None
    own_id, _ = fields.get("id", ("", ""))
    if not (isinstance(named, str) and named and isinstance(arguments, dict)):
        return None
    call = ToolCall(named, written, own_id if isinstance(own_id, str) else "")
    return call if _is_unicode(call) else None


def _is_unicode(call: ToolCall) -> bool:
    """Return whether a protobuf message can carry the call: JSON's escapes can spell half a
    surrogate pair, which no message can carry."""
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
    json.loads(text, parse_constant=refuse_constant)
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


def refuse_constant(constant: str) -> None:
    """Raise ValueError: Python's parser takes NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
