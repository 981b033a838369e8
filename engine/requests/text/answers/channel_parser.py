"""Parses the answers of models that write messages in channels (GPT-OSS' format "harmony").

An answer is a series of messages, the first of which the prompt has begun:

    <|start|>assistant<|channel|>analysis<|message|>…<|end|>                         reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                         text
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                       text
    <|start|>assistant<|channel|>commentary to=functions.NAME
        <|constrain|>json<|message|>{…}<|call|>                                      a call

The recipient may also stand before the channel, and the word json without its marker. Rule: nothing
is lost, as `engine.requests.text.answers.reader` promises. Headers and the markers between messages
belong to the format and are dropped. A header without its last marker ends where free text begins,
which is the message; of such a header, only words that belong in no header are text. A message to a
recipient that is neither a call of a function that was offered nor reasoning is text, together with
its header. Two messages of one kind are separated by an empty line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from engine.requests.text.answers.call_reader import CallReader
from engine.requests.text.answers.dialects import (
    ANALYSIS,
    CHANNEL,
    CHANNEL_ENDS,
    CHANNELS,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    START,
    Part,
)
from engine.requests.text.answers.reader import APART

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from engine.requests.text.answers.format import AnswerFormat
    from engine.requests.text.answers.reader import Reading, Trying

MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *CHANNEL_ENDS)
CALL_ENDS = tuple(Part("text", end) for end in CHANNEL_ENDS)
HEADER_CHARS_MAX = 512  # a guess: a header is a few words, of which only a name may be long
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([\w.-]+)")
RECIPIENT_NAME = re.compile(re.escape(RECIPIENT) + r"([\w.-]+)")


class Header(NamedTuple):
    """The contents of a message's header. ``raw`` is its text if the marker behind it came.
    Otherwise ``raw`` is empty, and ``rest`` is the part of the message that was read with it."""

    channel: str
    recipient: str
    raw: str = ""
    rest: str = ""


NOTHING_KNOWN = Header("", "")


class ChannelParser(CallReader):
    """Parses one answer whose messages are in channels."""

    def __init__(self, form: AnswerFormat) -> None:
        self._has_text = self._has_reasoning = False  # whether text or reasoning has come
        super().__init__(form)

    def _read_answer(self) -> Reading:
        """Read the message that the prompt has begun, and those after it."""
        yield from self._advance()
        header, is_begun, content = self._form.opened.partition(MESSAGE)
        if not is_begun:
            yield from self._read_message("", _known(header))
        elif not any(end in content for end in CHANNEL_ENDS):
            yield from self._read_content(_known(header))
        while self._next:
            marker = yield from self._try_markers(MARKERS)
            if marker == START:
                role = yield from self._read_word()
                yield from self._read_message(marker + role)
            elif marker in (CHANNEL, MESSAGE):
                self._unread(marker)
                yield from self._read_message("")
            elif not marker:
                self._emit_text(self._next)
                yield from self._advance()

    def _read_message(self, raw: str, known: Header = NOTHING_KNOWN) -> Reading:
        """Read the rest of a header, and the message's content. ``raw`` is what was read of the
        header, and ``known`` is the prompt's part of it."""
        header = yield from self._read_header(raw, known)
        if header is not None:
            yield from self._read_content(header)

    def _read_header(self, raw: str, known: Header) -> Generator[None, str, Header | None]:
        """Read a header and the marker behind it, or up to where free text begins. Return None if
        there is no header, or if nothing follows it."""
        channel, recipient = known.channel, known.recipient
        is_header, is_typed = bool(raw or channel or recipient), False
        is_awaited = False
        rest = ""  # what was read and belongs in no header
        while len(raw) <= HEADER_CHARS_MAX:
            space = yield from self._skip_space()
            marker = yield from self._try_markers((MESSAGE, CHANNEL, CONSTRAIN, RECIPIENT))
            if marker == MESSAGE:
                return Header(channel, recipient, raw + space + marker)
            takes_word = marker or is_awaited or (channel and not is_typed)
            word = (yield from self._read_word()) if takes_word else ""
            raw += space + marker + word
            if not marker + word:
                rest += space
                break
            is_header = is_header or marker in (CHANNEL, CONSTRAIN)
            is_channel = marker == CHANNEL or (is_awaited and not marker)
            is_awaited = marker == CHANNEL and not word  # a space may precede the channel's name
            if is_channel:
                channel = word
            elif marker == RECIPIENT:
                recipient = word
            is_cut = not self._next and any(channel.startswith(word) for channel in CHANNELS)
            if is_channel and not (word in CHANNELS or is_cut):
                rest += word
            elif marker == RECIPIENT and word.startswith(FUNCTIONS):
                rest += marker + word
            elif not marker and not is_channel:
                rest, is_typed = rest + space + word, True
        if is_header:
            return Header(channel, recipient, rest=rest.lstrip()) if self._next or rest else None
        self._emit_text(raw)
        return None

    def _read_content(self, header: Header) -> Reading:
        """Read a message up to the marker that ends it, or to where another message begins."""
        is_function = header.recipient.startswith(FUNCTIONS)
        is_offered = header.recipient.removeprefix(FUNCTIONS) in self._form.functions
        if is_function and is_offered and (header.raw or self._next == "{"):
            yield from self._read_call_of(header)
        elif header.channel == ANALYSIS and not is_function:
            apart = APART * self._has_reasoning
            has_text = yield from self._read_part(apart, header.rest, self._emit_reasoning)
            self._has_reasoning |= has_text
        else:
            if header.recipient:
                self._emit_text(header.raw)
            apart = APART * self._has_text
            self._has_text |= yield from self._read_part(apart, header.rest, self._emit_text)

    def _read_call_of(self, header: Header) -> Reading:
        """Read the arguments of a call. If they are no JSON object, header and content are text."""
        self._hold((header.raw or header.rest) + (yield from self._skip_space()))
        self._begin(header.recipient.removeprefix(FUNCTIONS))
        if not (yield from self._read_arguments()):
            yield from self._read_cut(CALL_ENDS)
        self._drops_cut = False
        yield from self._skip_space()
        yield from self._read_part("", "", self._emit_text)

    def _read_part(self, apart: str, begun: str, emit: Callable[[str], None]) -> Trying:
        """Read a message's content, the beginning of which is ``begun``. ``apart`` is put before
        its first character. Return whether the content has any character."""
        has_text = bool(begun)
        if begun:
            emit(apart + begun)
        while self._next:
            marker = ""
            if self._next == START[0]:
                marker = yield from self._try_markers(MARKERS)
            if marker in (START, CHANNEL):
                self._unread(marker)
            if marker in (START, CHANNEL, *CHANNEL_ENDS):
                break
            if not marker:
                emit(self._next if has_text else apart + self._next)
                has_text = True
                yield from self._advance()
        return has_text

    def _emit_reasoning(self, text: str) -> None:
        self._reasoning.append(text)


def _known(header: str) -> Header:
    """Return the contents of the prompt's part of a header."""
    channel, recipient = CHANNEL_NAME.search(header), RECIPIENT_NAME.search(header)
    return Header(channel[1] if channel else "", recipient[1] if recipient else "", "")
