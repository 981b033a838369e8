"""The protocol of workers that generate text, on top of `engine.worker.interface`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.core.text.plan import StepPlan, StepResult
from engine.status import Capability
from engine.worker.interface import Runner, WorkerInfo

if TYPE_CHECKING:
    from engine.core.text.types import Constraint
    from engine.images.preprocessor import Preprocessor


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
    """Describes a loaded text model; ``max_model_len`` is of prompt and output together."""

    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    images: Preprocessor | None = None  # Fits images; None: the model reads no images.
    kv_dtype: str = ""  # The KV pool's dtype, such as bfloat16.
    num_states: int = 0  # The number of state slots; 0: the model has no recurrent layers.
    pool_bytes: int = 0  # The size of one rank's KV pool.
    tool_format: str = "auto"  # The dialect of its tool calls; auto: its chat template's.

    @property
    def capability(self) -> Capability:
        """Vision if the model reads images, else text to text."""
        return Capability.TEXT_TO_TEXT if self.images is None else Capability.VISION

    @property
    def full_sequences(self) -> int:
        """How many sequences of ``max_model_len`` the KV pool holds at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """The size of the KV pool, of all ranks together."""
        return self.pool_bytes * self.tp


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Describes a loaded adapter. Adapters with the same ``digest`` have the same content, and so
    give the same answers. ``num_bytes`` is the device's memory that it takes."""

    digest: str
    num_bytes: int
    rank: int = 0  # The largest rank among the layers.
    num_layers: int = 0  # How many linear layers the adapter changes.


class Adapters(Protocol):
    """The adapters (LoRA) of one loaded text model. Each method is called from any thread, several
    at once, and during steps."""

    def measure(self, directory: str) -> int:
        """Return how many bytes of the device loading an adapter takes at most. May be called
        before the model has loaded.

        Raises:
            SpawnFailed: The adapter's small files show that `load` would fail.
        """

    def load(self, directory: str) -> AdapterInfo:
        """Load the adapter in a directory. A step may use it, by its digest, as soon as this
        returns. Loading the same content again takes no more memory, and needs one more `unload`.

        Raises:
            SpawnFailed: The adapter cannot be served with the model; one sentence says why.
            ShuttingDown, WorkerLost: The model was closed, or its process has ended.
        """

    def unload(self, digest: str) -> None:
        """Undo one `load` of this adapter, which is dropped when all its loads are undone."""


class TextRunner(Runner[StepPlan, StepResult, ModelInfo], Protocol):
    """A runner of a model that generates text. Its steps run the model, sample, turn tokens into
    text and match stop strings. It owns the KV pool, too."""

    @property
    def adapters(self) -> Adapters:
        """The model's adapters."""

    def compile(self, constraint: Constraint) -> int:
        """Compile a constraint for sequences that will be admitted with it; return an estimate of
        the bytes of the compiled form. Unlike the other methods, this one is called from several
        threads at once, and during steps.

        Raises:
            InvalidRequest: The constraint cannot be followed; the violation names the field.
            Unsupported: This model cannot follow any constraint.
        """

    def forget(self, constraint: Constraint) -> None:
        """Drop a compiled constraint. No sequence will be admitted with it unless it is compiled
        again. A constraint that is not compiled is ignored."""


@runtime_checkable
class RankRunner(Protocol):
    """A runner of one rank of a divided model."""

    @property
    def num_collectives(self) -> int:
        """How many collective operations this rank has begun. After a step that failed, the ranks
        can go on if all have begun equally many."""
