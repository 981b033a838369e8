"""The vocabulary of the core: ids, sampling, stops, requests.

Rule 1: everything here is a frozen value that pickles without torch.
Rule 2: what a client may leave unset is resolved before it gets here (`engine.requests`);
a `Request` has no optional meaning left but "no deadline" and "no constraint".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
PlanId = NewType("PlanId", int)


class EndReason(Enum):
    """Why a choice ended. STOP and LENGTH are successes; each other one is a status."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    STALLED = "stalled"
    SHUTDOWN = "shutdown"
    FAILED = "failed"

    @property
    def is_success(self) -> bool:
        return self in (EndReason.STOP, EndReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, every value resolved. ``temperature`` 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the fastest sampler, not reproducible
    choice: int = 0  # the choice's index: part of a seeded draw (D10)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences the output never holds
    logprobs: int | None = None  # alternatives per token; 0: the chosen one only
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Stops:
    """When a sequence ends, all of it decided by the worker inside the step (D8).

    ``token_ids`` holds the model's end-of-sequence ids unless the client ignores them.
    ``max_tokens`` is at least 1; a token in ``token_ids`` cannot be sampled before
    ``min_tokens`` tokens exist. ``skip_special`` leaves special tokens out of the text, but for
    those ``shown``.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    include: bool = False
    skip_special: bool = True
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar the output must follow (D15): ``kind`` is json_schema, json_object, regex,
    lark or choice; ``source`` its text (choices joined by NUL)."""

    kind: str
    source: str

    @property
    def field(self) -> str:
        """The proto field that holds it."""
        return "constraint.choice.choices" if self.kind == "choice" else f"constraint.{self.kind}"


@dataclass(frozen=True, slots=True)
class Request:
    """What the core schedules: one prompt, ``n`` choices.

    ``arrival`` and ``deadline`` are seconds of the engine's one clock (D18). ``priority``:
    lower first. ``cache_salt`` separates prefix-cache entries; ``bypass_prefix_cache`` neither
    reads nor publishes them.
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one choice; ``cached_tokens`` were taken from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a choice spent in each phase; they add up to its life, from arrival to end.

    ``load_s`` is the wait for the model; ``queue_s`` all else before its prompt is computed, the
    making of its tokens too. The core alone counts both as queue.
    """

    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    parked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a live request is doing, and why. ``position`` 1 starts next, 0 is not in line;
    ``estimate_s``, until it starts, is None where that is not known or over. ``computed_tokens``
    have their KV values in the pool."""

    state: str
    waiting_for: str = ""
    position: int = 0
    estimate_s: float | None = None
    computed_tokens: int = 0
    blocks: int = 0
    parked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a position; ``rank`` 0 is the likeliest."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (None for the first prompt token) and its alternatives."""

    token_id: int
    text: str
    logprob: float | None
    alternatives: tuple[Alternative, ...] = field(default=())
