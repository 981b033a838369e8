"""Parses a chat model's answer into reasoning, text and tool calls, of models that mark both inside
their text.

Rule: as `engine.requests.answer_reader`. Only whitespace around reasoning, before a call and after
the last call belongs to the format and is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.requests.answer_format import (
    END_THINK,
    HERMES_CLOSE,
    MISTRAL_ARGS,
    MISTRAL_ID,
    THINK,
    ToolFormat,
)
from engine.requests.answer_reader import AnswerReader

if TYPE_CHECKING:
    from engine.requests.answer_format import AnswerFormat
    from engine.requests.answer_reader import Reading


class AnswerParser(AnswerReader):
    """Parses one answer in which markers open and close reasoning and calls."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._opening = form.opening
        super().__init__()

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
