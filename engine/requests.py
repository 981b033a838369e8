"""What a client asks for and what it hears back: the public values of the engine.

Rule 1: None means unset; the model's generation_config fills it, then the usual default
(`resolve_sampling`). Rule 2: `GenerateRequest.validate` costs constant time per field and
lists every broken field by its proto path; nothing behind it checks ranges again.
Source: the comments in inference.proto (ranges, defaults).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.events import Finished, Tokens
from engine.core.types import Constraint, Sampling, Stops
from engine.errors import FieldViolation, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine.core.plan import ModelInfo, SamplingDefaults
    from engine.core.types import TokenLogprob

# The proto tells clients these; guesses, but for the alternatives, which are vLLM's default.
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 65_536  # entries and alternatives together: 0.1 s to encode; guess
MAX_BIAS = 100.0  # OpenAI's
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_CONSTRAINT_CHARS = 65_536  # guess: a schema of a thousand properties has half of it
CONSTRAINT_KINDS = frozenset({"json_schema", "json_object", "regex", "lark", "choice"})
MAX_REQUEST_ID_CHARS = 128  # guess: room for two UUIDs and a prefix
INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The request's sampling, every scalar optional. Ranges are checked by `violations`."""

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()

    def violations(self) -> Iterator[FieldViolation]:
        """Every field outside its documented range, by proto path."""
        for name, low, high, low_open in (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("typical_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.0, math.inf, True),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        ):
            value = getattr(self, name)
            if value is not None:
                yield from _outside(f"sampling.{name}", value, low, high, low_open=low_open)
        if self.max_tokens is not None and self.max_tokens < 1:
            yield FieldViolation("sampling.max_tokens", "must be at least 1")
        if (
            self.min_tokens is not None
            and self.max_tokens is not None
            and self.min_tokens > self.max_tokens
        ):
            yield FieldViolation("sampling.min_tokens", "must not exceed max_tokens")
        yield from _texts_outside("sampling.stop", self.stop, MAX_STOPS)
        yield from _texts_outside("sampling.bad_words", self.bad_words, MAX_BAD_WORDS)
        if (count := len(self.logit_bias)) > MAX_BIASES:
            yield FieldViolation("sampling.logit_bias", f"has {count} of at most {MAX_BIASES}")
        for token_id, bias in self.logit_bias[:MAX_BIASES]:
            path = f"sampling.logit_bias[{token_id}]"
            yield from _outside(path, bias, -MAX_BIAS, MAX_BIAS, low_open=False)


def _texts_outside(path: str, texts: Sequence[str], most: int) -> Iterator[FieldViolation]:
    """Too many texts, and those that are empty or too long."""
    if len(texts) > most:
        yield FieldViolation(path, f"has {len(texts)} of at most {most}")
    for index, text in enumerate(texts[:most]):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            what = f"must have 1 to {MAX_STOP_CHARS} characters"
            yield FieldViolation(f"{path}[{index}]", what)


def _outside(
    path: str, value: float, low: float, high: float, *, low_open: bool
) -> Iterator[FieldViolation]:
    inside = (low < value if low_open else low <= value) and value <= high
    if inside and math.isfinite(value):
        return
    bracket = "(" if low_open else "["
    top = "∞)" if math.isinf(high) else f"{high:g}]"
    yield FieldViolation(path, f"is {value:g}, outside {bracket}{low:g}, {top}")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's own chat template: dicts with role and content, an assistant's
    perhaps with tool_calls, a tool's with tool_call_id, all in transformers' (OpenAI's) form; and
    ``tools`` in the same form, ``{"type": "function", "function": {…}}``.

    ``shifts``: where the chat leaves too little room for an answer, turns are left out
    (`engine.shift`), and `Started.dropped` has them.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    shifts: bool = False


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What is done to the prompt before it is computed."""

    truncate_to: int | None = None
    truncate_left: bool | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a stream carries besides text."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One Generate call. Exactly one of ``text``, ``token_ids`` and ``chat`` is set.

    ``timeout_s`` is what is left of the client's deadline, None for none. ``request_id`` empty:
    the engine makes one.
    """

    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int | None = None
    priority: int | None = None
    request_id: str = ""
    constraint: Constraint | None = None
    prompt: PromptOptions = field(default_factory=PromptOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    timeout_s: float | None = None

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: with one violation per broken field.
        """
        found = [*self._violations(), *self.sampling.violations()]
        if found:
            raise InvalidRequest(found)

    def _violations(self) -> Iterator[FieldViolation]:
        given = [x for x in (self.text, self.token_ids, self.chat) if x is not None]
        if len(given) != 1:
            yield FieldViolation("input", "set exactly one of text, token_ids and chat")
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            yield FieldViolation("n", f"is {self.n}, outside [1, {MAX_CHOICES}]")
        if self.priority is not None and not INT32[0] <= self.priority <= INT32[1]:
            yield FieldViolation("priority", "is not an int32")
        if len(self.request_id) > MAX_REQUEST_ID_CHARS or not self.request_id.isprintable():
            yield FieldViolation(
                "request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
            )
        if self.constraint is not None:
            yield from _constraint_violations(self.constraint)
        if self.timeout_s is not None and math.isnan(self.timeout_s):
            yield FieldViolation("timeout_s", "is not a number")
        if self.prompt.truncate_to is not None and self.prompt.truncate_to < 1:
            yield FieldViolation("prompt.truncate_to", "must be at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self.output, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                yield FieldViolation(f"output.{name}", f"is {value}, outside [0, {MAX_LOGPROBS}]")


def _constraint_violations(constraint: Constraint) -> Iterator[FieldViolation]:
    size = len(constraint.source)
    if constraint.kind not in CONSTRAINT_KINDS:
        yield FieldViolation("constraint", f"is of no known kind: {constraint.kind!r}")
    elif size > MAX_CONSTRAINT_CHARS:
        what = f"has {size} characters, of at most {MAX_CONSTRAINT_CHARS}"
        yield FieldViolation(constraint.field, what)
    elif not size and constraint.kind not in ("json_object", "choice"):
        yield FieldViolation(constraint.field, "is empty")


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a stream: the request is admitted.

    Where ``prompt_logprobs`` are asked for it comes with the first token, as they do. ``dropped``
    are the messages that a chat that shifts was shortened by, oldest first.
    """

    request_id: str
    model: str
    prompt_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    dropped: tuple[Mapping[str, Any], ...] = ()


class ToolCallDelta(NamedTuple):
    """A tool call, or what one grew by: its place among the choice's, its id and name (empty
    after the first part), and text to append to its arguments, a JSON object."""

    position: int
    call_id: str
    name: str
    arguments_json: str


class AnswerTokens(Tokens):
    """What one step gave one choice of a chat, told apart: ``text`` is the answer's alone.

    ``reasoning`` and ``tool_calls`` are what the model put beside it (`engine.answers`).
    """

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def of(
        cls, tokens: Tokens, reasoning: str = "", tool_calls: tuple[ToolCallDelta, ...] = ()
    ) -> AnswerTokens:
        """``tokens`` with more beside their text."""
        event = cls(*tokens)
        event.reasoning, event.tool_calls = reasoning, tool_calls
        return event

    def __repr__(self) -> str:
        beside = f"reasoning={self.reasoning!r}, tool_calls={self.tool_calls!r}"
        return f"{super().__repr__()[:-1]}, {beside})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AnswerTokens)
            and tuple(self) == tuple(other)
            and (self.reasoning, self.tool_calls) == (other.reasoning, other.tool_calls)
        )

    def __hash__(self) -> int:
        return hash((tuple(self), self.reasoning, self.tool_calls))


StreamEvent = Started | Tokens | Finished


def resolve_sampling(
    params: SamplingParams,
    output: OutputOptions,
    defaults: SamplingDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """Fill what is unset from the model's generation_config, then from the usual defaults.

    ``bad_words`` are the request's as tokens, which only the model's tokenizer knows.
    """

    def pick(name: str, usual: float) -> Any:
        asked = getattr(params, name)
        if asked is not None:
            return asked
        configured = getattr(defaults, name, None)
        return usual if configured is None else configured

    return Sampling(
        temperature=pick("temperature", 1.0),
        top_k=pick("top_k", 0),
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        typical_p=pick("typical_p", 1.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=pick("presence_penalty", 0.0),
        frequency_penalty=pick("frequency_penalty", 0.0),
        seed=params.seed,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        bad_words=bad_words,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )


def resolve_stops(
    params: SamplingParams, output: OutputOptions, info: ModelInfo, num_prompt: int
) -> Stops:
    """The end conditions of a request of ``num_prompt`` tokens.

    ``max_tokens`` unset: the rest of the context; too large: clamped to it.
    """
    room = info.max_model_len - num_prompt
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    asked = params.min_tokens
    eos = frozenset() if params.ignore_eos else info.eos_token_ids
    return Stops(
        max_tokens=max_tokens,
        min_tokens=min(asked if asked is not None else info.defaults.min_tokens or 0, max_tokens),
        strings=params.stop,
        token_ids=eos | frozenset(params.stop_token_ids),
        include=bool(params.include_stop),
        skip_special=output.skip_special_tokens is not False,
    )
