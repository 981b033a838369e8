"""Reads the values of tool calls, and writes them as JSON: JSON objects as they are, and the values
of other notations, such as Python's literals, piece by piece.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from engine.requests.text.answers.dialects import PYTHON
from engine.requests.text.answers.reader import DEPTH_MAX, NAME_CHARS_MAX, AnswerReader

if TYPE_CHECKING:
    from engine.requests.text.answers.dialects import Notation
    from engine.requests.text.answers.reader import Trying

# The characters of JSON outside of strings, except quotes and brackets.
_BARE = frozenset(":,0123456789+-.eE" + "truefalsn" + " \t\r\n")
_PLAIN = frozenset("_-.+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "none": "null"}
_WORDS |= {word: word for word in ("true", "false", "null")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
# What may follow a string's last quote. Some templates write strings without escapes, so any other
# quote is part of the string.
_AFTER_STRING = frozenset(",)]}:")


class JsonScanner:
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
            return character in ("{", "[")
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


class ValueReader(AnswerReader):
    """Reads values. `_argue` takes the JSON."""

    def __init__(self) -> None:
        self._aside: list[list[str]] = []  # JSON that is held back, of values inside each other
        super().__init__()

    @abstractmethod
    def _argue(self, text: str) -> None:
        """Append to the JSON of the call that is read."""

    def _write(self, text: str) -> None:
        """Append to the JSON of the value that is read."""
        if self._aside:
            self._aside[-1].append(text)
        else:
            self._argue(text)

    def _read_value(self, notation: Notation, depth: int = 0) -> Trying:
        """Consume a value. Return False where it cannot go on."""
        yield from self._skip_space()
        opening = self._next
        if opening in ("{", "[", "("):
            if depth == DEPTH_MAX:
                return False
            yield from self._advance()
            if opening == "(":
                return (yield from self._read_group(notation, depth + 1))
            is_object = opening == "{"
            self._write("{" if is_object else "[")
            closing = "}" if is_object else "]"
            equals = ":" if is_object else ""
            if not (yield from self._read_items(notation, closing, equals, depth + 1)):
                return False
            yield from self._advance()
            self._write("}" if is_object else "]")
            return True
        quote = yield from self._try_markers(notation.quotes)
        if quote:
            return (yield from self._read_string(notation, quote))
        word: list[str] = []
        while len(word) < NAME_CHARS_MAX and (self._next.isalnum() or self._next in _PLAIN):
            word.append(self._next)
            yield from self._advance()
        plain = _plain_json("".join(word)) if self._next else ""
        self._write(plain)
        return plain != ""

    def _read_group(self, notation: Notation, depth: int) -> Trying:
        """Consume a value in parentheses or, if it has a comma, a tuple, whose "(" was read. Until
        it is known which of them it is, its JSON is held back."""
        yield from self._skip_space()
        self._aside.append([])
        is_whole = self._next == ")" or (yield from self._read_value(notation, depth))
        yield from self._skip_space()
        first = "".join(self._aside.pop())
        if not self._next:
            self._write(first)
            return False
        is_tuple = not (is_whole and first and self._next == ")")
        self._write("[" * is_tuple + first)
        if not is_whole:
            return False
        if self._next == ",":
            yield from self._advance()
            yield from self._skip_space()
            if self._next != ")":
                self._write(", ")
            if not (yield from self._read_items(notation, ")", "", depth)):
                return False
        if self._next != ")":
            return False
        yield from self._advance()
        self._write("]" * is_tuple)
        return True

    def _read_items(self, notation: Notation, closing: str, equals: str, depth: int = 0) -> Trying:
        """Consume values up to ``closing``, separated by commas. With ``equals``, a key and
        ``equals`` stand before each. Return False where they cannot go on."""
        is_first = True
        yield from self._skip_space()
        while self._next != closing:
            if not is_first:
                if self._next != ",":
                    return False
                yield from self._advance()
                yield from self._skip_space()
                if self._next == closing:
                    break
                self._write(", ")
            is_first = False
            if equals and not (yield from self._read_key(notation, equals)):
                return False
            if not (yield from self._read_value(notation, depth)):
                return False
            yield from self._skip_space()
        return True

    def _read_key(self, notation: Notation, equals: str) -> Trying:
        quote = yield from self._try_markers(notation.quotes)
        if quote:
            if not (yield from self._read_string(notation, quote)):
                return False
        else:
            key: list[str] = []
            while self._next and self._next not in equals + ",(){}[]<\n":
                key.append(self._next)
                if len(key) > NAME_CHARS_MAX:
                    return False
                yield from self._advance()
            name = "".join(key).strip()
            if not (name and self._next):
                return False
            self._write(json.dumps(name, ensure_ascii=False))
        yield from self._skip_space()
        if self._next != equals:
            return False
        yield from self._advance()
        self._write(": ")
        return True

    def _read_string(self, notation: Notation, quote: str) -> Trying:
        """Consume a string, whose first quote was read."""
        self._write('"')
        while self._next:
            if self._next == "\\" and notation.has_escapes:
                if not (yield from self._read_escape()):
                    return False
            elif self._next == quote[0] and (yield from self._try_marker(quote)):
                space = (yield from self._skip_space()) if notation.has_escapes else ""
                if not self._next:
                    return False
                if not notation.has_escapes or self._next in _AFTER_STRING:
                    self._write('"')
                    return True
                self._write(escaped(quote + space))
            else:
                self._write(escaped(self._next))
                yield from self._advance()
        return False

    def _read_escape(self) -> Trying:
        """Consume a backslash of Python's notation and what it escapes."""
        yield from self._advance()
        kind = self._next
        if not kind:
            return False
        if kind in _HEX_DIGITS or kind in "01234567":
            digits, allowed, most = "", "01234567", 3
            if kind in _HEX_DIGITS:
                allowed, most = "0123456789abcdefABCDEF", _HEX_DIGITS[kind]
                yield from self._advance()
            while self._next and self._next in allowed and len(digits) < most:
                digits += self._next
                yield from self._advance()
            code = int(digits or "0", 16 if kind in _HEX_DIGITS else 8)
            if (kind in _HEX_DIGITS and len(digits) < most) or code > 0x10FFFF:
                return False
            self._write(escaped(chr(code)))
            return True
        self._write(escaped(_ESCAPES.get(kind, "\\" + kind)))
        yield from self._advance()
        return True


class _Literal(ValueReader):
    """Reads one Python literal."""

    def __init__(self) -> None:
        self.json: list[str] = []
        self.is_whole = False
        super().__init__()

    def _argue(self, text: str) -> None:
        self.json.append(text)

    def _read_answer(self) -> Any:
        yield from self._advance()
        is_value = yield from self._read_value(PYTHON)
        yield from self._skip_space()
        is_end = self._next == ","
        yield from self._advance()
        self.is_whole = is_value and is_end and not self._next
        while self._next:
            yield from self._advance()


def literal_json(text: str) -> str:
    """Return the JSON of a Python literal; "" if the text is none."""
    reader = _Literal()
    reader.feed(f"{text},")  # which may follow a value, whatever it is
    reader.close()
    return "".join(reader.json) if reader.is_whole else ""


def escaped(text: str) -> str:
    """Return the text as it stands within a JSON string. Half a surrogate pair is escaped, because
    no message can carry one."""
    if text.isalnum() and text.isascii():
        return text
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return written


def _plain_json(word: str) -> str:
    """Return the JSON of a number or of one of Python's and JSON's words; "" for others."""
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    try:
        return str(int(word))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    return repr(number) if math.isfinite(number) else ""
