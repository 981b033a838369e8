"""The public values of text models: requests, and the events that answer them.

Rule 1: None means unset; `engine.requests.text.resolve` fills unset fields. Rule 2: ranges that
need no model are checked in one place, `GenerateRequest.validate`, which takes constant time per
field and lists every broken field by its proto path. A request calls it when it is made. One that
was made with ``check=False``, as the gRPC server makes them, is checked by
`engine.requests.supervisor` instead, so that its refusal is an end like any other. Rule 3: types
are converted or refused when a value is made (`engine.requests.field_types`).
Source of ranges and defaults: the comments in inference.proto.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from engine.core.common.events import Finished
from engine.core.common.prompts import PromptProgress
from engine.core.text.types import Constraint, Tokens
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.field_types import (
    CheckedFields,
    TypedFields,
    instance,
    options,
    wrong_type,
)
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import Continuation
from engine.status import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine.core.text.types import TokenLogprob

# The proto documents these limits. All are guesses, except MAX_LOGPROBS, which is vLLM's default.
MAX_CHOICES = 16
TOKEN_ID_BYTES = 40  # memory of a token id: a number, and its place in a tuple
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 65_536  # with the alternatives; a guess: they are encoded in 0.1 s
MAX_BIAS = 100.0  # as in OpenAI's API
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_CONSTRAINT_CHARS = 65_536  # a guess: a schema of a thousand properties has half as many
CONSTRAINT_KINDS = frozenset({"json_schema", "json_object", "regex", "lark", "choice"})
CONSTRAINT_KINDS |= {"structural_tag"}  # for gateways
MAX_RESUME_WINDOW_S = 3600.0  # a guess: a client that is away longer sends a continuation
MAX_REQUEST_ID_CHARS = 128  # a guess: room for two UUIDs and a prefix
INT32 = (-(2**31), 2**31 - 1)

RANGES = (  # a field's least and greatest value, and whether the least itself is excluded
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("typical_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, math.inf, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


@dataclass(frozen=True, slots=True)
class SamplingParams(TypedFields):
    """The sampling options of a request. Every scalar is optional. ``logit_bias`` maps token ids to
    numbers that are added to their logits."""

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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    speculation: bool | None = None

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        for name, low, high, low_open in RANGES:
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
        for token_id, bias in islice(self.logit_bias.items(), MAX_BIASES):
            path = f"sampling.logit_bias[{token_id}]"
            yield from _outside(path, bias, -MAX_BIAS, MAX_BIAS, low_open=False)


def _texts_outside(path: str, texts: Sequence[str], most: int) -> Iterator[FieldViolation]:
    """Yield a violation for too many texts, and for each text that is empty or too long."""
    if len(texts) > most:
        yield FieldViolation(path, f"has {len(texts)} of at most {most}")
    for index, text in enumerate(texts[:most]):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            what = f"must have 1 to {MAX_STOP_CHARS} characters"
            yield FieldViolation(f"{path}[{index}]", what)


def _outside(
    path: str, value: float, low: float, high: float, *, low_open: bool
) -> Iterator[FieldViolation]:
    """Yield a violation unless ``value`` is finite and in the range."""
    inside = (low < value if low_open else low <= value) and value <= high
    if inside and math.isfinite(value):
        return
    bracket = "(" if low_open else "["
    top = "∞)" if math.isinf(high) else f"{high:g}]"
    yield FieldViolation(path, f"is {value:g}, outside {bracket}{low:g}, {top}")


@dataclass(frozen=True, slots=True)
class PromptOptions(TypedFields):
    """Options for preparing and caching the prompt."""

    truncate_to: int | None = None
    truncate_left: bool | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions(TypedFields):
    """Options for what a stream carries besides text."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    tool_argument_deltas: bool | None = None
    progress: bool | None = None


@dataclass(frozen=True, slots=True)
class ReasoningOptions(TypedFields):
    """Whether a model that reasons does so, and for how many tokens; None leaves it to the model.
    Once the budget is spent, the reasoning ends with the next sentence, a quarter of the budget or
    64 tokens later at most."""

    enabled: bool | None = None
    budget_tokens: int | None = None

    @property
    def bounds(self) -> bool:
        """Whether the reasoning has a bound."""
        return self.enabled is False or self.budget_tokens is not None

    def violations(
        self, chat: Chat | None, constraint: Constraint | None
    ) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path, of a request with this chat and constraint."""
        if self.enabled is not None and (chat is None or not chat.opens_turn):
            what = "needs a chat whose template opens the assistant's turn"
            yield FieldViolation("reasoning.enabled", what)
        if self.enabled is False and self.budget_tokens is not None:
            what = "cannot be set where reasoning.enabled is false"
            yield FieldViolation("reasoning.budget_tokens", what)
        if (
            constraint is not None
            and constraint.reasoning is False
            and self.budget_tokens is not None
        ):
            what = "cannot be set where constraint.reasoning is false"
            yield FieldViolation("reasoning.budget_tokens", what)
        if constraint is not None and constraint.reasoning:
            if self.enabled is False:
                what = "cannot be true where reasoning.enabled is false"
                yield FieldViolation("constraint.reasoning", what)
            if chat is not None and chat.continue_final_message:
                what = "cannot be true beside chat.continue_final_message"
                yield FieldViolation("constraint.reasoning", what)


@dataclass(frozen=True, slots=True)
class GenerateRequest(CheckedFields):
    """One Generate call. Exactly one of ``text``, ``token_ids`` and ``chat`` must be set.

    ``sampling``, ``prompt``, ``output`` and ``reasoning`` may also be mappings of their fields.
    ``timeout_s`` is the time left until the client's deadline, None without a deadline. The
    engine makes an id for a request whose ``request_id`` is empty. With a ``continuation`` the
    stream has only the events after it. ``resume_window_s`` is for gRPC's clients: how many seconds
    the request waits for a client that has lost its connection. ``background``: the request is
    computed only while its replica has no other to compute.

    Raises:
        InvalidRequest: a field is out of range, unless ``check`` is False; as `validate`.
        TypeError: a field has a value of a type that it cannot take.
    """

    TYPES: ClassVar = {
        "chat": instance(Chat, "an engine.Chat"),
        "sampling": options(SamplingParams),
        "constraint": instance(Constraint, "an engine.Constraint"),
        "prompt": options(PromptOptions),
        "output": options(OutputOptions),
        "continuation": instance(Continuation, "an engine.Continuation"),
        "reasoning": options(ReasoningOptions),
    }
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
    continuation: Continuation | None = None
    resume_window_s: float | None = None
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    background: bool = False
    check: InitVar[bool] = True

    @property
    def num_bytes(self) -> int:
        """About how much memory the input takes."""
        if self.chat is not None:
            return self.chat.num_bytes
        return len(self.text or "") + TOKEN_ID_BYTES * len(self.token_ids or ())

    @property
    def has_images(self) -> bool:
        """Whether the request's chat has images."""
        return self.chat is not None and next(self.chat.images, None) is not None

    @property
    def capability(self) -> Capability:
        """The capability that a model must have for the request."""
        return Capability.VISION if self.has_images else Capability.TEXT_TO_TEXT

    @property
    def image_bytes(self) -> int:
        """The bytes of the request's image files."""
        return 0 if self.chat is None else sum([len(data) for _, data in self.chat.images])

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        if self.has_images and self.prompt.truncate_to is not None:
            yield FieldViolation("prompt.truncate_to", "cannot be set beside images")
        given = [x for x in (self.text, self.token_ids, self.chat) if x is not None]
        if len(given) != 1:
            yield FieldViolation("input", "set exactly one of text, token_ids and chat")
        if self.chat is not None:
            yield from self.chat.violations()
        if self.token_ids is not None:
            if not self.token_ids:
                yield FieldViolation("token_ids.ids", "is empty")
            if self.prompt.add_special_tokens is not None:
                yield FieldViolation("prompt.add_special_tokens", "cannot be set beside token_ids")
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            yield FieldViolation("n", f"is {self.n}, outside [1, {MAX_CHOICES}]")
        yield from common_violations(self.priority, self.request_id, self.timeout_s)
        if self.constraint is not None:
            yield from _constraint_violations(self.constraint)
            if self.chat is not None and self.chat.must_call:
                what = f"cannot be {self.chat.tool_choice!r} beside a constraint"
                yield FieldViolation("chat.tool_choice", what)
        if self.prompt.truncate_to is not None and self.prompt.truncate_to < 1:
            yield FieldViolation("prompt.truncate_to", "must be at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self.output, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                yield FieldViolation(f"output.{name}", f"is {value}, outside [0, {MAX_LOGPROBS}]")
        yield from self.sampling.violations()
        yield from self.reasoning.violations(self.chat, self.constraint)
        if self.continuation is not None:
            yield from self.continuation.violations(self.n or 1, self.sampling.seed)
        if self.resume_window_s is not None:
            yield from _outside(
                "resume_window", self.resume_window_s, 0.0, MAX_RESUME_WINDOW_S, low_open=True
            )


def common_violations(
    priority: int | None, request_id: str, timeout_s: float | None
) -> Iterator[FieldViolation]:
    """Yield the broken fields among those that requests of all kinds share."""
    if priority is not None and not INT32[0] <= priority <= INT32[1]:
        yield FieldViolation("priority", "is not an int32")
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        what = f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
        yield FieldViolation("request_id", what)
    if timeout_s is not None and math.isnan(timeout_s):
        yield FieldViolation("timeout_s", "is not a number")


def validate_tokenize(text: str | None, chat: Chat | None) -> None:
    """Check the input of one Tokenize call.

    Raises:
        InvalidRequest: Not exactly one of ``text`` and ``chat`` is given, or the chat is broken.
        TypeError: One of them is neither a text nor a chat.
    """
    if not isinstance(text, str | None):
        raise wrong_type("text", "a text", text)
    if not isinstance(chat, Chat | None):
        raise wrong_type("chat", "an engine.Chat", chat)
    violations = [] if chat is None else list(chat.violations())
    if (text is None) == (chat is None):
        violations.append(FieldViolation("input", "set exactly one of text and chat"))
    if violations:
        raise InvalidRequest(violations)


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

    If the request asks for ``prompt_logprobs``, this event has them and comes with the first token.
    ``dropped`` are the messages left out of a truncated chat, oldest first. ``seed`` is the seed of
    the sampling, the client's own or drawn by the server; an encoder's requests have none.
    ``attach_token`` is for `Attach`; empty unless the request has a resume window.
    """

    request_id: str
    model: str
    prompt_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    dropped: tuple[Mapping[str, Any], ...] = ()
    seed: int | None = None
    attach_token: str = ""


class ToolCallDelta(NamedTuple):
    """A tool call, or the next part of one. ``position`` numbers the choice's calls; id and name
    are empty after the first part; ``arguments_json`` is appended to the call's JSON object."""

    position: int
    call_id: str
    name: str
    arguments_json: str


class AnswerTokens(Tokens):
    """The parsed output of one step for one choice of a chat.

    ``text`` is the answer's text alone, without the ``reasoning`` and the ``tool_calls`` that the
    model wrote (`engine.requests.text.answers.parser`).
    """

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def of(
        cls, tokens: Tokens, reasoning: str = "", tool_calls: tuple[ToolCallDelta, ...] = ()
    ) -> AnswerTokens:
        """Return ``tokens`` with reasoning and tool calls."""
        event = cls(*tokens)
        event.reasoning, event.tool_calls = reasoning, tool_calls
        return event

    def __repr__(self) -> str:
        own = f"reasoning={self.reasoning!r}, tool_calls={self.tool_calls!r}"
        return f"{super().__repr__()[:-1]}, {own})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AnswerTokens)
            and tuple(self) == tuple(other)
            and (self.reasoning, self.tool_calls) == (other.reasoning, other.tool_calls)
        )

    def __hash__(self) -> int:
        return hash((tuple(self), self.reasoning, self.tool_calls))


StreamEvent = Started | PromptProgress | Tokens | Finished
