"""Makes the grammar of the reasoning before a part of an answer whose form is enforced.

Rule: whatever these rules allow before the part, the format's
`engine.requests.text.answers.reader.AnswerReader` reads as reasoning or drops.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from engine.requests.text.answers.dialects import (
    ANALYSIS,
    ASSISTANT,
    CHANNEL,
    CHANNEL_ENDS,
    MESSAGE,
    START,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.requests.text.answers.format import AnswerFormat

    FindId = Callable[[str], int | None]


def lead_rules(
    form: AnswerFormat, find_id: FindId, part: str, *, is_required: bool = False
) -> list[str]:
    """Return the rules of a whole answer, which is reasoning, if the model reasons, and ``part``,
    the right side of a rule. Of an answer in channels the part begins with its message's channel.
    With ``is_required`` the model must reason.

    ``find_id`` returns the id of a text that is one token of its own in the model's vocabulary.
    """
    may = "" if is_required else "?"
    if form.has_channels:
        thought = _thought(CHANNEL_ENDS[0], find_id)
        begin = f'{marker(CHANNEL, find_id)} "{ANALYSIS}" {marker(MESSAGE, find_id)}'
        again = f'{marker(START, find_id)} "{ASSISTANT}"'
        if form.begins_inside:
            return [f"start: thought {again} {part}", thought]
        return [f"start: ({begin} thought {again}){may} {part}", thought]
    if form.reasoning is None:
        return [f"start: {part}"]
    opening, closing, _ = form.reasoning
    rules = [r"reasoning: thought /[ \n]{1,4}/?", _thought(closing, find_id)]
    if form.begins_inside:
        return [f"start: reasoning {part}", *rules]
    return [f"start: ({marker(opening, find_id)} reasoning){may} {part}", *rules]


def _thought(end: str, find_id: FindId) -> str:
    """Return the rule of any text up to a marker, with the marker."""
    token_id = find_id(end)
    if token_id is not None:
        return rf"thought: /(.|\n)*/ <[{token_id}]>"
    escaped = re.escape(end).replace("/", r"\/")
    return rf"thought[lazy]: /(.|\n)*{escaped}/"


class Rules:
    """The rules of a grammar. Their names begin with ``prefix`` or, if they are terminals, with its
    capitals."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._by_name: dict[str, str] = {}

    def add(self, right: str, *, is_terminal: bool = False) -> str:
        """Add a rule and return its name."""
        name = f"{self._prefix}_{len(self._by_name)}"
        if is_terminal:
            name = name.upper()
        self._by_name[name] = right
        return name

    def put(self, name: str, right: str) -> None:
        """Give a rule that was added another right side."""
        self._by_name[name] = right

    @property
    def lines(self) -> list[str]:
        """The rules' texts."""
        return [f"{name}: {right}" for name, right in self._by_name.items()]


def marker(text: str, find_id: FindId) -> str:
    """Return a marker as a grammar has it: by its id if it is one token, otherwise by its text."""
    token_id = find_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def with_escaped_slashes(pattern: str) -> str:
    """Return a regular expression as it stands between the slashes of a grammar."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def literal(text: str) -> str:
    """Return a text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)
