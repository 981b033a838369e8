"""The worker's interface: what the engine asks of whatever computes a model.

A *runner* owns one model. `Runner` is what runners of every kind of work have in common: estimate,
load, execute a plan, close. Each kind adds what it alone can do: a `TextRunner` compiles
constraints, an `EncodeRunner` has a tokenizer for inputs. A new kind of work is a new plan, a new
result, a new info and a protocol beside these two.

Rule 1: every value here pickles without torch, so that a runner can live in a process of its own.
Rule 2: this file imports no torch; the rest of `engine.worker` does.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from engine.core.encode.types import EncodePlan, EncodeResult, TokenizedInput
from engine.core.text.plan import StepPlan, StepResult
from engine.settings import ImageLimits, ModelChoices, ModelMemory, TextSteps
from engine.status import Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.core.text.types import Constraint
    from engine.images.fit import ImageFit
    from engine.images.sight import Sight


# ---- what a runner is made from, and what it reports while it loads


@dataclass(frozen=True)
class RunnerSpec(ModelChoices, ModelMemory, TextSteps, ImageLimits):
    """Which model to load, and with what resources. A spec is all that a runner is made from.

    ``model`` is a directory, a GGUF file, a demo id or a Hugging Face id. ``kv_bytes`` bounds the
    KV pool; the runner turns the bound into blocks once it knows the model. ``memory_limit`` is how
    many bytes the process may use; error messages of a load name it. ``threads`` 0 means the
    library's default.

    The runner is rank ``rank`` of the ``tp`` ranks of a divided model, which meet in the file
    ``rendezvous``; ``kv_bytes`` and ``memory_limit`` are those of all ranks together. With a ``tp``
    of 1, it computes the whole model.
    """

    model: str
    _: KW_ONLY
    kv_bytes: int | None = None
    memory_limit: int = 0
    rank: int = 0
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """How much memory a runner will need once it is loaded: weights, KV pool and workspace.

    ``num_bytes`` are bytes of ``device``. ``limit`` is how many bytes of that device all models
    together may use; None stands for the limit that the CPU's memory has. ``others`` is what the
    runner needs of other devices, where the ranks of its model have a device each.
    """

    num_bytes: int
    device: str = "cpu"
    limit: int | None = None
    others: tuple[MemoryEstimate, ...] = ()

    @property
    def by_device(self) -> tuple[MemoryEstimate, ...]:
        """What the runner needs of each device."""
        return (replace(self, others=()), *self.others)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is. ``phase`` is config, weights or warm-up; a total of 0 is not known yet."""

    phase: str
    bytes_done: int = 0
    bytes_total: int = 0
    tensors_done: int = 0
    tensors_total: int = 0


# ---- every runner

PlanT = TypeVar("PlanT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
InfoT = TypeVar("InfoT", covariant=True)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Describes a loaded model of any kind."""

    architecture: str  # the name of the model's class
    dtype: str  # of the weights, such as float32
    device: str  # such as cpu or cuda:0
    vocab_size: int  # ids of the model's embedding
    max_model_len: int  # tokens of one sequence or input, as served
    memory_bytes: int  # of the device, or of all devices of its ranks; workspace included
    _: KW_ONLY
    is_demo: bool = False  # one of the demos that come with the package
    threads: int = 0  # CPU threads that a step uses; 0: the runner does not say
    context_note: str = ""  # why max_model_len is less than the model's own length
    quantization: str = ""  # the form of the linear layers' weights, such as int8; "": the dtype's
    tp: int = 1  # processes that the model is divided among

    @property
    def capability(self) -> Capability:
        """What the model can do."""
        raise NotImplementedError

    @property
    def full_sequences(self) -> int:
        """How many sequences of ``max_model_len`` that memory holds at once; 0 if the runner keeps
        nothing between steps."""
        return 0


class Runner(Protocol[PlanT, ResultT, InfoT]):
    """Owns one model and its tensors, which nothing else can reach (D3).

    Life: 1. made, which holds nothing; 2. `estimate`, optional; 3. `load`; 4. `execute`, any number
    of times; 5. `close`. These methods are called one at a time, each from any thread. So a runner
    sets thread-local state (inference mode, thread count, device) inside every call.
    """

    def estimate(self) -> MemoryEstimate:
        """Return what `load` will need, from the model's metadata. No weights are read and nothing
        is kept.

        Raises:
            SpawnFailed: as `load` would, as far as the metadata show.
        """

    def load(self, progress: Callable[[LoadProgress], None]) -> InfoT:
        """Load the weights, allocate memory and warm up. ``progress`` is called from this thread.

        Raises:
            SpawnFailed: the model cannot be served; one sentence says why. Nothing is kept.
        """

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer for plain text and chats. Valid after `load`."""

    def execute(self, plan: PlanT) -> ResultT:
        """Compute one step.

        Raises:
            MemoryError: the device ran out of memory; nothing of the plan took effect.
            Exception: the whole step failed in another way; nothing of the plan took effect.
        """

    def close(self) -> None:
        """Free the weights and every other tensor. Idempotent."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the half-open range of characters of the input that it came from."""

    token_id: int
    text: str
    start: int
    end: int


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into token ids and back. Safe to call from any thread. ``max_chars_per_token`` are
    the most characters of a text that one token can stand for; infinity if that is not known."""

    max_chars_per_token: float

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of a text.

        Raises:
            InvalidRequest: the text cannot be encoded; the violation names the field ``text``.
        """

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> tuple[TokenSpan, ...]:
        """Return the tokens of a text with the characters each came from.

        Raises:
            InvalidRequest: as `encode`.
        """

    def encode_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[Callable[[], tuple[int, ...]]]:
        """Divide a long text into pieces, and return a function for each that makes its ids.

        Raises:
            InvalidRequest: as `encode`; the functions raise it, too.
        """

    def span_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[Callable[[], Sequence[TokenSpan]]]:
        """Divide a long text as `encode_jobs`, and return a function for each piece that makes its
        tokens as `encode_spans`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def is_known(self, token_id: int) -> bool:
        """Return whether the tokenizer has a token with this id. It may have some for which the
        model has no row."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_args: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt that the model's chat template makes of messages.

        Raises:
            InvalidRequest: the template refuses them; the violation names the field ``chat``.
        """

    def chat_template(self, *, has_tools: bool) -> str:
        """Return the source of the template that `render_chat` uses; empty if there is none."""

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids that a special token's text has as plain text."""

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""

    def added_id_of(self, text: str) -> int | None:
        """Return the id of a text that is one token beside the vocabulary, special or not; None for
        any other text."""


# ---- runners of text models


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling values of the model's generation_config; None where it has no value."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo(WorkerInfo):
    """Describes a text model once it is loaded; ``max_model_len`` is of prompt and output
    together."""

    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    images: Sight | None = None  # how it reads images; None: it reads none
    num_states: int = 0  # slots for states of recurrent layers, snapshots included; 0: it has none

    @property
    def capability(self) -> Capability:
        """What the model can do."""
        return Capability.TEXT_TO_TEXT if self.images is None else Capability.VISION

    @property
    def full_sequences(self) -> int:
        """How many sequences of ``max_model_len`` the KV pool holds at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Describes a loaded adapter. Adapters of one ``digest`` have the same content, and so give the
    same answers. ``num_bytes`` are those of the device that it takes."""

    digest: str
    num_bytes: int
    rank: int = 0  # the largest of its layers
    num_layers: int = 0  # linear layers that it changes


class Adapters(Protocol):
    """The adapters (LoRA) of one loaded text model. Each method is called from any thread, several
    at once, and during steps."""

    def measure(self, directory: str) -> int:
        """Return how many bytes of the device loading an adapter takes at most. May be called
        before the model has loaded.

        Raises:
            SpawnFailed: as `load`, as far as the adapter's small files show.
        """

    def load(self, directory: str) -> AdapterInfo:
        """Load the adapter in a directory. A step may use it, by its digest, as soon as this
        returns. Loading the same content again counts, and takes no more memory.

        Raises:
            SpawnFailed: it cannot be served with this model; one sentence says why.
            ShuttingDown, WorkerLost: the model is gone.
        """

    def unload(self, digest: str) -> None:
        """Drop an adapter, once this was called for its digest as often as `load` returned it."""


class TextRunner(Runner[StepPlan, StepResult, ModelInfo], Protocol):
    """A runner of a model that generates text. Its steps run the model, sample, turn tokens into
    text and match stop strings. It owns the KV pool, too."""

    @property
    def adapters(self) -> Adapters:
        """The model's adapters."""

    def compile(self, constraint: Constraint) -> int:
        """Make a constraint ready for sequences that will be admitted with it; return about how
        many bytes the compiled form takes. Unlike the other methods, this one is called from
        several threads at once, and during steps.

        Raises:
            InvalidRequest: the constraint cannot be followed; the violation names the field.
            Unsupported: this model cannot follow any constraint.
        """

    def forget(self, constraint: Constraint) -> None:
        """Drop a compiled constraint. No sequence will be admitted with it unless it is compiled
        again. A constraint that is not compiled is ignored."""


@runtime_checkable
class RankRunner(Protocol):
    """A runner of one rank of a divided model."""

    @property
    def num_collectives(self) -> int:
        """How many operations of all ranks together this one has begun. After a step that failed,
        the ranks can go on if they have begun equally many."""


# ---- runners of encoders


class EncoderKind(Enum):
    """What an encoder computes: a vector for each text, a vector for each text or image, or a score
    for each pair of texts."""

    EMBEDDING = "embedding"
    IMAGE_EMBEDDING = "image-embedding"
    RERANK = "rerank"


_CAPABILITIES = {
    EncoderKind.EMBEDDING: Capability.TEXT_EMBEDDING,
    EncoderKind.IMAGE_EMBEDDING: Capability.IMAGE_EMBEDDING,
    EncoderKind.RERANK: Capability.RERANK,
}


@dataclass(frozen=True, slots=True)
class EncoderInfo(WorkerInfo):
    """Describes an encoder once it is loaded. For a cross-encoder, ``max_model_len`` is of query
    and document together."""

    kind: EncoderKind
    dimensions: int = 0  # length of its vectors; 0 for a cross-encoder
    prompt_names: tuple[str, ...] = ()
    text_width: int = 0  # tokens to which the model pads each text, alone as in a batch; 0: none
    images: ImageFit | None = None  # how its images are fitted; None: it reads none

    @property
    def capability(self) -> Capability:
        """What the encoder can do."""
        return _CAPABILITIES[self.kind]


class EncoderTokenizer(Protocol):
    """Turns texts into inputs, and cuts those that are too long. Safe to call from any thread."""

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return one input for each text, with the named prompt before it. An empty name stands for
        the model's default prompt.

        Raises:
            InvalidRequest: a text cannot be encoded; the violation's field is its index.
        """

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Return one input for each document, the query first. Where both together are too long,
        the longer one is cut.

        Raises:
            InvalidRequest: as `encode_texts`; the field of the query is ``query``.
        """


class EncodeRunner(Runner[EncodePlan, EncodeResult, EncoderInfo], Protocol):
    """A runner of an encoder. It keeps nothing between steps. Except for the noise of float
    arithmetic, the result of a row does not depend on the other rows."""

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The tokenizer that makes the inputs of plans. Valid after `load`."""
