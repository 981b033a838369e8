"""Parses the answer of one choice, event by event.

Rule: each event from the core becomes exactly one event, so that the stream's message slots are
counted right. Text that the parser holds back comes with a later event, at the latest with the last
tokens: a client that has these has all of the choice's text, even without its end.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import add
from typing import TYPE_CHECKING

from engine.requests.text.answers.channel_parser import ChannelParser
from engine.requests.text.answers.parser import AnswerParser
from engine.requests.text.answers.reader import Parts
from engine.requests.text.values import AnswerTokens, ToolCallDelta

if TYPE_CHECKING:
    from engine.core.text.types import Tokens
    from engine.requests.text.answers.format import AnswerFormat
    from engine.requests.text.answers.reader import AnswerReader, ToolCall


def parser_of(form: AnswerFormat) -> AnswerReader:
    """Return a parser of one answer in a format."""
    return ChannelParser(form) if form.has_channels else AnswerParser(form)


class ChoiceParser:
    """Parses one choice's answer. The ids of its calls are made from ``name``, which no other
    choice has."""

    def __init__(self, form: AnswerFormat, name: str) -> None:
        self._parser = parser_of(form)
        self._name = name
        self._num_calls = 0

    def take(self, event: Tokens) -> AnswerTokens:
        """Return the event to send in place of ``event``."""
        parts = self._parser.feed(event.text)
        if event.is_last:
            parts = Parts(*map(add, parts, self._parser.close()))
        calls = tuple([self._delta(call) for call in parts.calls])
        return AnswerTokens.of(event._replace(text=parts.text), parts.reasoning, calls)

    def skip(self, text: str) -> None:
        """Read text that the client has already: what follows is parsed as its continuation."""
        self._num_calls += sum([bool(call.name) for call in self._parser.feed(text).calls])

    def _delta(self, call: ToolCall) -> ToolCallDelta:
        """Return the call with an id: the model's own, or else nine letters and digits, which
        Mistral's templates require and all others accept. A part without a name continues the last
        call."""
        if not call.name:
            return ToolCallDelta(self._num_calls - 1, "", "", call.arguments_json)
        position, self._num_calls = self._num_calls, self._num_calls + 1
        digest = blake2b(f"{self._name}/{position}".encode()).hexdigest()[:9]
        return ToolCallDelta(position, call.call_id or digest, call.name, call.arguments_json)
