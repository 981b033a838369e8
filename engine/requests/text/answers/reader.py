"""The base of the readers of all answer formats. They read an answer one character at a time while
it streams: text, markers that may turn out to be text, and tool calls.

Rule 1: a reader is pure and takes linear time. Each character is read once, or twice if it began
like a marker, so that a reader can run on the engine's thread whatever a model writes. Rule 2: the
output does not depend on how the text was cut into pieces. Rule 3: nothing is lost. Text that
begins like a tool call but is not one, or calls a function that was not offered, comes out as text,
together with its marker.

A call comes out whole, once it is complete and its arguments are a JSON object. A client may ask
for the arguments as they are generated; what follows the name of an offered function then belongs
to the call, because what was sent cannot be taken back.

Why not a library: transformers' ResponseParser (5.23) raises an error if a call is not JSON, and
the text that it has read is lost; it ends a call at a marker inside a JSON string; and it requires
a marker before a call, which Llama's calls lack. vLLM's and SGLang's parsers need their engines,
and openai-harmony parses the tokens of its own encoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    Reading = Generator[None, str, None]
    Trying = Generator[None, str, bool]

DEPTH_MAX = 64  # levels in a call's JSON; a guess: deeper than any schema, far below Python's limit
NAME_CHARS_MAX = 256  # characters of a function's name; a guess: OpenAI allows 64

APART = "\n\n"  # separates two pieces of reasoning, and two messages of text
END = ""  # stands for what follows the last character

_SPACE = frozenset(" \t\r\n")
_WORD = frozenset("_-.")


class ToolCall(NamedTuple):
    """A call that the model asks for, or the next part of one, which has no name.
    ``arguments_json`` is a JSON object, as the model wrote it if it wrote JSON; ``call_id`` is
    empty unless the model wrote one."""

    name: str
    arguments_json: str
    call_id: str = ""


class Parts(NamedTuple):
    """What an answer got since the last `feed`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerReader(ABC):
    """Reads one answer: `feed` takes the text in pieces of any size, `close` ends it.

    The reader is a generator that is sent one character at a time. ``_next`` is the character that
    is read but not consumed. Text that may still become a marker or a call is held back. ``_held``
    has what was consumed of a call that may turn out to be text; None: there is none.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str], str]] = []  # name, parts of the arguments, id
        self._held: list[str] | None = None
        self._drops_cut = False  # a marker that the answer's end cuts off is dropped
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
        calls = [ToolCall(name, "".join(pieces), id_) for name, pieces, id_ in self._calls]
        parts = Parts("".join(self._text), "".join(self._reasoning), tuple(calls))
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
        if self._held is not None and self._next:
            self._held.append(self._next)
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
                if self._next or not self._drops_cut:
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
        if self._next or not self._drops_cut:
            self._unread(read)
        return ""

    def _unread(self, text: str) -> None:
        """Push back ``text``, the characters consumed last, so that they are read again."""
        if text:
            if self._held is not None:
                del self._held[-len(text) :]
            self._pushed_back += [self._next, *reversed(text[1:])]
            self._next = text[0]

    def _read_word(self) -> Generator[None, str, str]:
        """Consume a name or an id and return it."""
        word: list[str] = []
        while len(word) < NAME_CHARS_MAX and (self._next.isalnum() or self._next in _WORD):
            word.append(self._next)
            yield from self._advance()
        return "".join(word)


def refuse_constant(constant: str) -> None:
    """Raise ValueError: Python's parser takes NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
