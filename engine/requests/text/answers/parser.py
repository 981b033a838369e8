"""Parses a chat model's answer into reasoning, text and tool calls, of models that mark both inside
their text.

Rule: as `engine.requests.text.answers.reader`: no character of the answer is lost. Only whitespace
around reasoning, between the text and its markers, before a call and after the last call belongs to
the format and is dropped. A marker that ends the text is dropped only if calls or nothing follow.
Reasoning is the answer's beginning or, in most dialects, follows a call; two pieces of it are
separated by an empty line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.requests.text.answers.call_reader import CallReader
from engine.requests.text.answers.reader import APART

if TYPE_CHECKING:
    from engine.requests.text.answers.dialects import Form
    from engine.requests.text.answers.format import AnswerFormat, Pair
    from engine.requests.text.answers.reader import Reading, Trying


class AnswerParser(CallReader):
    """Parses one answer in which markers open and close reasoning and calls."""

    def __init__(self, form: AnswerFormat) -> None:
        self._closing = ""  # the marker that ends the text, once one has opened it
        self._has_reasoning = False
        super().__init__(form)

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
        for form in self._form.tools.bare if self._form.tools else ():
            if self._next == _begin_of(form):
                self._hold(space)
                yield from self._read_form(form, 0)
                break
        else:
            self._unread(space)
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
        apart = APART * self._has_reasoning
        while self._next:
            space = yield from self._skip_space()
            if self._next == closing[0] and (yield from self._try_marker(closing)):
                yield from self._skip_space()
                return
            self._reasoning.append(apart + space + self._next)
            self._has_reasoning, apart = True, ""
            if self._next:
                yield from self._advance()

    def _read_text(self) -> Reading:
        """Read text and the calls in it, to the answer's end."""
        dialect, closing, reasoning = self._form.tools, self._closing, self._form.reasoning
        openings = dialect.openings if dialect else ()
        again = [reasoning.opening] if reasoning and dialect else []
        while self._next:
            raw = (yield from self._skip_space()) if dialect or closing else ""
            if closing and self._next == closing[0] and (yield from self._try_marker(closing)):
                raw += closing + (yield from self._skip_space())
                if not self._next:
                    return
            if dialect and (opening := (yield from self._try_markers(openings))):
                forms = [form for form in dialect.read if form.first == opening]
                yield from self._read_calls(forms, raw, opening)
                continue
            if reasoning and self._is_after_call and (yield from self._try_markers(again)):
                yield from self._skip_space()
                yield from self._read_reasoning(reasoning.closing)
                continue
            if self._next or not self._is_after_call:
                self._emit_text(raw + self._next)
            if self._next:
                yield from self._advance()


def _begin_of(form: Form) -> str:
    """Return the character with which a bare form begins."""
    part = (*form.opening, *form.call)[0]
    return part.text[0] if part.kind == "text" else "{"
