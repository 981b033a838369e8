"""Reads tool calls in any dialect of the table (`engine.requests.text.answers.dialects`).

What is consumed of a call is held until the call is whole. Then it is a call if its function was
offered, and text otherwise. With ``streams_arguments``, a call of an offered function begins as
soon as its arguments do; if they break off, the rest up to the call's end belongs to them.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from engine.requests.text.answers.argument_values import STRING, argument_json, types_of
from engine.requests.text.answers.reader import NAME_CHARS_MAX, refuse_constant
from engine.requests.text.answers.value_reader import JsonScanner, ValueReader, escaped

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from engine.requests.text.answers.dialects import Form, Parameter, Part
    from engine.requests.text.answers.format import AnswerFormat
    from engine.requests.text.answers.reader import Reading, Trying

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX  # characters before an object's arguments: a name and an id
WITH_ARGUMENTS = frozenset({"parameters", "keywords"})  # slots that end with the next marker


class Outcome(Enum):
    """The outcome of reading a call. Unless it is a call, it became text."""

    CALL = auto()
    OTHER_CALL = auto()  # a call of a function that was not offered
    NO_CALL = auto()


class CallReader(ValueReader):
    """Reads the calls of an answer. Subclasses find where calls may begin."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._begin("")
        super().__init__()

    # ---- a call's state

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begin a call's arguments."""
        self._name, self._call_id = name, call_id
        self._arguments: list[str] = []
        self._is_sent = False  # the call's name is out: what follows cannot become text

    def _send_early(self) -> None:
        """Send the call's name, if the client wants arguments as they are generated."""
        if self._form.streams_arguments:
            self._send_offered()
            self._drops_cut = self._is_sent

    def _send_offered(self) -> None:
        """Send what there is of the call, if its function was offered."""
        if not self._is_sent and self._name in self._form.functions:
            self._calls.append((self._name, self._arguments, self._call_id))
            self._is_sent, self._held = True, None
            self._is_after_call = True

    def _argue(self, text: str) -> None:
        if not self._is_sent:
            self._arguments.append(text)
        elif text:
            if not self._calls:
                self._calls.append(("", [], ""))
            self._calls[-1][1].append(text)

    def _hold(self, text: str) -> None:
        self._held = list(text)

    def _release(self) -> None:
        """Make text of what is held."""
        self._emit_text(*(self._held or ()))
        self._held = None

    # ---- several calls

    def _read_calls(self, forms: Sequence[Form], before: str, marker: str) -> Reading:
        """Read what follows a marker that opens calls of one of these forms. ``before`` is the
        whitespace that stands before the marker, which becomes text if no call follows."""
        self._hold(before + marker)
        space = yield from self._skip_space()
        form = forms[-1]
        for one in forms:  # two forms may share their marker: "[" tells a list from a name
            following = (*one.opening, *one.call)[1:]
            if following[0].kind == "text" and following[0].text[0] == self._next:
                form = one
                break
        self._unread(space)
        yield from self._read_form(form, 1)

    def _read_form(self, form: Form, begin: int) -> Reading:
        """Read all calls of a form, of which ``begin`` parts have been read."""
        for part in form.opening[begin:]:
            if part.kind == "text" and not (yield from self._read_text_part(part.text)):
                self._release()
                return
        begin -= len(form.opening)
        while (outcome := (yield from self._read_call(form, max(0, begin)))) is not Outcome.NO_CALL:
            self._hold("")
            space = yield from self._skip_space()
            first, separator = form.call[0], form.separator
            is_next = separator == ";" and self._next == "{"  # Llama may leave the ";" out
            if separator and (is_next or self._next == separator):
                self._hold("" if outcome is Outcome.CALL else space)
                if self._next == separator:
                    yield from self._advance()
                    yield from self._skip_space()
                begin = 0
                continue
            begin = 0
            if not separator and first.kind == "text":
                begin = int((yield from self._try_marker(first.text)))
            if begin:
                continue
            self._unread(space)
            self._held = None
            if outcome is Outcome.CALL:
                yield from self._read_end(form.closing)
            return

    def _read_end(self, parts: Sequence[Part]) -> Reading:
        """Consume what ends a call, as far as it comes."""
        for part in parts:
            if part.kind == "text":
                space = yield from self._skip_space()
                if not (yield from self._try_marker(part.text.strip())):
                    self._unread(space)
                    return

    # ---- one call

    def _read_call(self, form: Form, begin: int) -> Generator[None, str, Outcome]:
        """Read one call, of which ``begin`` parts have been read and are held."""
        self._begin("")
        missing, is_last, index = 0, False, begin
        for index, part in enumerate(form.call[begin:], begin):
            if part.group and part.group == missing:
                continue
            if part.kind == "text":
                if not (yield from self._read_text_part(part.text)):
                    missing = part.group
                    if missing:
                        continue
                    return (yield from self._read_cut((*form.call[index:], *form.closing)))
                if is_last:
                    break
            elif part.kind in ("object", "arguments"):
                if not (yield from self._read_json(form, part.kind)):
                    return (yield from self._read_cut((*form.call[index:], *form.closing)))
                break
            elif part.kind != "space":
                if not (yield from self._read_slot(form, index)):
                    return (yield from self._read_cut((*form.call[index:], *form.closing)))
                is_last = part.kind in WITH_ARGUMENTS
        self._send_offered()
        self._drops_cut = False
        yield from self._read_end(form.call[index + 1 :])
        if self._is_sent:
            return Outcome.CALL
        self._release()
        return Outcome.OTHER_CALL

    def _read_text_part(self, text: str) -> Trying:
        """Consume a pattern's text and the whitespace before it."""
        yield from self._skip_space()
        return (yield from self._try_marker(text.strip()))

    def _read_slot(self, form: Form, index: int) -> Trying:
        """Consume a slot of a call. Return False if what comes is none."""
        kind = form.call[index].kind
        if kind == "name":
            self._name = yield from self._read_word()
            return bool(self._name)
        if kind == "id":
            written = yield from self._read_word()
            self._call_id = self._id_of(written)
            return bool(written)
        self._send_early()
        self._argue("{")
        if kind == "keywords":
            end = form.call[index + 1].text[0]
            is_whole = yield from self._read_items(form.notation, end, form.notation.equals)
        else:
            is_whole = yield from self._read_parameters(form.parameter)
        if is_whole:
            self._argue("}")
        return is_whole

    def _id_of(self, written: str) -> str:
        dialect = self._form.tools
        if dialect is None:
            return written
        return dialect.call_id.replace("{name}", self._name).replace("{id}", written)

    def _read_cut(self, parts: Sequence[Part]) -> Generator[None, str, Outcome]:
        """End a call that cannot go on. If it was sent, what follows belongs to its arguments, up
        to one of these parts, which ends the call."""
        if not self._is_sent:
            self._release()
            return Outcome.NO_CALL
        ends = [part.text for part in parts if part.kind == "text" and len(part.text) > 1]
        while self._next:
            if ends and (yield from self._try_markers(ends)):
                break
            self._argue(self._next)
            yield from self._advance()
        self._drops_cut = False
        return Outcome.CALL

    # ---- JSON

    def _read_json(self, form: Form, kind: str) -> Trying:
        """Consume the JSON object of a call: its arguments, or name and arguments together."""
        yield from self._skip_space()
        if self._next != "{":
            return False
        if kind == "arguments":
            return (yield from self._read_arguments())
        return (yield from self._read_object())

    def _read_arguments(self) -> Trying:
        """Consume a JSON object, the arguments of a call whose name was read."""
        if self._next == "{":
            self._send_early()
        begin = len(self._arguments)
        scanner = JsonScanner()
        while self._next and scanner.takes(self._next):
            self._argue(self._next)
            if scanner.depth:
                yield from self._advance()
                continue
            is_whole = self._is_sent or _is_object("".join(self._arguments[begin:]))
            if is_whole:
                self._send_offered()
            yield from self._advance()
            return is_whole
        return False

    def _read_object(self) -> Trying:
        """Consume a JSON object with a call's name and arguments."""
        dialect = self._form.tools
        assert dialect is not None
        text: list[str] = []
        scanner = JsonScanner()
        while self._next and scanner.takes(self._next):
            text.append(self._next)
            if (
                self._form.streams_arguments
                and not self._is_sent
                and self._next == "{"
                and scanner.depth == 2
                and len(text) < HEAD_CHARS_MAX
            ):
                self._begin(*_head_of("".join(text), dialect.name_key))
                self._send_early()
                if self._is_sent:
                    return (yield from self._read_rest_of_object(scanner))
            if scanner.depth:
                yield from self._advance()
                continue
            call = _call_of("".join(text), dialect.name_key, bool(dialect.bare))
            if call is not None:
                name, arguments, call_id = call
                self._begin(name, call_id)
                self._argue(arguments)
                self._send_offered()
            yield from self._advance()
            return call is not None
        return False

    def _read_rest_of_object(self, scanner: JsonScanner) -> Trying:
        """Consume an object's arguments, whose "{" comes next and was scanned, and the rest."""
        while self._next:
            self._argue(self._next)
            yield from self._advance()
            if not (self._next and scanner.takes(self._next)):
                return False
            if scanner.depth == 1:
                self._argue(self._next)
                yield from self._advance()
                break
        self._hold("")  # the arguments are whole: what breaks the object now is text
        while self._next and scanner.takes(self._next):
            yield from self._advance()
            if scanner.depth == 0:
                self._held = None
                return True
        self._release()
        return True

    # ---- arguments one by one

    def _read_parameters(self, parameter: Parameter) -> Trying:
        """Consume arguments as long as they come."""
        schema = self._form.functions.get(self._name) or {}
        properties = schema.get("properties")
        is_first = True
        while True:
            space = yield from self._skip_space()
            if not (yield from self._try_marker(parameter.opening)):
                if not self._next:
                    return False
                self._unread(space)
                return True
            key = yield from self._read_up_to(parameter.middle[0], NAME_CHARS_MAX)
            if not key:
                return False
            for marker in parameter.middle[1:]:
                if not (yield from self._read_text_part(marker)):
                    return False
            if parameter.is_padded and self._next == "\n":
                yield from self._advance()
            self._argue(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            is_first = False
            own = properties.get(key) if isinstance(properties, dict) else None
            types = types_of(own, schema)
            if types == STRING:
                if not (yield from self._read_text_value(parameter)):
                    return False
                continue
            value = yield from self._read_other_value(parameter, is_json="string" not in types)
            if value is None:
                return False
            self._argue(argument_json(value, types))

    def _read_up_to(self, marker: str, most: int) -> Generator[None, str, str]:
        """Consume a text of at most ``most`` characters and the marker behind it. Return the text,
        or "" if it does not end there."""
        text: list[str] = []
        while self._next and len(text) < most:
            if self._next == marker[0] and (yield from self._try_marker(marker)):
                return "".join(text).strip()
            text.append(self._next)
            yield from self._advance()
        return ""

    def _try_end(self, parameter: Parameter) -> Trying:
        """Consume what ends a value, if it comes next."""
        if parameter.is_padded and self._next == "\n":
            return (yield from self._try_marker("\n" + parameter.closing))
        if self._next == parameter.closing[0]:
            return (yield from self._try_marker(parameter.closing))
        return False

    def _read_text_value(self, parameter: Parameter) -> Trying:
        """Consume a string and what ends it."""
        self._argue('"')
        while self._next:
            if (yield from self._try_end(parameter)):
                self._argue('"')
                return True
            self._argue(escaped(self._next))
            yield from self._advance()
        return False

    def _read_other_value(
        self, parameter: Parameter, *, is_json: bool
    ) -> Generator[None, str, str | None]:
        """Consume a value and what ends it, and return its text; None if it has no end. In a JSON
        object or array, what looks like the end is part of it."""
        text: list[str] = []
        scanner = JsonScanner()
        is_begun = False
        while self._next:
            is_part = False
            if is_json and (is_begun or self._next not in _SPACE):
                is_begun = True
                is_part = scanner.takes(self._next)
                is_json = is_part and scanner.depth > 0
            if not is_part and (yield from self._try_end(parameter)):
                return "".join(text)
            text.append(self._next)
            yield from self._advance()
        return None


def _head_of(text: str, name_key: str) -> tuple[str, str]:
    """Return the name and the id in a call's object up to the "{" of its arguments; "" if its last
    key is not that of the arguments."""
    try:
        fields = json.loads(text + "}}", parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return "", ""
    last = list(fields)[-1]
    name, call_id = fields.get(name_key), fields.get("id", "")
    if last not in ("arguments", "parameters") or not isinstance(name, str):
        return "", ""
    return name, call_id if isinstance(call_id, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):  # to json, an int of 5,000 digits is a ValueError
        return False


def _call_of(text: str, name_key: str, needs_arguments: bool) -> tuple[str, str, str] | None:
    """Return name, arguments and id of the call that a JSON object describes, or None if it
    describes none. Arguments keep the model's spelling."""
    try:
        fields = _fields_of(text)
    except (ValueError, RecursionError):
        return None
    name, _ = fields.get(name_key, (None, ""))
    given = fields.get("arguments") or fields.get("parameters")
    if given is None and needs_arguments:
        return None
    arguments, written = given or ({}, "{}")
    if isinstance(arguments, str):  # some models write the object as a string
        written = arguments
        if not _is_object(written):
            return None
    elif not isinstance(arguments, dict):
        return None
    call_id, _ = fields.get("id", ("", ""))
    if not (isinstance(name, str) and name):
        return None
    own = (name, written, call_id if isinstance(call_id, str) else "")
    return own if _is_unicode(own) else None


def _is_unicode(call: tuple[str, str, str]) -> bool:
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
