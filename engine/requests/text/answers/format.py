"""Recognises, by a model's chat template, how the model writes its answers.

The formats:

    HERMES     <tool_call>{"name": …, "arguments": {…}}</tool_call>     Hermes, Qwen 2.5 and 3
    LLAMA      {"name": …, "parameters": {…}} as the answer's beginning, Llama 3.1 to 3.3
               or after <|python_tag|>; further calls after ";"
    MISTRAL    [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or         Mistral
               [TOOL_CALLS]name[ARGS]{…}
    reasoning  <think>…</think> as the answer's beginning, or another pair of `REASONING`;
               the template may have opened it
    text       <answer>…</answer> behind the reasoning, or another pair of `ANSWERS`; the template
               may have opened it
    CHANNELS   messages with headers, <|channel|>NAME<|message|>…<|end|>,  GPT-OSS
               whose channel says what is reasoning (engine.requests.text.answers.channel_parser)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
# The markers of messages in channels ("harmony").
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|call|>")
RECIPIENT, FUNCTIONS = "to=", "functions."
MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class ToolFormat(Enum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    CHANNELS = "channels"


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

_OPENINGS = {
    ToolFormat.HERMES: HERMES_OPEN,
    ToolFormat.LLAMA: PYTHON_TAG,
    ToolFormat.MISTRAL: MISTRAL_OPEN,
}
_MARKERS = {
    ToolFormat.HERMES: (HERMES_OPEN, HERMES_CLOSE),
    ToolFormat.LLAMA: (PYTHON_TAG,),
    ToolFormat.MISTRAL: (MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGS),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Says what to look for in an answer: calls of the functions ``names``, and the markers around
    its reasoning and around its text. ``has_channels``: the answer is messages in channels.
    ``opened`` is what the prompt's end has opened: the marker of a part, or the header of the first
    message."""

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    reasoning: Pair | None = None
    answer: Pair | None = None
    has_channels: bool = False
    opened: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is text, so that no parser is needed."""
        return not (self.tools or self.reasoning or self.answer or self.has_channels)

    @property
    def begins_inside(self) -> bool:
        """Whether the answer begins inside the reasoning."""
        return self.reasoning is not None and self.opened == self.reasoning.opening

    @property
    def opening(self) -> str:
        """The marker that opens a tool call, or "" if there are no calls to parse."""
        return "" if self.tools is None else _OPENINGS.get(self.tools, "")

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings to look for. Where the model has one as a special token, the detokeniser
        must not leave it out."""
        if self.has_channels:
            return (START, CHANNEL, MESSAGE, CONSTRAIN, *CHANNEL_ENDS)
        of_tools = () if self.tools is None else _MARKERS[self.tools]
        pairs = [pair for pair in (self.reasoning, self.answer) if pair is not None]
        return of_tools + tuple(marker for pair in pairs for marker in pair[:2])


PLAIN = AnswerFormat()


def detect_format(
    template: str, *, names: Iterable[str] = (), prompt: str, constraint: str | None = None
) -> AnswerFormat:
    """Return the format in which a model with this chat template answers.

    ``names`` are those of the tools that the request offers; only calls of these are parsed.
    ``prompt`` is the text that the template rendered for the request: if it ends with the marker
    that opens the reasoning or the text, the answer begins inside it. ``constraint`` is the source
    of the answer's grammar: the whole answer is then text, unless the source contains the marker
    that ends the reasoning or names a channel.
    """
    offered = frozenset(names)
    has_channels = CHANNEL in template and MESSAGE in template
    reasoning, opened = _find_pair(REASONING, template, prompt)
    answer, answer_opened = _find_pair(ANSWERS, template, prompt)
    if constraint is not None:
        offered, answer = frozenset(), None
        ending = CHANNEL if has_channels else reasoning.closing if reasoning else None
        if ending is None or ending not in constraint:
            return PLAIN
    if has_channels:
        opened = START + prompt.rpartition(START)[2] if START in prompt else ""
        tools = ToolFormat.CHANNELS if offered else None
        return AnswerFormat(tools, offered, has_channels=True, opened=opened)
    return AnswerFormat(
        tools=_tool_format(template) if offered else None,
        names=offered,
        reasoning=reasoning,
        answer=answer,
        opened=opened or answer_opened,
    )


def _find_pair(pairs: Iterable[Pair], template: str, prompt: str) -> tuple[Pair | None, str]:
    """Return the pair of markers that the model writes, and its opening if the prompt has it at its
    end."""
    end = prompt.rstrip()
    for pair in pairs:
        if end.endswith(pair.opening) and pair.is_of(template):
            return pair, pair.opening
    return next((pair for pair in pairs if pair.is_of(template)), None), ""


def _tool_format(template: str) -> ToolFormat | None:
    if MISTRAL_OPEN in template:
        return ToolFormat.MISTRAL
    if HERMES_OPEN in template:
        return ToolFormat.HERMES
    if PYTHON_TAG in template or '"parameters": dictionary of argument' in template:
        return ToolFormat.LLAMA
    return None
