"""Recognises, by a model's chat template, how the model writes its answers.

An answer may have these parts:

    calls      in a dialect of the table (`engine.requests.text.answers.dialects`)
    reasoning  <think>…</think> as the answer's beginning, or another pair of `REASONING`;
               the template may have opened it
    text       <answer>…</answer> behind the reasoning, or another pair of `ANSWERS`; the template
               may have opened it
    messages   with headers, <|channel|>NAME<|message|>…<|end|>,  GPT-OSS
               whose channel says what is reasoning (engine.requests.text.answers.channel_parser)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.requests.text.answers.dialects import (
    ANALYSIS,
    CHANNEL,
    CHANNEL_ENDS,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    START,
    dialect_named,
    find_dialect,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine.requests.text.answers.dialects import Dialect

    Functions = Mapping[str, Mapping[str, Any]]


class Pair(NamedTuple):
    """The markers around a part of an answer. A model writes them if its template has one of them
    or of ``signs``."""

    opening: str
    closing: str
    signs: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        """Return whether the model of this template writes the markers."""
        return any(sign in template for sign in (self.opening, self.closing, *self.signs))


# Hunyuan's templates need not have the markers of its answers.
_HUNYUAN = ("<｜hy_Assistant｜>", "<|extra_0|>")
REASONING = (
    Pair("<think>", "</think>", _HUNYUAN),  # Qwen 3, DeepSeek's distilled models, and most others
    Pair("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Pair("<seed:think>", "</seed:think>"),  # Seed-OSS
    Pair("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere 2
)
ANSWERS = (
    Pair("<answer>", "</answer>", _HUNYUAN),
    Pair("<response>", "</response>"),  # ERNIE 4.5 Thinking, Granite 3
    Pair("<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Cohere 2
)

# The header of a message that is reasoning, up to the message, as
# `engine.requests.text.answers.channel_parser` reads it: behind the channel there may be recipients
# and one type. The group is the recipient of a call, which is none.
_WORD = rf"(?!{RECIPIENT})[\w.-]++"
_REST = rf"(?:\s|{RECIPIENT}(?!{re.escape(FUNCTIONS)})[\w.-]*+|{re.escape(CONSTRAIN)}[\w.-]*+)*+"
_HEADER = rf"(?:[\w.\s-]|{re.escape(CHANNEL)}|{re.escape(CONSTRAIN)})*?"
_FREE = rf"[^\s\w.<-]|<(?!\||\Z)|(?<=\s)(?!t(?:o=?)?\Z|{RECIPIENT})[\w.-]"
REASONING_HEADER = re.compile(
    rf"(?P<call>{RECIPIENT}{re.escape(FUNCTIONS)}{_HEADER})?"
    rf"{re.escape(CHANNEL)}\s*+{ANALYSIS}(?![\w.-])"
    rf"{_REST}(?:{_WORD}{_REST})?+(?:{re.escape(MESSAGE)}|(?={_FREE}))"
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Says what to look for in an answer: calls of ``functions`` in the dialect ``tools``, and the
    markers around its reasoning and around its text. ``functions`` has the schema of each
    function's arguments by its name. ``has_channels``: the answer is messages in channels.
    ``opened`` is what the prompt's end has opened: the marker of a part, or the header of the first
    message. ``streams_arguments``: a call's arguments come as they are generated.

    ``is_behind``: the reasoning, if there was any, has ended in the prompt."""

    tools: Dialect | None = None
    functions: Functions = field(default_factory=dict, hash=False)
    reasoning: Pair | None = None
    answer: Pair | None = None
    has_channels: bool = False
    opened: str = ""
    streams_arguments: bool = False
    is_behind: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is text, so that no parser is needed."""
        return not (self.tools or self.reasoning or self.answer or self.has_channels)

    @property
    def reasons(self) -> bool:
        """Whether reasoning can be told from the rest of the answer."""
        return self.has_channels or self.reasoning is not None

    @property
    def marks_end(self) -> str:
        """What a grammar spells that has the reasoning's end in it: the marker of channels, or the
        one that closes the reasoning. Empty without reasoning."""
        if self.has_channels:
            return CHANNEL
        return "" if self.reasoning is None else self.reasoning.closing

    @property
    def begins_inside(self) -> bool:
        """Whether the answer begins inside the reasoning."""
        if self.has_channels:
            return ANALYSIS in self.opened.partition(MESSAGE)[0] and MESSAGE in self.opened
        return self.reasoning is not None and self.opened == self.reasoning.opening

    @property
    def opens_again(self) -> re.Pattern[str] | None:
        """What opens reasoning behind the answer's beginning, as
        `engine.core.text.types.Reasoning` has it; None if nothing does.

        In the text, an end of a call that is no marker, such as "}", counts where the marker that
        opens the call is in sight (`engine.core.text.thought.OPENING_CHARS`). Which functions were
        offered is not looked at: what stands between markers of reasoning behind a call of another
        function is counted and bounded, although the parser reads it as text.
        """
        if self.has_channels:
            return REASONING_HEADER
        if self.reasoning is None or self.tools is None:
            return None
        ends = {_end_of(form.first, end) for form in self.tools.read for end in form.ends}
        return re.compile(rf"(?:{'|'.join(sorted(ends))})\s*{re.escape(self.reasoning.opening)}")

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings to look for. Where the model has one as a special token, the detokeniser
        must not leave it out."""
        if self.has_channels:
            return (START, CHANNEL, MESSAGE, CONSTRAIN, *CHANNEL_ENDS)
        of_tools = () if self.tools is None else self.tools.markers
        pairs = [pair for pair in (self.reasoning, self.answer) if pair is not None]
        return of_tools + tuple(marker for pair in pairs for marker in pair[:2])


PLAIN = AnswerFormat()


def detect_format(
    template: str,
    *,
    functions: Functions | None = None,
    prompt: str,
    constraint: str | None = None,
    tool_format: str = "auto",
) -> AnswerFormat:
    """Return the format in which a model with this chat template answers.

    ``functions`` are those that the request offers; only calls of these are parsed, in the dialect
    ``tool_format``; "auto" is the template's. ``prompt`` is the text that the
    template rendered for the request: if it ends with the marker that opens the reasoning or the
    text, the answer begins inside it. ``constraint`` is the source of the answer's grammar: the
    whole answer is then text, unless the source contains the marker that ends the reasoning or
    names a channel.
    """
    offered = functions or {}
    has_channels = CHANNEL in template and MESSAGE in template
    reasoning, opened = _find_pair(REASONING, template, prompt)
    answer, answer_opened = _find_pair(ANSWERS, template, prompt)
    if constraint is not None:
        offered, answer = {}, None
        ending = AnswerFormat(reasoning=reasoning, has_channels=has_channels).marks_end
        if not ending or ending not in constraint:
            return PLAIN
    tools = None
    if offered:
        tools = find_dialect(template) if tool_format == "auto" else dialect_named(tool_format)
        has_channels = has_channels if tools is None else tools.has_channels
    if has_channels:
        opened = START + prompt.rpartition(START)[2] if START in prompt else ""
        form = AnswerFormat(tools, offered, has_channels=True, opened=opened)
        return replace(form, is_behind=MESSAGE in opened and not form.begins_inside)
    return AnswerFormat(
        tools=tools,
        functions=offered,
        reasoning=reasoning,
        answer=answer,
        opened=opened or answer_opened,
        is_behind=bool(answer_opened)
        or (reasoning is not None and prompt.rstrip().endswith(reasoning.closing)),
    )


def _end_of(opening: str, end: str) -> str:
    """Return the pattern of a text that ends calls: with the call itself if the text is no marker.
    Calls without an opening marker cannot be told from other text."""
    if not opening or (len(end) > 1 and end[0] in "<["):
        return re.escape(end)
    begin = re.escape(opening)
    return rf"{begin}(?:\"(?:[^\"\\]|\\.)*+\"|(?!{begin})[^\"])*?{re.escape(end)}"


def _find_pair(pairs: Iterable[Pair], template: str, prompt: str) -> tuple[Pair | None, str]:
    """Return the pair of markers that the model writes, and its opening if the prompt has it at its
    end."""
    end = prompt.rstrip()
    for pair in pairs:
        if end.endswith(pair.opening) and pair.is_of(template):
            return pair, pair.opening
    return next((pair for pair in pairs if pair.is_of(template)), None), ""
