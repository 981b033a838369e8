"""Recognises, by a model's chat template, how the model writes its answers.

The formats:

    HERMES     <tool_call>{"name": …, "arguments": {…}}</tool_call>     Hermes, Qwen 2.5 and 3
    LLAMA      {"name": …, "parameters": {…}} as the answer's beginning, Llama 3.1 to 3.3
               or after <|python_tag|>; further calls after ";"
    MISTRAL    [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or         Mistral
               [TOOL_CALLS]name[ARGS]{…}
    reasoning  <think>…</think> as the answer's beginning; the template may have opened it
    CHANNELS   messages with headers, <|channel|>NAME<|message|>…<|end|>,  GPT-OSS
               whose channel says what is reasoning (engine.requests.channel_parser)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

THINK, END_THINK = "<think>", "</think>"
HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
# Of messages in channels ("harmony").
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
    """Says what to look for in an answer. ``begins_inside``: the prompt ends with the marker that
    opens the reasoning, so that the answer begins inside it. ``has_channels``: the answer is
    messages in channels. ``opened`` is what the prompt's end has of the first one."""

    tools: ToolFormat | None = None
    reasons: bool = False
    begins_inside: bool = False
    has_channels: bool = False
    opened: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is text, so that no parser is needed."""
        return self.tools is None and not self.reasons and not self.has_channels

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
        return of_tools + ((THINK, END_THINK) if self.reasons else ())


PLAIN = AnswerFormat()


def detect_format(
    template: str, *, has_tools: bool, prompt: str, constraint: str | None = None
) -> AnswerFormat:
    """Return the format in which a model with this chat template answers.

    Tool calls are parsed only if the request offers tools. ``prompt`` is the text that the template
    rendered for the request: if it ends with the marker that opens the reasoning, the answer begins
    inside the reasoning. ``constraint`` is the source of the answer's grammar: the whole answer is
    then text, unless the source contains the marker that ends the reasoning or names a channel.
    """
    has_channels = CHANNEL in template and MESSAGE in template
    if constraint is not None:
        has_tools = False
        if (CHANNEL if has_channels else END_THINK) not in constraint:
            return PLAIN
    if has_channels:
        opened = START + prompt.rpartition(START)[2] if START in prompt else ""
        tools = ToolFormat.CHANNELS if has_tools else None
        return AnswerFormat(tools, has_channels=True, opened=opened)
    reasons = END_THINK in template
    return AnswerFormat(
        tools=_tool_format(template) if has_tools else None,
        reasons=reasons,
        begins_inside=reasons and prompt.rstrip().endswith(THINK),
    )


def _tool_format(template: str) -> ToolFormat | None:
    if MISTRAL_OPEN in template:
        return ToolFormat.MISTRAL
    if HERMES_OPEN in template:
        return ToolFormat.HERMES
    if PYTHON_TAG in template or '"parameters": dictionary of argument' in template:
        return ToolFormat.LLAMA
    return None
