"""The values of generated text: a request with its sampling and stops, and what its steps report.

Rule 1: everything here is a frozen value that pickles without torch, except `ObservePrefixes`.
Rule 2: fields that a client left unset are resolved before (`engine.requests.text.values`). In a
`Request`, None only means that there is no deadline, or no constraint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.common.events import Event, KindEvent
from engine.core.common.types import CoreStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from re import Pattern

    from engine.core.common.types import DraftCounts, RequestId, SequenceId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, with every value resolved."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: faster draws, which `drawn_seed` seeds
    drawn_seed: int | None = None  # None: the runner's generator draws
    choice: int = 0  # the choice's index, which is part of a seeded draw (D10)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never holds
    logprobs: int | None = None  # alternatives with each token; 0: the chosen token alone
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen: ``temperature`` is 0."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Stops:
    """When a sequence ends; the worker decides this inside the step (D8).

    ``token_ids`` holds the model's end-of-sequence ids, unless the client ignores them.
    ``max_tokens`` is at least 1. A token in ``token_ids`` cannot be sampled before ``min_tokens``
    tokens exist. ``include``: the text keeps the stop string or stop token. ``skip_special`` leaves
    special tokens out of the text, except those in ``shown``.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    include: bool = False
    skip_special: bool = True
    shown: frozenset[int] = frozenset()


# The most tokens of reasoning beyond its budget, in which a sentence may end. Guess: two or three
# sentences.
MARGIN_MAX = 64


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer's reasoning is marked, and how long it may be (`engine.core.text.thought`).

    It goes from the text ``opening``, which is the beginning of the answer, or from a match of
    ``again`` anywhere, to one of ``closings``. A match with a named group opens none. ``begun`` is
    the beginning of the answer that the prompt has.
    With a ``budget`` of tokens, the tokens ``ending`` end it: where a sentence ends, once the
    budget is spent, and at `tokens_max` anywhere. None of ``shunned`` follows ``ending``.
    """

    opening: str
    closings: tuple[str, ...]
    begun: str = ""
    again: Pattern[str] | None = None
    budget: int | None = None
    ending: tuple[int, ...] = ()
    shunned: frozenset[int] = frozenset()

    @property
    def tokens_max(self) -> int:
        """The most tokens of reasoning, if there is a budget: it may be exceeded by a quarter."""
        budget = self.budget or 0
        return budget + min(MARGIN_MAX, budget // 4)


TOOLS_KIND = "tools"  # the kind of a constraint that the engine makes of a chat's tools


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the output must follow (D15). ``kind`` is json_schema, json_object, regex,
    lark, choice or structural_tag, which becomes lark, or `TOOLS_KIND`; ``source`` is its text, for
    a choice the texts joined by NUL, and for tools a Lark grammar.

    ``reasoning`` says whether the form begins behind the model's reasoning; None: in a chat with a
    model that reasons. The engine then sets ``lead``, a Lark grammar of the whole output, which
    names the form ``@form``.
    """

    kind: str
    source: str
    reasoning: bool | None = None
    lead: str = ""

    @property
    def field(self) -> str:
        """The path of the proto field that holds the constraint's text."""
        if self.kind == TOOLS_KIND:
            return "chat.tools"
        return "constraint.choice.choices" if self.kind == "choice" else f"constraint.{self.kind}"

    @property
    def field_path(self) -> str:
        """The path of the proto field by which the client asked for a constraint at all."""
        return "chat.tool_choice" if self.kind == TOOLS_KIND else "constraint"


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt: it takes the ``count`` tokens from position ``start`` on.

    Encoding it costs a step as much as ``cost`` tokens. ``digest`` is that of its content: images
    of one digest have the same encoding. ``is_whole``: one step computes all of its tokens, which
    attend to each other. ``content`` is what the worker encodes, a
    `engine.images.preprocessor.SeenImage`; nothing here looks into it.
    """

    start: int
    count: int
    cost: int
    digest: bytes
    is_whole: bool = False
    content: object = None

    @property
    def end(self) -> int:
        """The position behind the image's last token."""
        return self.start + self.count

    def is_inside(self, position: int) -> bool:
        """Return whether a border before this position lies inside the image."""
        return self.start < position < self.end


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the core schedules it: one prompt, and ``n`` choices.

    ``arrival`` and ``deadline`` are seconds of the engine's one clock (D18). The request with the
    lowest ``priority`` starts first. Requests share cached prefixes only within one ``cache_salt``;
    with ``bypass_prefix_cache`` a request neither reads nor publishes cached prefixes.
    ``adapter`` is the digest of the content of the adapter that computes it; "": the base model
    alone.

    ``outputs`` is empty unless the request continues another one: then it has, for each choice, the
    tokens that this choice has already, or None if it has ended. A choice that has not ended goes
    on behind its tokens, as after a preemption. ``speculates``: its tokens may be drafted, which
    changes none of them. ``images`` are the prompt's images, in the order of their positions.
    ``reasoning`` is None if none is counted. ``holder`` is the name of those among whom the machine
    is shared ("": all without a name), and ``weight`` its part beside others.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: Stops
    arrival: float
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    adapter: str = ""
    speculates: bool = True
    images: tuple[PromptImage, ...] = ()
    reasoning: Reasoning | None = None
    holder: str = ""
    weight: int = 1

    @property
    def choices(self) -> tuple[int, ...]:
        """The indices of the choices that have not ended; each becomes a sequence."""
        if not self.outputs:
            return tuple(range(self.n))
        return tuple([i for i, output in enumerate(self.outputs) if output is not None])

    @property
    def num_choices(self) -> int:
        """How many sequences the request becomes."""
        return len(self.choices) if self.outputs else self.n

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first new one: those of the prompt and of continued
        outputs."""
        return len(self.prompt) + sum([len(output or ()) for output in self.outputs])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens of the prompt and, at most, of every choice's output."""
        return len(self.prompt) + self.n * self.stops.max_tokens

    def journal_line(self) -> str:
        """Return the request in one stable line, without its prompt."""
        return (
            f"{self.request_id} prompt={len(self.prompt)} n={self.n} "
            f"max={self.stops.max_tokens} priority={self.priority}"
            + (f" continued={self.num_tokens - len(self.prompt)}" if self.outputs else "")
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a position; ``rank`` 0 is the likeliest."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and its alternatives. ``logprob`` is None for the first token of a
    prompt."""

    token_id: int
    text: str
    logprob: float | None
    alternatives: tuple[Alternative, ...] = field(default=())


class Tokens(NamedTuple):
    """The tokens that one step generated for one choice. ``text`` may be empty while a character is
    incomplete or a stop string may still form. ``is_last``: the choice ends with them."""

    request_id: RequestId
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    is_last: bool = False

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        ids = ",".join(map(str, self.token_ids))
        return f"  tokens {self.request_id}/{self.choice} {ids}"


@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """The worker has taken a continued choice's earlier tokens. ``text`` is their text, which the
    client has received: the next `Tokens` go on behind it."""

    LINE = "  replayed {0.request_id}/{0.choice}"
    request_id: RequestId
    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A sequence lost its blocks and will be recomputed; its output stays as it is."""

    LINE = "  preempted {0.request_id}/{0.choice} {0.sequence}"
    request_id: RequestId
    sequence: SequenceId
    choice: int


@dataclass(frozen=True, slots=True)
class TextStatistics(CoreStatistics):
    """A snapshot of a text model's scheduler.

    Blocks are of the KV pool, and states are the state slots of a model with recurrent layers, of
    which ``cached_states`` have a snapshot; without such layers they are 0. The other fields count
    since the start, ``prefix_queries`` and ``prefix_hits`` in tokens; ``drafts`` has each drafter's
    counts.
    """

    free_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    free_states: int = 0
    total_states: int = 0
    cached_states: int = 0
    completion_tokens_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    plans_discarded: int = 0
    drafts: tuple[DraftCounts, ...] = ()


# ---- inputs that only a text model's scheduler knows


class PrefixObserver(Protocol):
    """Follows which blocks of a prefix cache can be matched, outside any ``cache_salt``. Keys are
    those of `engine.core.common.core.PrefixLookup.keys_of`.

    The core calls it while it applies events and plans steps, so no method waits or raises.
    """

    def stored(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """Take note that a block with these ``tokens`` can be matched after the block with the key
        ``parent``; None stands for the beginning of a prompt."""

    def removed(self, key: bytes) -> None:
        """Take note that the block cannot be matched any more. `stored` was not called for the key
        if the block's request had a ``cache_salt``."""

    def cleared(self) -> None:
        """Take note that the prefix cache was emptied: no prompt finds a block in it."""


@dataclass(frozen=True, slots=True)
class ClientLeft(KindEvent):
    """The client of a request has lost its connection, and may come back."""

    LINE = "left {0.request_id}"
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientCame(KindEvent):
    """The client of a request that had lost its connection is back."""

    LINE = "came {0.request_id}"
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(KindEvent):
    """Forget every cached prefix; live sequences keep their blocks, which no longer match."""


@dataclass(frozen=True, slots=True)
class ObservePrefixes(KindEvent):
    """From now on, notify ``observer``, and no other one, of changes of the prefix cache."""

    observer: PrefixObserver
