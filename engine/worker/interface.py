"""The worker's interface: the protocol between the engine and the code that computes a model.

A *runner* owns one model. `Runner` has the methods of runners of every kind of work: estimate,
load, execute a plan, close. Each kind adds its own: a `TextRunner` compiles constraints, an
`EncodeRunner` has a tokenizer for inputs. A new kind of work has a new plan, a new result, a new
info and a new protocol.

Rule 1: every value here and in the kinds' interfaces pickles without torch, so that a runner can be
in a process of its own. Rule 2: these files import no torch; other parts of `engine.worker` do.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from engine.settings import ImageLimits, ModelChoices, ModelMemory, TextSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.status import Capability


# ---- the input of a runner, and its reports before it is loaded


@dataclass(frozen=True)
class RunnerSpec(ModelChoices, ModelMemory, TextSteps, ImageLimits):
    """The model to load, and its resources. A spec is the only input of a runner's constructor.

    ``model`` is a directory, a GGUF file, a demo id or a Hugging Face id. ``kv_bytes`` bounds the
    KV pool; the runner turns the bound into blocks once it knows the model. ``memory_limit`` is the
    most bytes that the process may use, for the messages of a load. ``threads`` is the number of
    CPU threads of a step; 0: the library's default.

    The runner is rank ``rank`` of the ``tp`` ranks of a divided model, which find each other by the
    file ``rendezvous``; ``kv_bytes`` and ``memory_limit`` are those of all ranks together. With a
    ``tp`` of 1, it computes the whole model.
    """

    model: str
    _: KW_ONLY
    kv_bytes: int | None = None
    memory_limit: int = 0
    rank: int = 0
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory that a runner will need once it is loaded: weights, KV pool and workspace.

    ``num_bytes`` are bytes of ``device``. ``limit`` is the most bytes of that device for all models
    together; None: the limit of the CPU's memory. ``others`` are the needs of other devices, if the
    ranks of the model have a device each.
    """

    num_bytes: int
    device: str = "cpu"
    limit: int | None = None
    others: tuple[MemoryEstimate, ...] = ()

    @property
    def by_device(self) -> tuple[MemoryEstimate, ...]:
        """The needs of each device."""
        return (replace(self, others=()), *self.others)


@dataclass(frozen=True, slots=True)
class KvInspection:
    """The KV pool that a load would allocate, of numbers of ``dtype``. ``bytes_per_token`` are the
    bytes of a token in all layers. ``bytes_per_state`` is 0 without recurrent layers."""

    dtype: str
    bytes_per_token: int
    block_size: int
    num_blocks: int
    bytes_per_state: int = 0
    states_per_sequence: int = 0
    num_states: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of the whole pool, state slots included."""
        blocks = self.num_blocks * self.block_size * self.bytes_per_token
        return blocks + self.num_states * self.bytes_per_state

    def sequences(self, num_bytes: int, num_tokens: int) -> int:
        """Return how many sequences of so many tokens fit into so many bytes. A step's new states
        take as much again as the states."""
        states = self.states_per_sequence * self.bytes_per_state
        return max(0, num_bytes) // (self.sequence_bytes(num_tokens) + states)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pool that a sequence of ``num_tokens`` tokens occupies."""
        blocks = -(-num_tokens // self.block_size)
        states = self.states_per_sequence * self.bytes_per_state
        return blocks * self.block_size * self.bytes_per_token + states


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's kind, and the bytes that its parts will take on its device, by its small files and
    the headers of its weights. ``num_bytes`` is the sum of these bytes.

    Resident after a load are the weights, the tokenizer and what has been written of the KV pool;
    ``workspace_bytes`` are the most that a step takes beside them.
    """

    device: str
    architecture: str
    dtype: str  # the computation's, such as bfloat16
    stored: str  # the format and the types of the weights in their files
    file_bytes: int  # the size of the files of weights
    weight_bytes: int
    tokenizer_bytes: int
    workspace_bytes: int
    execution: str  # how it runs: compiled, or by which modules and why
    context_limit: int = 0  # tokens that the model allows; 0: not known before the load
    max_model_len: int = 0  # tokens of one sequence as served, which the pool holds
    kv: KvInspection | None = None
    draft_bytes: int = 0  # memory of the draft model, its own KV pool included
    adapter_bytes: int = 0  # memory of the adapters' numbers
    process_bytes: int = 0  # memory of the ranks' processes beside the model

    @property
    def load_bytes(self) -> int:
        """The bytes that stay in memory after a load, with the whole KV pool written."""
        pool = self.kv.num_bytes if self.kv else 0
        model = self.weight_bytes + self.tokenizer_bytes + pool + self.draft_bytes
        return model + self.adapter_bytes + self.process_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that a load reserves."""
        return self.load_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a load. ``phase`` is config, weights or warm-up; a total of 0 is not known
    yet."""

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
    dtype: str  # the weights' dtype, such as float32
    device: str  # its name, such as cpu or cuda:0
    vocab_size: int  # the number of ids of the model's embedding
    max_model_len: int  # the most tokens of one sequence or input, as served
    memory_bytes: int  # memory on the device, or on all ranks' devices; workspace included
    _: KW_ONLY
    is_demo: bool = False  # one of the demos that come with the package
    threads: int = 0  # CPU threads that a step uses; 0: unknown
    context_note: str = ""  # why max_model_len is less than the model's own length
    quantization: str = ""  # the form of the linear layers' weights, such as int8; "": the dtype's
    tp: int = 1  # processes that the model is divided among

    @property
    def capability(self) -> Capability:
        """The model's capability, by its kind of work."""
        raise NotImplementedError

    @property
    def full_sequences(self) -> int:
        """The number of sequences of ``max_model_len`` that the KV pool holds at once; 0 if the
        runner has no KV pool."""
        return 0

    @property
    def kv_bytes(self) -> int:
        """The size of the KV pool, of all ranks together; 0 if the runner has none."""
        return 0


class Runner(Protocol[PlanT, ResultT, InfoT]):
    """Owns one model and its tensors, which no other object can reach (D3).

    Life: the constructor, which loads nothing; optionally `estimate`; `load`; `execute`, any number
    of times; `close`. These methods are called one at a time, each from any thread. So a runner
    sets thread-local state (inference mode, thread count, device) inside every call.
    """

    def estimate(self) -> MemoryEstimate:
        """Return the memory that `load` will need, by the model's metadata. It reads no weights and
        keeps nothing.

        Raises:
            SpawnFailed: The metadata show that `load` would fail.
        """

    def load(self, progress: Callable[[LoadProgress], None]) -> InfoT:
        """Load the weights, allocate memory and warm up. ``progress`` is called from this thread.

        Raises:
            SpawnFailed: The model cannot be served; one sentence says why. All memory is freed.
        """

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer for plain text and chats. Valid after `load`."""

    def execute(self, plan: PlanT) -> ResultT:
        """Compute one step.

        Raises:
            MemoryError: The device ran out of memory; nothing of the plan took effect.
            Exception: The whole step failed in another way; nothing of the plan took effect.
        """

    def close(self) -> None:
        """Free the weights and every other tensor. Idempotent."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the half-open range of the input's characters that it stands for."""

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
        """Return the tokens of a text, each with its range of characters.

        Raises:
            InvalidRequest: as `encode`.
        """

    def encode_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[Callable[[], tuple[int, ...]]]:
        """Divide a long text into pieces, and return a function for each that returns its ids.

        Raises:
            InvalidRequest: as `encode`; the functions raise it, too.
        """

    def span_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[Callable[[], Sequence[TokenSpan]]]:
        """Divide a long text like `encode_jobs`, and return a function for each piece that returns
        its tokens like `encode_spans`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def is_known(self, token_id: int) -> bool:
        """Return whether the tokenizer has a token with this id. It may have tokens for which the
        model's embedding has no row."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_args: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of messages, rendered by the model's chat template.

        Raises:
            InvalidRequest: The template refuses them; the violation names the field ``chat``.
        """

    def chat_template(self, *, has_tools: bool) -> str:
        """Return the source of the template that `render_chat` uses; empty if there is none."""

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a special token's text, encoded as plain text."""

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""

    def added_id_of(self, text: str) -> int | None:
        """Return the id of a text that is an added token, special or not; None for any other
        text."""
