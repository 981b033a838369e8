"""The table of tool dialects: how each family of models writes its tool calls.

A row says by which texts of a chat template a dialect is recognised, and how its calls are written.
`engine.requests.text.answers.call_reader` reads calls by the row, and
`engine.requests.text.answers.tool_grammar` makes of it the grammar of an answer that must be a
call. In a row's patterns, a slot is a name in braces:

    {name}        the function's name, as it is
    {id}          the call's id, as it is
    {object}      a JSON object of the row's form: the name and the arguments
    {arguments}   the arguments as a JSON object
    {parameters}  the arguments one by one, each in the form's ``parameter``: a {key} and a {value},
                  which is text if it is a string, and JSON or a Python literal otherwise
    {keywords}    the arguments one by one in the row's notation: keyword arguments of Python, or
                  Gemma's pairs

What stands in ‹› may be missing. A line break is written as in the pattern, and read as any
whitespace or none, as is the place between two markers; what follows the arguments may be missing.

Sources: the models' published chat templates (llama.cpp has them in models/templates) and, for
templates that write no calls, vLLM's parsers.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# The markers of messages in channels ("harmony").
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|call|>")
RECIPIENT, FUNCTIONS = "to=", "functions."
# Words of their headers: the role, and the channels of reasoning, of calls, and of the answer.
ASSISTANT, ANALYSIS, COMMENTARY, FINAL = "assistant", "analysis", "commentary", "final"
CHANNELS = (ANALYSIS, COMMENTARY, FINAL)

SLOTS = ("name", "id", "object", "arguments", "parameters", "keywords", "key", "value")
# A part of a pattern: a slot, the beginning or end of what may be missing, a line break, a marker
# that may be a token of its own, or other text.
_PART = re.compile(
    rf"\{{(?P<slot>{'|'.join(SLOTS)})\}}|(?P<brace>[‹›])|(?P<space>\n[ \n]*)"
    r"|(?P<marker><[^<>\s={}]+>|\[/?[A-Z_]+\])|(?P<text>[^<\[\n‹›{]+|.)"
)


class Part(NamedTuple):
    """A part of a pattern: a slot of SLOTS, "space" or "text"; ``text`` is how it is written. The
    parts of one ``group`` above 0 may be missing together."""

    kind: str
    text: str
    group: int = 0


class Parameter(NamedTuple):
    """An argument's pattern: the markers before its key, between key and value, and after the
    value. ``is_padded``: a line break on each side of the value belongs to the pattern."""

    opening: str
    middle: tuple[str, ...]
    closing: str
    is_padded: bool


class Notation(NamedTuple):
    """How values are written that are neither JSON nor text: the quotes around strings, whether a
    backslash escapes, and what stands between a keyword and its value."""

    quotes: tuple[str, ...]
    has_escapes: bool
    equals: str


PYTHON = Notation(("'", '"'), True, "=")
GEMMA = Notation(("<escape>",), False, ":")
GEMMA_4 = Notation(('<|"|>',), False, ":")


class Form:
    """How calls are written: what stands around one call, and around all calls of an answer.

    A form without a marker before its first slot is bare: it is read at the answer's beginning
    alone.
    """

    def __init__(
        self,
        call: str,
        *,
        opening: str = "",
        between: str = "",
        closing: str = "",
        parameter: str = "",
        notation: Notation = PYTHON,
    ) -> None:
        self.call = tuple(parts_of(call))
        self.opening = tuple(parts_of(opening))
        self.between = tuple(parts_of(between))
        self.closing = tuple(parts_of(closing))
        self.pattern = tuple(parts_of(parameter))
        self.notation = notation

    @cached_property
    def parameter(self) -> Parameter:
        """The pattern of an argument, for a form with the slot parameters."""
        kinds = [part.kind for part in self.pattern]
        key, value = kinds.index("key"), kinds.index("value")
        texts = [
            "".join(part.text for part in parts if part.kind == "text")
            for parts in (
                self.pattern[:key],
                self.pattern[value:],
            )
        ]
        middle = tuple(part.text for part in self.pattern[key:value] if part.kind == "text")
        return Parameter(texts[0], middle, texts[1], kinds[value - 1] == "space")

    @property
    def first(self) -> str:
        """The marker that begins a form's calls; "" if it is bare."""
        part = (*self.opening, *self.call)[0]
        return part.text if part.kind == "text" and len(part.text) > 1 else ""

    @property
    def ends(self) -> Iterator[str]:
        """The texts with which a call may end, since its last parts may be missing, and all calls
        together."""
        slots = [index for index, part in enumerate(self.call) if part.kind in SLOTS]
        if self.call[slots[-1]].kind in ("object", "arguments"):
            yield "}"
        for part in (*self.call[slots[-1] + 1 :], *self.closing):
            if part.kind == "text":
                yield part.text.strip()

    @property
    def separator(self) -> str:
        """The character that separates two calls; "" if it is whitespace or none."""
        return "".join(part.text for part in self.between if part.kind == "text").strip()

    @property
    def markers(self) -> Iterator[str]:
        """The texts of the form that may be tokens of their own."""
        for part in (*self.opening, *self.call, *self.pattern, *self.closing):
            if part.kind == "text" and len(part.text) > 1:
                yield part.text
        if any(part.kind == "keywords" for part in self.call):
            yield from (quote for quote in self.notation.quotes if len(quote) > 1)


def parts_of(pattern: str) -> Iterator[Part]:
    """Yield the parts of a pattern."""
    group, text = 0, ""
    groups = 0
    for found in _PART.finditer(pattern):
        kind = found.lastgroup
        if kind == "text":
            text += found[0]
            continue
        if text:
            yield Part("text", text, group)
            text = ""
        if kind == "brace":
            groups += found[0] == "‹"
            group = groups if found[0] == "‹" else 0
        elif kind == "slot":
            yield Part(found["slot"], found[0], group)
        else:
            yield Part("space" if kind == "space" else "text", found[0], group)
    if text:
        yield Part("text", text, group)


class Dialect:
    """A row of the table.

    ``signs``: a template is of the dialect if it contains all texts of one of these groups.
    ``write`` is the form in which the model was taught to write calls, and ``read`` are all in
    which it may. ``object`` is the pattern of the slot object. ``id`` is the regular expression of
    an id, and ``call_id`` how the call's id for clients is made of it; "" if it is no id for them.
    """

    def __init__(
        self,
        name: str,
        *signs: tuple[str, ...],
        write: Form | None,
        read: tuple[Form, ...] = (),
        object: str = '{"name": {name}, "arguments": {arguments}}',
        id: str = "[a-zA-Z0-9]{9}",
        call_id: str = "{id}",
    ) -> None:
        self.name = name
        self.signs = signs
        self.write = write
        self.read = read or (() if write is None else (write,))
        self.object = object
        self.id, self.call_id = id, call_id
        self.name_key = re.findall(r'"(\w+)": \{name\}', object)[0]
        self.openings = tuple(dict.fromkeys(form.first for form in self.read if form.first))
        self.bare = tuple(form for form in self.read if not form.first)

    def is_of(self, template: str) -> bool:
        """Return whether a model with this chat template writes the dialect."""
        return any(all(sign in template for sign in group) for group in self.signs)

    @property
    def has_channels(self) -> bool:
        """Whether calls are messages in channels, which no form describes."""
        return self.write is None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of the dialect that may be tokens of their own."""
        return tuple(dict.fromkeys(one for form in self.read for one in form.markers))

    def __repr__(self) -> str:
        return f"<Dialect {self.name}>"


_MISTRAL = (
    Form("{object}", opening="[TOOL_CALLS][", between=", ", closing="]"),
    Form("[TOOL_CALLS]{name}‹[CALL_ID]{id}›‹[ARGS]›{arguments}"),
)


def _listed(call: str, opening: str, closing: str = "]") -> Form:
    return Form(call, opening=opening, between=", ", closing=closing)


_PYTHONIC = _listed("{name}({keywords})", "[")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

DIALECTS = (
    Dialect("channels", (CHANNEL, MESSAGE), write=None),  # GPT-OSS
    Dialect(
        "mistral-ids",  # Mistral Small 3.2
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        write=_MISTRAL[1],
        read=_MISTRAL,
    ),
    Dialect(
        "mistral-named",  # Devstral, Magistral, Ministral 3
        ("[TOOL_CALLS]", "[ARGS]"),
        write=Form("[TOOL_CALLS]{name}[ARGS]{arguments}"),
        read=_MISTRAL,
    ),
    Dialect("mistral", ("[TOOL_CALLS]",), write=_MISTRAL[0], read=_MISTRAL),  # up to Nemo
    Dialect(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        write=Form(
            "<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
        ),
        id="[0-9]{1,4}",
        call_id="functions.{name}:{id}",
    ),
    Dialect(
        "deepseek-v3",  # and R1
        ("<｜tool▁calls▁begin｜>", "```json"),
        write=Form(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            "<｜tool▁call▁end｜>",
            opening=_DEEPSEEK[0],
            between="\n",
            closing=_DEEPSEEK[1],
        ),
    ),
    Dialect(
        "deepseek-v3.1",
        ("<｜tool▁calls▁begin｜>",),
        write=Form(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            opening=_DEEPSEEK[0],
            closing=_DEEPSEEK[1],
        ),
    ),
    Dialect(
        "minimax-m2",
        ("<minimax:tool_call>",),
        write=Form(
            '<invoke name="{name}">\n{parameters}</invoke>\n',
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
            parameter='<parameter name="{key}">{value}</parameter>\n',
        ),
    ),
    Dialect(
        "seed-oss",
        ("<seed:tool_call>",),
        write=Form(
            "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
            between="\n",
            parameter="<parameter={key}>{value}</parameter>\n",
        ),
    ),
    Dialect(
        "glm",  # GLM 4.5 and later
        ("<arg_key>",),
        write=Form(
            "<tool_call>{name}\n{parameters}</tool_call>",
            between="\n",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
    ),
    Dialect(
        "qwen3-coder",  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        ("<tool_call>", "<function="),
        write=Form(
            "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
            between="\n",
            parameter="<parameter={key}>\n{value}\n</parameter>\n",
        ),
    ),
    Dialect(
        "cohere",  # Command R7B, Command A
        ("<|START_ACTION|>",),
        write=Form(
            "{object}",
            opening="<|START_ACTION|>[\n    ",
            between=",\n    ",
            closing="\n]<|END_ACTION|>",
        ),
        object='{"tool_call_id": "{id}", "tool_name": {name}, "parameters": {arguments}}',
        id="[0-9]{1,4}",
        call_id="",  # it begins from 0 in every conversation
    ),
    Dialect(
        "gemma",  # FunctionGemma (Gemma 3)
        ("<start_function_call>",),
        write=Form(
            "<start_function_call>call:{name}{{keywords}}<end_function_call>", notation=GEMMA
        ),
    ),
    Dialect(
        "gemma4",
        ("<|tool_call>",),
        write=Form("<|tool_call>call:{name}{{keywords}}<tool_call|>", notation=GEMMA_4),
    ),
    Dialect(
        "lfm2",
        ("<|tool_call_start|>",),
        ("<|tool_list_start|>",),
        ("List of tools: [",),
        write=_listed("{name}({keywords})", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    ),
    Dialect(
        "phi-4",  # Phi-4-mini
        ("functools",),
        write=_listed("{object}", "functools["),
        read=(
            _listed("{object}", "functools["),
            _listed("{object}", "<|tool_call|>[", "]<|/tool_call|>"),
        ),
    ),
    Dialect(
        "phi-4-marked",
        ("<|/tool|>",),
        ("<|/tool_call|>",),
        write=_listed("{object}", "<|tool_call|>[", "]<|/tool_call|>"),
    ),
    Dialect(
        "granite",  # Granite 3; Granite 4 writes Hermes' form
        ("<|tool_call|>",),
        write=_listed("{object}", "<|tool_call|>["),
        read=(
            _listed("{object}", "<|tool_call|>["),
            _listed("{object}", "<tool_call>["),
        ),
    ),
    Dialect(
        "hermes",  # Hermes, Qwen 2.5 and 3, Granite 4
        ("<tool_call>",),
        write=Form("<tool_call>\n{object}\n</tool_call>", between="\n"),
    ),
    Dialect(
        "pythonic",  # Llama 3.2 and 4, Gemma 3 by a template that says so
        ("func_name1(",),
        ("<|python_start|>",),
        write=_PYTHONIC,
        read=(
            _PYTHONIC,
            _listed("{name}({keywords})", "<|python_tag|>["),
            _listed("{name}({keywords})", "<|python_start|>[", "]<|python_end|>"),
        ),
    ),
    Dialect(
        "llama",  # Llama 3.1 to 3.3; further calls after ";"
        ("<|python_tag|>",),
        ('"parameters": dictionary of argument',),
        write=Form("{object}", between="; "),
        read=(
            Form("{object}", between="; "),
            Form("{object}", opening="<|python_tag|>", between="; "),
        ),
        object='{"name": {name}, "parameters": {arguments}}',
    ),
)
NAMES = tuple(dialect.name for dialect in DIALECTS)


def find_dialect(template: str) -> Dialect | None:
    """Return the first dialect of a chat template; None if it has none of them."""
    return next((dialect for dialect in DIALECTS if dialect.is_of(template)), None)


def dialect_named(name: str) -> Dialect:
    """Return a row of the table."""
    return DIALECTS[NAMES.index(name)]
