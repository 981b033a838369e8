"""Parses the answers of models that write messages in channels (GPT-OSS' format "harmony").

An answer is a series of messages, the first of which the prompt has begun:

    <|start|>assistant<|channel|>analysis<|message|>…<|end|>                         reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                         text
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                       text
    <|start|>assistant<|channel|>commentary to=functions.NAME
        <|constrain|>json<|message|>{…}<|call|>                                      a call

The recipient may also stand before the channel, and the word json without its marker. Rule: as
`engine.requests.answer_reader`. Headers and the markers between messages belong to the format and
are dropped; what looks like a header but leads to no message is text. A message to a recipient that
is neither a call nor reasoning is text, together with its header. Two messages of one kind are
separated by an empty line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from engine.requests.answer_format import (
    CHANNEL,
    CHANNEL_ENDS,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    START,
    ToolFormat,
)
from engine.requests.answer_reader import AnswerReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from engine.requests.answer_format import AnswerFormat
    from engine.requests.answer_reader import Reading

REASONING_CHANNEL = "analysis"
APART = "\n\n"
HEADER_CHARS_MAX = 512  # guess: a few words, of which only a function's name may be long
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([\w.-]+)")
RECIPIENT_NAME = re.compile(re.escape(RECIPIENT) + r"([\w.-]+)")


class Header(NamedTuple):
    """What a message's header says. ``raw`` is the header as the answer has it."""

    channel: str
    recipient: str
    raw: str


NOTHING_KNOWN = Header("", "", "")


class ChannelParser(AnswerReader):
    """Parses one answer whose messages are in channels."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._has_text = self._has_reasoning = False  # there has been a message of this kind
        super().__init__()

    def _read_answer(self) -> Reading:
        """Read the message that the prompt has begun, and those after it."""
        yield from self._advance()
        header, is_begun, content = self._form.opened.partition(MESSAGE)
        if not is_begun:
            yield from self._read_message("", _known(header))
        elif not any(end in content for end in CHANNEL_ENDS):
            yield from self._read_content(_known(header))
        while self._next:
            marker = yield from self._try_markers((START, CHANNEL, MESSAGE))
            if marker == START:
                role = yield from self._read_word()
                yield from self._read_message(marker + role)
            elif marker:
                self._unread(marker)
                yield from self._read_message("")
            else:
                self._emit_text(self._next)
                yield from self._advance()

    def _read_message(self, raw: str, known: Header = NOTHING_KNOWN) -> Reading:
        """Read the rest of a header, and the message's content. ``raw`` is what was read of the
        header, and ``known`` is what the prompt has of it."""
        header = yield from self._read_header(raw, known)
        if header is not None:
            yield from self._read_content(header)

    def _read_header(self, raw: str, known: Header) -> Generator[None, str, Header | None]:
        """Read a header and the marker behind it. If it turns out to be no header, what was read
        becomes text, and None is returned."""
        channel, recipient = known.channel, known.recipient
        while len(raw) <= HEADER_CHARS_MAX:
            raw += yield from self._skip_space()
            marker = yield from self._try_markers((MESSAGE, CHANNEL, CONSTRAIN, RECIPIENT))
            if marker == MESSAGE:
                return Header(channel, recipient, raw + marker)
            word = (yield from self._read_word()) if marker or channel else ""
            raw += marker + word
            if not word:
                break
            channel = word if marker == CHANNEL else channel
            recipient = word if marker == RECIPIENT else recipient
        self._emit_text(raw)
        return None

    def _read_content(self, header: Header) -> Reading:
        """Read a message up to the marker that ends it, or to where another one begins."""
        is_function = header.recipient.startswith(FUNCTIONS)
        if is_function and self._form.tools is ToolFormat.CHANNELS:
            yield from self._read_call(header)
        elif header.channel == REASONING_CHANNEL and not is_function:
            apart, self._has_reasoning = APART * self._has_reasoning, True
            yield from self._read_part(apart, self._emit_reasoning)
        else:
            if header.recipient:
                self._emit_text(header.raw)
            apart, self._has_text = APART * self._has_text, True
            yield from self._read_part(apart, self._emit_text)

    def _read_call(self, header: Header) -> Reading:
        """Read the arguments of a call. If they are no JSON object, header and content are text."""
        raw = header.raw + (yield from self._skip_space())
        yield from self._try_call(raw, header.recipient.removeprefix(FUNCTIONS))
        yield from self._skip_space()
        yield from self._read_part("", self._emit_text)

    def _read_part(self, apart: str, emit: Callable[[str], None]) -> Reading:
        """Read a message's content. ``apart`` comes before its first character."""
        while self._next:
            marker = ""
            if self._next == CHANNEL_ENDS[0][0]:
                marker = yield from self._try_markers((*CHANNEL_ENDS, START))
            if marker == START:
                self._unread(marker)
            if marker:
                return
            emit(apart + self._next)
            apart = ""
            yield from self._advance()

    def _emit_reasoning(self, text: str) -> None:
        self._reasoning.append(text)


def _known(header: str) -> Header:
    """Return what the prompt's part of a header says."""
    channel, recipient = CHANNEL_NAME.search(header), RECIPIENT_NAME.search(header)
    return Header(channel[1] if channel else "", recipient[1] if recipient else "", "")
