"""The registry of the engine's kinds of work.

A kind connects its core (`engine.core`), its runner's interface (`engine.worker.interface`), and
the streams and the preparation of its requests (`engine.requests`). The loop, the replica, the pool
and the supervisor use kinds only by two protocols, `engine.replica.replica.ReplicaKind` and
`engine.requests.kind.RequestKind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.config import EncoderConfig, ImageGenerationConfig, SchedulerConfig
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.image_generation.scheduler import ImageGenerationScheduler
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Tokens
from engine.requests.encode.classify_values import ClassifyRequest
from engine.requests.encode.feed import EmbedFeed
from engine.requests.encode.prepare import EncodeTools, InputPreparer
from engine.requests.encode.stream import EncodeStream
from engine.requests.encode.values import EmbedRequest, EmbedStreamRequest, RerankRequest
from engine.requests.image_generation.prepare import ImageGenerationPreparer
from engine.requests.image_generation.stream import ImageGenerationStream
from engine.requests.image_generation.values import DrawRequest
from engine.requests.text.compiled_constraints import CompiledConstraints
from engine.requests.text.prepare import TextPreparer, TextTools
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest
from engine.settings import share
from engine.status import Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.replica.threads import Threads
    from engine.requests.kind import Feeds
    from engine.requests.tasks import RequestTasks
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.encode.interface import EncoderInfo, EncodeRunner
    from engine.worker.image_generation.interface import ImageGenerationInfo, ImageGenerationRunner
    from engine.worker.text.interface import ModelInfo, TextRunner


@dataclass(frozen=True, slots=True)
class TextKind:
    """Implements `ReplicaKind` and `RequestKind` for generating text."""

    capabilities = (Capability.TEXT_TO_TEXT, Capability.VISION)
    request_types = (GenerateRequest,)
    default_threads = 0
    token_event = Tokens
    make_stream = TextStream
    feeds: ClassVar[Feeds] = {}
    make_preparer = TextPreparer

    def make_core(self, info: ModelInfo, config: EngineConfig, name: str) -> Scheduler:
        """Return the scheduler of one replica. Replicas of one ``name`` share prefix-cache keys if
        the numbers in their KV pools are alike."""
        seats = config.max_num_seqs
        if info.num_states:  # each sequence that runs has a state
            seats = min(seats, info.num_states)
        limits = share(
            SchedulerConfig,
            config,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=seats,
            cache_namespace=f"{name}/{info.kv_dtype}",
            num_states=info.num_states,
        )
        return Scheduler(limits)

    def make_tools(self, runner: TextRunner, threads: Threads) -> TextTools:
        """Return the parts of a runner that requests use: compiled constraints and adapters."""
        return TextTools(CompiledConstraints(runner, threads), getattr(runner, "adapters", None))


@dataclass(frozen=True, slots=True)
class EncodeKind:
    """Implements `ReplicaKind` and `RequestKind` for embedding, reranking and classifying."""

    capabilities = tuple(capability for capability in Capability if capability.encodes)
    request_types = (EmbedRequest, RerankRequest, ClassifyRequest)
    default_threads = 1
    token_event = None
    make_stream = EncodeStream
    feeds: ClassVar[Feeds] = {EmbedStreamRequest: EmbedFeed}

    def make_core(self, info: EncoderInfo, config: EngineConfig, name: str) -> EncodeScheduler:
        """Return the scheduler of one replica. ``name`` is not used."""
        limits = share(EncoderConfig, config, max_model_len=info.max_model_len)
        return EncodeScheduler(limits)

    def make_tools(self, runner: EncodeRunner, threads: Threads) -> EncodeTools:
        """Return the part of a loaded runner that the preparer uses: its tokenizer for inputs."""
        return EncodeTools(runner.encoder_tokenizer)

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> InputPreparer:
        """Return the preparer of one engine, which has its own queue for tokenising."""
        return InputPreparer(tokenizing.with_own_turns())


@dataclass(frozen=True, slots=True)
class ImageGenerationKind:
    """Implements `ReplicaKind` and `RequestKind` for drawing."""

    capabilities = (Capability.TEXT_TO_IMAGE,)
    request_types = (DrawRequest,)
    default_threads = 0
    token_event = None
    make_stream = ImageGenerationStream
    feeds: ClassVar[Feeds] = {}

    def make_core(
        self, info: ImageGenerationInfo, config: EngineConfig, name: str
    ) -> ImageGenerationScheduler:
        """Return the scheduler of one replica. ``name`` and ``info`` are not used."""
        return ImageGenerationScheduler(share(ImageGenerationConfig, config))

    def make_tools(self, runner: ImageGenerationRunner, threads: Threads) -> None:
        """Return None: requests use no part of a runner but its tokenizer."""

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> ImageGenerationPreparer:
        """Return the preparer of one engine."""
        return ImageGenerationPreparer(tokenizing)
