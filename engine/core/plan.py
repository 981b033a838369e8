"""What goes to a worker and what comes back (D8), and the `Runner` protocol.

Rule 1: every class here is a value that pickles without torch, so that a runner can live in a
child process. Rule 2: a plan is executed exactly once or failed exactly once.

`Row`, `RowResult` and the events made once per row and step are named tuples, the rest frozen
dataclasses: one of seven fields takes three times as long to make as a named tuple
(`python -m tools.bench primitives`), and the whole budget of plan + commit is 1.5 µs a row.

Index spaces: a *token position* counts a sequence's tokens from 0, prompt and output together;
a *block* is ``block_size`` consecutive positions' place in the KV pool; a *slot* is
``block_id * block_size + position % block_size``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.types import (
        BlockId,
        Constraint,
        EndReason,
        PlanId,
        Sampling,
        SequenceId,
        Stops,
        TokenLogprob,
    )
    from engine.errors import FieldViolation


# Positions of prompts that one step scores for their log-probabilities, all rows together, but at
# least one of each row: what bounds the memory of their logits. A guess: 64 rows of 151,936 are
# 39 MB, and a prompt of 2,048 tokens takes 32 steps.
SCORED_TOKENS_MAX = 64


class Logits(Enum):
    """Which positions of a row need logits: none (an unfinished prompt), the last (a token is
    sampled there), all (the same, and the others score the prompt's tokens after them), or all of
    an unfinished prompt, to score it (PROMPT)."""

    NONE = "none"
    LAST = "last"
    ALL = "all"
    PROMPT = "prompt"

    @property
    def samples(self) -> bool:
        """A token is sampled, from the row's last position."""
        return self is Logits.LAST or self is Logits.ALL

    @property
    def scores(self) -> bool:
        """The prompt's log-probabilities are computed, where it asks for them."""
        return self is Logits.ALL or self is Logits.PROMPT


class BlockDelta(NamedTuple):
    """How the worker's block table of a sequence changes before the step: keep the first
    ``keep`` blocks, drop the rest, append ``append``. A preempted sequence comes back with
    ``keep`` 0."""

    keep: int
    append: tuple[BlockId, ...] = ()


class Row(NamedTuple):
    """One sequence's part of a step: compute positions ``start … start + count - 1``.

    The worker knows the token ids: the prompt from `AdmittedSequence`, and what it sampled
    itself. With logits LAST or ALL the row ends at the sequence's last token and one token is
    sampled. A prompt whose log-probabilities are asked for has rows of PROMPT and ALL for every
    position but its last, until its first token is sampled.
    ``children`` (n > 1, on the row that completes the prompt) are sequences that fork here:
    each samples its own first token from the same logits; their blocks come as copies.
    ``blocks`` None: the block table is as the last step left it.
    """

    sequence: SequenceId
    start: int
    count: int  # type: ignore[assignment]  # the domain word, over tuple.count
    blocks: BlockDelta | None
    logits: Logits
    children: tuple[ChildFork, ...] = ()


_COUNT = itemgetter(Row._fields.index("count"))


class ChildFork(NamedTuple):
    """A choice that starts as a copy of its parent's prompt: its id, choice index and the
    whole block table it has after the step (shared full blocks, then its own copy)."""

    sequence: SequenceId
    choice: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence the worker sees for the first time; it keeps per-sequence state (tokens,
    sampler, detokeniser, constraint) until the id comes in ``released``."""

    sequence: SequenceId
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: Stops
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Order inside the worker: ``released``, ``admitted``, block tables, the
    forward over ``rows``, then ``copies`` (block to block: what a child of a row continues in
    is copied after the parent wrote it), then sampling."""

    plan_id: PlanId
    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    admitted: tuple[AdmittedSequence, ...] = ()
    released: tuple[SequenceId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the forward computes: the sum over the rows."""
        return sum(map(_COUNT, self.rows))


class RowResult(NamedTuple):
    """What one sequence got from a step.

    ``tokens`` is empty for an unfinished prompt. ``text`` is what may be shown now: never part
    of a UTF-8 character, never what could still become a stop string. ``finish`` is STOP or
    LENGTH on the last token, ``matched`` the stop string or stop token id that did it (None
    for LENGTH). ``prompt_logprobs`` come whole, with the first token of choice 0. ``cached`` is
    not here: the core knows it.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: EndReason | None = None
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that failed alone; the sequence got nothing from the step. ``phase`` is prefill,
    decode, sample or text (R52); ``detail`` is for the log only. ``violation`` is set where the
    request's own fields are the cause, and names one."""

    sequence: SequenceId
    phase: str
    detail: str
    violation: FieldViolation | None = None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Seconds inside the worker, by part."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    text_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each row of the plan and each child, in the plan's order (a row's children
    follow it)."""

    plan_id: PlanId
    rows: tuple[RowResult | RowFailure, ...]
    timings: StepTimings = field(default_factory=StepTimings)


class FailureKind(Enum):
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The whole step raised: nothing of the plan took effect but ``released`` and ``admitted``,
    which the next plan does not repeat."""

    plan_id: PlanId
    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What to load and where: everything a runner needs, in this or another process.

    ``model`` is a directory, a demo id or a Hugging Face id. ``kv_bytes`` bounds the KV pool;
    the runner turns it into blocks once it knows the model. ``memory_limit`` is what the
    process may use in bytes, for the arithmetic of start-up errors. 0 threads: the library's
    default.
    """

    model: str
    revision: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    block_size: int = 16
    kv_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    memory_limit: int = 0
    seed: int = 0
    quantization: str = "none"  # or "int8": weights of a byte each, and a scale for each output


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model's generation_config, as far as it says anything (None: it does not)."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded text model tells the rest of the house."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # prompt and output together, as served
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]
    memory_bytes: int  # weights, KV pool and workspace
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    is_demo: bool = False
    has_chat_template: bool = False
    threads: int = 0  # CPU threads that a step uses


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is; totals are 0 while unknown. ``phase``: config, weights, warm-up."""

    phase: str
    bytes_done: int = 0
    bytes_total: int = 0
    tensors_done: int = 0
    tensors_total: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a runner will need once it is loaded: weights, KV pool and workspace, in bytes of
    ``device``. ``limit`` is how many bytes may be used of it by all; None: as of the CPU."""

    num_bytes: int
    device: str = "cpu"
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the half-open range of characters of the input it came from."""

    token_id: int
    text: str
    start: int
    end: int


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back; safe to call from any thread.

    ``encode*`` raises `engine.errors.InvalidRequest` for text it cannot encode, ``render_chat``
    for messages the template refuses (the field named ``chat``).
    """

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    def encode_spans(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[TokenSpan, ...]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_args: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...

    def chat_template(self, *, has_tools: bool) -> str:
        """The source of the template that `render_chat` uses; empty where there is none."""
        ...

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """The ids of those texts that are special tokens."""
        ...


class Runner(Protocol):
    """Owns one model and its KV tensors; nobody else can reach them (D3).

    Methods are called one at a time, each from any thread: thread-local state (inference mode,
    thread count, device) is set inside every call.
    """

    def estimate(self) -> MemoryEstimate:
        """What `load` will need, from the model's metadata; reads no weights, keeps nothing.

        Raises:
            SpawnFailed: as `load`, as far as its metadata tell.
        """
        ...

    def load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        """Load weights, allocate the KV pool, warm up.

        Raises:
            SpawnFailed: the model cannot be served; one sentence says why. Nothing is kept.
        """
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; valid after `load`."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan: forward, sample, detokenise, match stops.

        Raises:
            MemoryError: the device ran out of memory; nothing of the plan took effect.
            Exception: any other failure of the whole step; the same.
        """
        ...

    def compile(self, constraint: Constraint) -> int:
        """Make a constraint ready for sequences that are admitted with it; how many bytes it
        takes, about. Called from other threads than the rest, several at once and during steps.

        Raises:
            InvalidRequest: it cannot be followed; the field is named.
            Unsupported: the model cannot follow any.
        """
        ...

    def forget(self, constraint: Constraint) -> None:
        """No sequence will be admitted with it any more, unless it is compiled again. Nothing for
        one that is not compiled."""
        ...

    def close(self) -> None:
        """Give weights and KV tensors back. Idempotent."""
        ...
