"""Parses a chat model's answer into reasoning, text and tool calls, of models that mark both inside
their text.

Rule: as `engine.requests.text.answers.reader`: no character of the answer is lost. Only whitespace
around reasoning, between the text and its markers, before a call and after the last call belongs to
the format and is dropped. A marker that ends the text is dropped only if calls or nothing follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.requests.text.answers.format import HERMES_CLOSE, MISTRAL_ARGS, MISTRAL_ID, ToolFormat
from engine.requests.text.answers.reader import AnswerReader, Object

if TYPE_CHECKING:
    from engine.requests.text.answers.format import AnswerFormat, Pair
    from engine.requests.text.answers.reader import Reading, Trying


class AnswerParser(AnswerReader):
    """Parses one answer in which markers open and close reasoning and calls."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._opening = form.opening
        self._closing = ""  # the marker that ends the text, once one has opened it
        super().__init__(form.names, needs_arguments=form.tools is ToolFormat.LLAMA)

    def _read_answer(self) -> Reading:
        """Read the whole answer: reasoning if there is any, then text and calls."""
        yield from self._advance()
        space = yield from self._skip_space()
        reasoning, answer = self._form.reasoning, self._form.answer
        if reasoning is not None and (yield from self._try_opening(reasoning)):
            space = ""
            yield from self._read_reasoning(reasoning.closing)
        if answer is not None and (yield from self._try_opening(answer)):
            space, self._closing = "", answer.closing
        if self._form.tools is ToolFormat.LLAMA and self._next == "{":
            yield from self._read_llama(space)
        else:
            self._emit_text(space)
        yield from self._read_text()

    def _try_opening(self, pair: Pair) -> Trying:
        """Consume the marker that opens a part, and the whitespace after it. Return whether the
        part is open. The prompt may have opened it; the marker is then a repetition."""
        is_open = self._form.opened == pair.opening
        while (yield from self._try_marker(pair.opening)):
            is_open = True
            yield from self._skip_space()
        return is_open

    def _read_reasoning(self, closing: str) -> Reading:
        """Read up to the marker that ends the reasoning and the whitespace after it, or to the
        answer's end."""
        while self._next:
            space = yield from self._skip_space()
            if self._next == closing[0] and (yield from self._try_marker(closing)):
                yield from self._skip_space()
                return
            self._reasoning.append(space + self._next)
            if self._next:
                yield from self._advance()

    def _read_text(self) -> Reading:
        """Read text and the calls in it, to the answer's end."""
        opening, closing = self._opening, self._closing
        while self._next:
            raw = (yield from self._skip_space()) if opening or closing else ""
            if closing and self._next == closing[0] and (yield from self._try_marker(closing)):
                raw += closing + (yield from self._skip_space())
                if not self._next:
                    return
            if opening and self._next == opening[0] and (yield from self._try_marker(opening)):
                yield from self._read_calls(raw + opening)
                continue
            if self._next or not self._is_after_call:
                self._emit_text(raw + self._next)
            if self._next:
                yield from self._advance()

    def _read_calls(self, raw: str) -> Reading:
        """Read what follows an opening marker. ``raw`` holds the marker and what stands before
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
        if (yield from self._try_call(raw)) is Object.CALL:
            space = yield from self._skip_space()
            if not (yield from self._try_marker(HERMES_CLOSE)):
                self._unread(space)

    def _read_llama(self, raw: str) -> Reading:
        """Read calls separated by ";" or by nothing."""
        raw += yield from self._skip_space()
        while (result := (yield from self._try_call(raw))) is not Object.NO_CALL:
            space = yield from self._skip_space()
            if self._next not in ("{", ";"):
                self._unread(space)
                return
            raw = "" if result is Object.CALL else space
            if self._next == ";":
                yield from self._advance()
                raw += ";" + (yield from self._skip_space())

    def _read_mistral(self, raw: str) -> Reading:
        """Read a list of calls, or one call whose name stands before its arguments."""
        raw += yield from self._skip_space()
        if self._next == "[":
            yield from self._advance()
            yield from self._read_list(raw + "[")
        else:
            yield from self._read_named(raw)

    def _read_list(self, raw: str) -> Reading:
        """Read calls separated by "," up to the "]" that closes the list."""
        raw += yield from self._skip_space()
        while (result := (yield from self._try_call(raw))) is not Object.NO_CALL:
            space = yield from self._skip_space()
            if self._next != ",":
                if self._next == "]" and result is Object.CALL:
                    yield from self._advance()
                else:
                    self._unread(space)
                return
            raw = "," if result is Object.CALL else space + ","
            yield from self._advance()
            raw += yield from self._skip_space()

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
