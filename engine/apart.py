"""A choice's tokens, as they come from the core, with its answer told apart.

Rule: one event goes in and one comes out, so that a stream's credit counts on; what is held back
comes with a later one, or at the end.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.answers import AnswerParser
from engine.core.events import Tokens
from engine.requests import AnswerTokens, ToolCallDelta

if TYPE_CHECKING:
    from engine.answers import AnswerFormat, ToolCall
    from engine.core.types import RequestId


class Apart:
    """One choice's answer as it is told apart. ``name`` makes its calls' ids, all different."""

    def __init__(self, form: AnswerFormat, name: str) -> None:
        self._parser = AnswerParser(form)
        self._name = name
        self._num_calls = 0

    def take(self, event: Tokens) -> AnswerTokens:
        """The event in place of ``event``."""
        parts = self._parser.feed(event.text)
        calls = tuple([self._delta(call) for call in parts.calls])
        return AnswerTokens.of(event._replace(text=parts.text), parts.reasoning, calls)

    def end(self, request_id: RequestId, choice: int) -> AnswerTokens | None:
        """What was held back to the end; None: nothing."""
        parts = self._parser.close()
        if not any(parts):
            return None
        calls = tuple([self._delta(call) for call in parts.calls])
        return AnswerTokens.of(Tokens(request_id, choice, (), parts.text), parts.reasoning, calls)

    def _delta(self, call: ToolCall) -> ToolCallDelta:
        """The model's own id if it has one, else nine letters and digits: what Mistral's templates
        ask of an id, and good for all others."""
        position, self._num_calls = self._num_calls, self._num_calls + 1
        digest = blake2b(f"{self._name}/{position}".encode()).hexdigest()[:9]
        return ToolCallDelta(position, call.call_id or digest, call.name, call.arguments_json)
