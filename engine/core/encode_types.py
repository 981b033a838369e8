"""The vocabulary of encoders: what is asked of them, what goes to their worker and comes back.

Rule 1: every class here is a value that pickles without torch (D8). Rule 2: an input is one
sequence of tokens, encoded once; a request has several, and each has one result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.plan import RowFailure, StepTimings

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from engine.core.plan import LoadProgress, MemoryEstimate, Tokenizer
    from engine.core.types import PlanId, RequestId, SequenceId


class EncoderKind(Enum):
    """What an encoder makes of an input: a vector, or of a pair of texts a score."""

    EMBEDDING = "embedding"
    RERANK = "rerank"


class EncodeInput(NamedTuple):
    """One input as the model reads it, special tokens included.

    ``type_ids`` has one number for each token, or is empty: all 0. The first ``prompt_tokens``
    are the model's own prompt, which some models leave out of their pooling.
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0


class TokenizedInput(NamedTuple):
    """An input after the cut to what the model takes; ``full_tokens`` is its length before it."""

    input: EncodeInput
    full_tokens: int


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How a result is finished. ``dimensions`` and ``normalize`` None: as the model has it."""

    dimensions: int | None = None
    normalize: bool | None = None
    raw_scores: bool = False


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """What an encoder's core schedules. At least one input, each of at least one token.

    ``arrival`` and ``deadline`` are seconds of the engine's one clock. ``priority``: lower first.
    """

    request_id: RequestId
    inputs: tuple[EncodeInput, ...]
    arrival: float
    options: EncodeOptions = field(default_factory=EncodeOptions)
    priority: int = 0
    deadline: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together."""
        return sum(len(one.token_ids) for one in self.inputs)


class EncodeRow(NamedTuple):
    """One input's part of a step: all of it."""

    sequence: SequenceId
    input: EncodeInput
    options: EncodeOptions


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """One step of an encoder over ``rows``, sorted by length, shortest first."""

    plan_id: PlanId
    rows: tuple[EncodeRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes when every row is padded to the longest."""
        return len(self.rows) * len(self.rows[-1].input.token_ids)


class EncodeRowResult(NamedTuple):
    """A vector of float32 or, of a cross-encoder, one score."""

    sequence: SequenceId
    values: array[float]


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """One entry for each row, in the plan's order."""

    plan_id: PlanId
    rows: tuple[EncodeRowResult | RowFailure, ...]
    timings: StepTimings = field(default_factory=StepTimings)


class Encoded(NamedTuple):
    """An output of the core: the result of input ``index``, of so many ``tokens``."""

    request_id: RequestId
    index: int  # type: ignore[assignment]  # the proto's word, over tuple.index
    values: array[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What a loaded encoder tells the rest of the house."""

    kind: EncoderKind
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens of one input; a query with its document
    memory_bytes: int
    dimensions: int = 0  # of its vectors; 0 for a cross-encoder
    prompt_names: tuple[str, ...] = ()
    is_demo: bool = False
    threads: int = 0  # CPU threads that a step uses


class EncoderTokenizer(Protocol):
    """Texts to inputs; safe to call from any thread. What is too long is cut.

    Raises:
        InvalidRequest: a text cannot be encoded; the violation's field is its index.
    """

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Inputs of texts, the named prompt (or, for "", the model's default) before each."""
        ...

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Inputs of a query with each document; of what is too long, the longer one is cut."""
        ...


class EncodeRunner(Protocol):
    """Owns one encoder; as `engine.core.plan.Runner`, with plans of inputs."""

    def estimate(self) -> MemoryEstimate:
        """What `load` will need, from the encoder's metadata; reads no weights, keeps nothing.

        Raises:
            SpawnFailed: as `load`, as far as its metadata tell.
        """
        ...

    def load(self, progress: Callable[[LoadProgress], None]) -> EncoderInfo:
        """Load the encoder and warm it up.

        Raises:
            SpawnFailed: it cannot be served; one sentence says why. Nothing is kept.
        """
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer for plain text; valid after `load`."""
        ...

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The tokenizer for inputs; valid after `load`."""
        ...

    def execute(self, plan: EncodePlan) -> EncodeResult:
        """Compute every row; what a row gets does not depend on the others but for float noise.

        Raises:
            MemoryError: the device ran out of memory. Exception: any other failure of the whole
                step. Nothing is kept of a step either way.
        """
        ...

    def close(self) -> None:
        """Give the weights back. Idempotent."""
        ...
